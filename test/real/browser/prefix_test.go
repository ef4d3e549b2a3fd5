package browser

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"testing"
	"time"
)

// TestBrowserBehindAPrefix looks at the page through a proxy that has it at a path of
// its own, and that loses the stream while the page is in the background.
func TestBrowserBehindAPrefix(t *testing.T) {
	s := startKeyed(t)
	to, err := url.Parse(s.Port)
	if err != nil {
		t.Fatal(err)
	}
	front := httptest.NewServer(http.StripPrefix("/inner", &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(to)
		r.Out.Host = r.In.Host
	}}))
	t.Cleanup(front.Close)
	b := startBrowser(t) // ends first, with its stream
	b.open(front.URL + "/inner/")
	b.until(10*time.Second, "the sign-in view", "document.querySelector('#key')")
	b.fill("#key", "open-sesame")
	b.click(".signin button")
	const ready = "document.querySelector('[data-field=status]')?.innerText === 'Ready'"
	b.until(10*time.Second, "the fleet", "document.querySelectorAll('.card').length === 1 && "+ready)
	if at := eval[string](b, "location.pathname"); at != "/inner/ui/" {
		t.Errorf("the page is at %s", at)
	}
	if focus := eval[string](b, "document.activeElement.id"); focus != "main" {
		t.Errorf("after the sign-in %q has the focus", focus)
	}
	hide := func(hidden string) {
		eval[bool](b, "(Object.defineProperty(document, 'hidden', {value: "+hidden+", configurable: true}), document.dispatchEvent(new Event('visibilitychange')))")
	}
	const streams = "performance.getEntriesByType('resource').filter(r => r.name.endsWith('/ui/stream')).length" // that have ended
	ended := eval[int](b, streams)
	hide("true")
	front.CloseClientConnections()
	b.until(5*time.Second, "the page has lost the stream", fmt.Sprintf("%s > %d", streams, ended))
	hide("false")
	b.until(10*time.Second, "the page goes on", "window.before ??= document.querySelector('.about').innerText, "+ready+" && document.querySelector('.about').innerText !== window.before")
}
