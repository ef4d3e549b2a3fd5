package browser

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit/kubetest"
	"kvrouter/test"
)

// TestBrowserShowsDiscoveredWorkers: by their names, cut where they are long, with one
// that drains and one that is not ready; in no width a view has to be scrolled sideways.
// A picture of each goes where envPictures says.
func TestBrowserShowsDiscoveredWorkers(t *testing.T) {
	names := []string{
		"vllm-7d9f8c6b5-x2x9q", "vllm-7d9f8c6b5-4mmtl", "llama-3-70b-instruct-decode-6c8d9f7b5-kq8zn-rank-3",
		"llama-3-70b-instruct-decode-6c8d9f7b5-" + strings.Repeat("w", 215),
	}
	const draining, unready = 1, 2
	b := startBrowser(t)
	pods := test.StartCluster(t, test.StartWorkers(t, len(names), "--speedup-ratio=2"))
	for i, name := range names {
		pods.Worker(i, name, nil)
	}
	s := test.Start(t, "--engine=none", "--drain-timeout=5s", "--model="+test.BuiltinModel(t), "--served-model-name=mock", "--discovery=kubernetes", "--selector=app=vllm")
	s.WaitReady(len(names), 30*time.Second)
	b.watched(s, len(names))
	stop := keepBusy(t, s, 4)
	defer stop()
	b.until(30*time.Second, "requests of each", "[...document.querySelectorAll('.card [data-field=requests]')].every(f => Number(f.innerText) > 0)")
	pods.Worker(draining, names[draining], func(p *kubetest.Pod) { p.Ending = true })
	pods.Worker(unready, names[unready], func(p *kubetest.Pod) { p.NotReady = true })
	for _, held := range []struct {
		worker           int
		class, said, why string
	}{{draining, "draining", "Draining", "in-flight requests"}, {unready, "not-ready", "Not ready", "discovery reports"}} {
		b.until(20*time.Second, names[held.worker]+" is "+held.said, fmt.Sprintf(`(() => {
			const card = document.querySelector('.card.state-%s');
			return card && card.querySelector('h3').title.startsWith(%q) && card.querySelector('[data-field=state]').innerText === %q && card.querySelector('.why').innerText.includes(%q);
		})()`, held.class, names[held.worker], held.said, held.why))
	}
	if said := b.text(".card.state-not-ready h3"); said != "llama-3-70b-ins…kq8zn-rank-3" {
		t.Errorf("a long name is shown as %s", said)
	}
	b.until(10*time.Second, "requests that name their workers", fmt.Sprintf("(location.hash = '#/requests', [...document.querySelectorAll('[data-field=worker] .chipw')].some(c => c.innerText === %q))", names[0]))
	b.eachLook(pictureWidths, func(look string) {
		for _, view := range []struct{ name, hash, ready string }{
			{"fleet", "#/fleet", "document.querySelector('.card')"},
			{"requests", "#/requests", "document.querySelector('tbody tr')"},
			{"receipt", "", "document.querySelector('aside .candidate')"},
			{"cache", "#/cache", "document.querySelector('[data-node]')"},
			{"confirm", "#/fleet", "document.querySelector('dialog[open]') || document.querySelector('.card:not(.state-draining) button').click()"},
		} {
			if view.hash == "" {
				b.click("tbody tr:nth-child(12) a")
			} else {
				eval[bool](b, "(location.hash = '"+view.hash+"', true)")
			}
			b.until(10*time.Second, view.name, view.ready)
			b.fits()
			if dir := os.Getenv(envPictures); dir != "" && filepath.Base(dir) != "docs" {
				b.picture(filepath.Join(dir, "names-"+view.name+"-"+look+".png"))
			}
			if view.name == "confirm" {
				b.click("dialog button")
			}
		}
	})
	b.clean(s.Port)
}
