package browser

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// hostile are texts that run a script where a page takes them for HTML, for an attribute,
// for a URL or for a script.
var hostile = []string{
	`<img src=x onerror=window.pwned=1>`,
	`"><script>window.pwned=1</script>`,
	`</script><svg onload=window.pwned=1>`,
	`' onmouseover='window.pwned=1' autofocus onfocus='window.pwned=1`,
	`javascript:window.pwned=1//`,
	`${window.pwned=1}{{constructor.constructor('window.pwned=1')()}}`,
	`<iframe srcdoc="<script>parent.pwned=1</script>">`,
	`<a id=kvrouter href=javascript:window.pwned=1>x</a><form><input name=innerHTML>`,
}

// TestBrowserShowsHostileTextAsText: names of workers and models, prompts, answers of the
// test box and request ids are shown in every view, and none of them is anything but text.
func TestBrowserShowsHostileTextAsText(t *testing.T) {
	b := startBrowser(t)
	model := `<img src=x onerror=window.pwned=1>"'` + "`"
	workers := test.StartWorkers(t, len(hostile), "--speedup-ratio=20")
	var file strings.Builder
	file.WriteString("workers:\n")
	for i, name := range hostile {
		text, err := json.Marshal(name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&file, "  - url: %s\n    name: %s\n", workers.URL(i), strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(string(text)))
	}
	path := filepath.Join(t.TempDir(), "workers.yaml")
	if err := os.WriteFile(path, []byte(file.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	s := test.Start(t, "--engine=none", "--model="+test.BuiltinModel(t), "--served-model-name=mock", "--discovery=file:"+path, "--page-show-text", "--session-header=x-session", "--router-queue-policy=fair")
	s.WaitReady(len(hostile), 30*time.Second)
	// One more of a hostile model and state, which never answers.
	if status, answer := test.Post(t, s.Port+"/workers", fmt.Sprintf(`{"worker_id":7,"model_name":%q,"endpoint":"http://127.0.0.1:1","block_size":64,"kv_events_endpoint":"tcp://127.0.0.1:1"}`, model)); status != http.StatusCreated {
		t.Fatalf("%d %s", status, answer)
	}
	b.open(s.Port + "/")
	b.until(20*time.Second, "a card for each worker", fmt.Sprintf("document.querySelectorAll('.card').length === %d", len(hostile)+1))
	for _, text := range hostile {
		for range 2 {
			body, err := json.Marshal(map[string]any{"messages": []map[string]string{test.Message("user", strings.Repeat(text+" ", 60))}, "max_tokens": 4, "nvext": map[string]any{"agent_hints": map[string]any{"prefix_id": text}}})
			if err != nil {
				t.Fatal(err)
			}
			request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			for name, value := range map[string]string{"Content-Type": "application/json", web.HeaderRequest: text, "x-session": text, "x-llm-d-inference-fairness-id": text, "User-Agent": text, "x-prefix-id": text} {
				request.Header.Set(name, value)
			}
			response, err := http.DefaultClient.Do(request)
			if err != nil {
				t.Fatal(err)
			}
			if answer := readAll(t, response.Body); response.StatusCode != http.StatusOK {
				t.Fatalf("%s %.300s", response.Status, answer)
			}
		}
	}
	harmless := func(view string) {
		t.Helper()
		if eval[bool](b, "'pwned' in window") {
			t.Errorf("%s: a script ran", view)
		}
		if found := eval[string](b, `[...document.querySelectorAll("img, iframe, object, embed, form input[name=innerHTML], body script, #kvrouter, [onerror], [onload], [onfocus], [onmouseover], [srcdoc], a[href^='javascript:' i]")].map(e => e.outerHTML.slice(0, 200)).join("; ")`); found != "" {
			t.Errorf("%s: hostile text became %s", view, found)
		}
	}
	harmless("cards")
	b.until(10*time.Second, "hostile names on the cards", `document.querySelector("[data-view=fleet], main").textContent.includes("<") || [...document.querySelectorAll(".card h3")].some(h => h.title.includes("<img"))`)
	for _, view := range []struct{ name, hash, ready string }{
		{"requests", "#/requests", "document.querySelectorAll('tbody tr').length >= 8"},
		{"hostile request id", "#/requests/" + hostileURL(hostile[0]), "document.querySelector('main')"},
		{"tenants", "#/tenants", "document.querySelectorAll('[data-tenant]').length >= 8 && document.querySelector('main').textContent.includes('<img')"},
		{"cache", "#/cache", "document.querySelector('[data-node]') && document.querySelector('main').textContent.includes('<img')"},
		{"trends", "#/trends", "document.querySelector('[data-chart]') || document.querySelector('main').innerText.length > 50"},
		{"hostile view", "#/" + hostileURL(hostile[1]), "document.querySelector('main')"},
		{"try", "#/try", "document.querySelector('#try-text')"},
		{"fleet", "#/fleet", "document.querySelector('.card')"},
	} {
		eval[bool](b, fmt.Sprintf("(location.hash = %q, true)", view.hash))
		b.until(15*time.Second, view.name, view.ready)
		harmless(view.name)
	}
	eval[bool](b, "(location.hash = '#/requests', true)")
	b.until(5*time.Second, "a request", "document.querySelector('tbody tr a')")
	for i := range 5 {
		b.click(fmt.Sprintf("tbody tr:nth-child(%d) a", 3*i+1))
		b.until(10*time.Second, "its receipt", "document.querySelector('aside .candidate')")
		harmless("receipt")
	}
	b.open(s.Port + "/ui/#/try")
	b.until(5*time.Second, "the box", "document.querySelector('#try-text')")
	b.fill("#try-text", strings.Join(hostile, "\n"))
	b.click("#try-send")
	b.until(20*time.Second, "the answer's end", "document.querySelector('.timing')")
	harmless("test box")
	b.until(5*time.Second, "the hostile question as text", fmt.Sprintf("document.querySelector('.turns').textContent.includes(%q)", hostile[0]))
	b.clean(s.Port)
}

// hostileURL is a text in the fragment of an address.
func hostileURL(text string) string { return strings.ReplaceAll(text, "%", "%25") }
