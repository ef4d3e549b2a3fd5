package browser

import (
	"fmt"
	"testing"
	"time"

	"kvrouter/test"
)

// TestBrowserShowsManyWorkers: of many workers a part is drawn, the search finds the others,
// and further ones come when asked for. No worker answers.
func TestBrowserShowsManyWorkers(t *testing.T) {
	const workers, drawn = 250, 96
	b := startBrowser(t)
	flags := []string{"--engine=none", "--drain-timeout=5s", "--served-model-name=m"}
	for i := range workers {
		flags = append(flags, fmt.Sprintf("--worker=url=http://127.1.%d.%d:9,id=%d", i/200, 1+i%200, i))
	}
	s := test.Start(t, flags...)
	b.open(s.Port + "/")
	cards := func(n int) string { return fmt.Sprintf("document.querySelectorAll('.card').length === %d", n) }
	b.until(20*time.Second, "some cards", cards(drawn))
	if said := b.text("p.more"); said != "Show 96 more 154 not shown" {
		t.Errorf("below the cards it says %q", said)
	}
	b.fill("#find-worker", "http://127.1.1.50:9")
	b.until(5*time.Second, "the worker that is searched for", cards(1)+" && document.querySelector('.card').dataset.worker === '249'")
	b.fill("#find-worker", "")
	b.until(5*time.Second, "the cards again", cards(drawn))
	b.click("[data-action=more]")
	b.until(5*time.Second, "more cards", cards(2*drawn))
	b.click("[data-action=more]")
	b.until(5*time.Second, "all cards", cards(workers)+" && !document.querySelector('p.more')")
	b.clean(s.Port)
}
