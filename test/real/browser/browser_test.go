package browser

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdplog "github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// Environment variables of the tests in a browser: without the first they are skipped,
// and the second names a folder for a picture of each view.
const (
	envPage     = "KVROUTER_PAGE"
	envPictures = "KVROUTER_PAGE_PICTURES"
)

// browser is a tab of Chromium, and what went wrong in it.
type browser struct {
	t   *testing.T
	ctx context.Context

	mu       sync.Mutex // guards the rest
	problems []string   // errors of the console, exceptions, addresses that the policy refused
	hosts    map[string]bool
}

// startBrowser starts Chromium, which ends with the test. It skips a test that
// `make test-page` does not run.
func startBrowser(t *testing.T) *browser {
	t.Helper()
	if os.Getenv(envPage) == "" {
		t.Skip("make test-page runs it")
	}
	path := ""
	for _, name := range []string{"google-chrome", "chromium-browser", "chromium"} { // the last one that there is
		if found, err := exec.LookPath(name); err == nil {
			path = found
		}
	}
	if path == "" {
		t.Fatal("no chromium: make test-page installs it")
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox, chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-component-update", true), chromedp.Flag("hide-scrollbars", true))
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewContext(ctx)
	t.Cleanup(cancel)
	b := &browser{t: t, ctx: ctx, hosts: map[string]bool{}}
	if err := chromedp.Listen(ctx, b.heard); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { chromedp.Cancel(ctx) })
	return b
}

// heard notes what is wrong with the page, and whom it asks.
func (b *browser) heard(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch event := event.(type) {
	case *network.EventRequestWillBeSent:
		if at, err := url.Parse(event.Request.URL); err == nil && at.Scheme != "data" && at.Scheme != "about" {
			b.hosts[at.Host] = true
		}
	case *runtime.EventExceptionThrown:
		b.problems = append(b.problems, fmt.Sprintf("exception: %v", event.ExceptionDetails))
	case *runtime.EventConsoleAPICalled:
		if event.Type == "error" || event.Type == "warning" {
			b.problems = append(b.problems, fmt.Sprintf("console: %v", event.Args))
		}
	case *cdplog.EventEntryAdded:
		// that an answer was no success is said by the test that asked for it
		if event.Entry.Level == "error" && !strings.Contains(event.Entry.Text, "the server responded with a status of 401") {
			b.problems = append(b.problems, fmt.Sprintf("log: %s %s", event.Entry.Text, event.Entry.URL))
		}
	}
}

// run is t.Run of a subtest in the browser.
func (b *browser) run(t *testing.T, name string, f func(t *testing.T)) {
	t.Run(name, func(sub *testing.T) {
		b.t = sub
		defer func() { b.t = t }()
		f(sub)
	})
}

// clean fails the test if anything went wrong, or another host than these was asked.
func (b *browser) clean(hosts ...string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, problem := range b.problems {
		b.t.Error(problem)
	}
	for _, host := range hosts {
		delete(b.hosts, strings.TrimPrefix(host, "http://"))
	}
	for host := range b.hosts {
		b.t.Error("the page asked", host)
	}
}

func (b *browser) open(url string) {
	b.t.Helper()
	if err := chromedp.Do(b.ctx, chromedp.Navigate("about:blank"), chromedp.Navigate(url)); err != nil {
		b.t.Fatal(err)
	}
}

// eval returns what a JavaScript expression gives, or the promise that it is.
func eval[T any](b *browser, expression string) T {
	b.t.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression, chromedp.EvalAwaitPromise))
	if err != nil {
		b.t.Fatalf("%s: %v", expression, err)
	}
	return value
}

// until waits until a JavaScript expression is true.
func (b *browser) until(limit time.Duration, what, expression string) {
	b.t.Helper()
	testkit.Eventually(b.t, limit, what, func() bool { return eval[bool](b, "!!("+expression+")") })
}

// text is what an element says; empty without one.
func (b *browser) text(selector string) string {
	b.t.Helper()
	return eval[string](b, fmt.Sprintf("(document.querySelector(%q)?.innerText || '').trim()", selector))
}

// click presses what a person would, as the keyboard does.
func (b *browser) click(selector string) {
	b.t.Helper()
	b.until(5*time.Second, selector+" can be pressed", fmt.Sprintf("document.querySelector(%q) && !document.querySelector(%[1]q).disabled", selector))
	eval[bool](b, fmt.Sprintf("(document.querySelector(%q).click(), true)", selector))
}

// fill types into a field.
func (b *browser) fill(selector, text string) {
	b.t.Helper()
	eval[bool](b, fmt.Sprintf("(() => { const f = document.querySelector(%q); f.value = %q; return f.dispatchEvent(new Event('input', {bubbles: true})) })()", selector, text))
}

// shownNumber is how the page begins what it writes of a number.
var shownNumber = regexp.MustCompile(`^(-?[0-9.]+) ?([kM]?)`)

// number reads what the page has written of a number, without its unit; NaN: none.
func number(text string) float64 {
	parts := shownNumber.FindStringSubmatch(strings.NewReplacer(",", "", "−", "-", "\u202f", " ").Replace(text))
	if parts == nil {
		return math.NaN()
	}
	n, err := strconv.ParseFloat(parts[1], 64)
	if err != nil {
		return math.NaN()
	}
	return n * map[string]float64{"": 1, "k": 1e3, "M": 1e6}[parts[2]]
}

// same reports whether a number on the page is the one that is known, as rounded there.
func same(shown string, want float64) bool {
	return math.Abs(number(shown)-want) <= math.Max(0.006, math.Abs(want)*0.006)
}

// keepBusy keeps a router busy with chats that share prefixes, from so many clients, until the
// returned function is called.
func keepBusy(t *testing.T, s *test.Router, clients int) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var all sync.WaitGroup
	for i := range clients {
		all.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for ctx.Err() == nil {
				group := rand.New(rand.NewPCG(2, uint64(random.IntN(6))))
				s.Chat(ctx, []map[string]string{test.Message("system", test.Words(group, 120+40*group.IntN(8))), test.Message("user", test.Words(random, 30+random.IntN(60)))}, true, 20+random.IntN(40))
			}
		})
	}
	return sync.OnceFunc(func() {
		cancel()
		all.Wait()
	})
}

// watched waits until decisions are explained: somebody must look for that.
func (b *browser) watched(s *test.Router, workers int) {
	b.t.Helper()
	b.open(s.Port + "/")
	b.until(10*time.Second, "a card for each worker", fmt.Sprintf("document.querySelectorAll('.card').length === %d", workers))
	b.until(5*time.Second, "the page says it is live", "document.querySelector('[data-field=status]').innerText === 'Ready'")
}

func TestBrowser(t *testing.T) {
	const workers = 4
	b := startBrowser(t)
	s := test.StartMocks(t, workers, "--speedup-ratio=2")
	b.watched(s.Router, workers)
	stop := keepBusy(t, s.Router, 6)
	defer stop()

	b.until(10*time.Second, "requests in flight on the cards", "[...document.querySelectorAll('.card [data-field=in_flight]')].some(f => Number(f.innerText) > 0)")
	b.until(30*time.Second, "more than a hundred requests", "Number(document.querySelector('.tile .more').innerText.split(' ')[0].replace(/\\D/g, '')) > 100")

	stop()
	testkit.Eventually(t, 10*time.Second, "all ended", func() bool { return s.InFlight() == 0 })
	b.run(t, "cards show what /metrics says", func(t *testing.T) { b.seesMetrics(t, s, workers) })
	if eval[bool](b, "!!document.querySelector('.cluster')") {
		t.Error("a router alone shows a cluster")
	}
	b.run(t, "a request and its receipt", func(t *testing.T) { b.seesReceipt(t, s) })
	b.run(t, "text stands out from its ground", func(t *testing.T) { b.standsOut(t, s) })
	b.run(t, "tenants and their accounts", func(t *testing.T) { b.seesTenants(t, s) })
	b.run(t, "the tree of prompts", func(t *testing.T) { b.seesTree(t, s) })
	b.run(t, "a worker is drained and readmitted", func(t *testing.T) { b.drains(t, s) })
	b.run(t, "the try box streams", func(t *testing.T) { b.tries(t, s) })
	t.Run("twenty look at once", func(t *testing.T) { lookAtOnce(t, s, 20) })
	b.run(t, "trends are drawn", func(t *testing.T) { b.seesTrends(t) })
	b.clean(s.Port)
}

// crash matches the log's line of a mock worker's crash.
var crash = regexp.MustCompile(`worker (\d+): simulated crash`)

// TestBrowserSeesACrash waits for the first worker's crash and for its card to say so,
// if only once it is back: between two states nobody sees it down.
func TestBrowserSeesACrash(t *testing.T) {
	const workers = 4
	b := startBrowser(t)
	s := test.StartMocker(t, workers, "--mock=crash-every=10s")
	b.watched(s, workers)
	state := func(worker int) string { return fmt.Sprintf(".card[data-worker='%d'] [data-field=state]", worker) }
	for worker := range workers {
		if said := b.text(state(worker)); said != "Ready" {
			t.Fatalf("worker %d is %s", worker, said)
		}
	}
	crashed := -1
	testkit.Eventually(t, 20*time.Second, "a worker's crash", func() bool {
		found := crash.FindStringSubmatch(s.Log.String())
		if found != nil {
			crashed, _ = strconv.Atoi(found[1])
		}
		return found != nil
	})
	b.until(2*time.Second, "the crash on the card", fmt.Sprintf("document.querySelector(%q).innerText !== 'Ready' || document.querySelector(\".card[data-worker='%d'] .why\")?.innerText.includes('restarted')", state(crashed), crashed))
	b.until(15*time.Second, "the worker's return on the card", fmt.Sprintf("document.querySelector(%q).innerText === 'Ready'", state(crashed)))
	if restarts := b.text(fmt.Sprintf(".card[data-worker='%d'] [data-field=restarts]", crashed)); restarts != "1" {
		t.Errorf("the card counts %s restarts", restarts)
	}
	b.clean(s.Port)
}

// seesMetrics holds the cards against the metrics page of an idle site.
func (b *browser) seesMetrics(t *testing.T, s *test.Mocks, workers int) {
	s.Settle()
	for _, field := range []struct{ name, metric string }{
		{"blocks", "kvrouter_worker_blocks"}, {"in_flight", "kvrouter_worker_in_flight"},
		{"prefill_tokens", "kvrouter_worker_prefill_tokens"}, {"restarts", "kvrouter_worker_restarts_total"},
	} {
		testkit.Eventually(t, 5*time.Second, field.name+" on each card as on /metrics", func() bool {
			lines := s.Metrics()
			for i := range workers {
				want, known := lines[fmt.Sprintf(`%s{dp_rank="0",worker_id="%d"}`, field.metric, i)]
				if !known || !same(b.text(fmt.Sprintf(".card[data-worker='%d'] [data-field=%s]", i, field.name)), want) {
					return false
				}
			}
			return true
		})
	}
	testkit.Eventually(t, 5*time.Second, "requests on each card as on /metrics", func() bool {
		ended := map[string]float64{}
		for series, n := range s.Metrics() {
			if strings.HasPrefix(series, "kvrouter_requests_total{") {
				_, id, _ := strings.Cut(series, `worker_id="`)
				id, _, _ = strings.Cut(id, `"`)
				ended[id] += n
			}
		}
		for i := range workers {
			if !same(b.text(fmt.Sprintf(".card[data-worker='%d'] [data-field=requests]", i)), ended[strconv.Itoa(i)]) {
				return false
			}
		}
		return true
	})
}

// seesReceipt sends a chat, and finds it in the list and explained.
func (b *browser) seesReceipt(t *testing.T, s *test.Mocks) {
	const id = "page-test-receipt"
	prompt := test.Words(rand.New(rand.NewPCG(3, 3)), 150)
	var got test.Answer
	for _, name := range []string{"page-test-before", id} { // the second finds what the first has left
		body, _ := json.Marshal(map[string]any{"messages": []map[string]string{test.Message("user", prompt)}, "max_tokens": 4})
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set(web.HeaderRequest, name)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		usage := gjson.Parse(readAll(t, response.Body)).Get("usage")
		got.Worker, _ = strconv.ParseUint(response.Header.Get(web.HeaderWorker), 10, 64)
		got.Predicted, _ = strconv.Atoi(response.Header.Get(web.HeaderOverlap))
		got.Prompt, got.Cached = int(usage.Get("prompt_tokens").Int()), int(usage.Get("prompt_tokens_details.cached_tokens").Int())
		s.Settle()
	}
	if got.Cached == 0 {
		t.Fatalf("nothing was cached: %+v", got)
	}
	eval[bool](b, "(location.hash = '#/requests', true)")
	row := "[data-request='" + id + "']"
	b.until(5*time.Second, "the request in the list", fmt.Sprintf("document.querySelector(%q) && document.querySelector(%q).innerText === 'done'", row, row+" [data-field=end]"))
	for field, want := range map[string]int{"worker": int(got.Worker), "prompt_tokens": got.Prompt, "predicted": got.Predicted, "cached": got.Cached} {
		if shown := b.text(row + " [data-field=" + field + "]"); number(shown) != float64(want) {
			t.Errorf("the list has %s %q, the answer said %d", field, shown, want)
		}
	}
	b.click(row + " a")
	b.until(5*time.Second, "the receipt", "document.querySelectorAll('aside .candidate [data-field=total]').length > 0")
	_, explained := testkit.HTTPGet(t, s.Port+"/ui/requests/"+id)
	receipt := gjson.ParseBytes(explained)
	if shown := b.text("aside [data-field=margin]"); !same(shown, receipt.Get("margin").Float()) {
		t.Errorf("the margin reads %q, it is %v", shown, receipt.Get("margin"))
	}
	for _, c := range receipt.Get("candidates").Array() {
		card := fmt.Sprintf("aside [data-candidate='%d/%d']", c.Get("worker_id").Int(), c.Get("dp_rank").Int())
		if shown := b.text(card + " [data-field=total]"); !same(shown, c.Get("total").Float()) {
			t.Errorf("%s has the total %q, it is %v", card, shown, c.Get("total"))
		}
		bars := 0
		for _, term := range c.Get("terms").Array() {
			if term.Get("value").Float() != 0 {
				bars++
			}
		}
		if shown := eval[int](b, fmt.Sprintf("document.querySelectorAll(%q).length", card+" .term")); shown != bars {
			t.Errorf("%s has %d bars for %d terms", card, shown, bars)
		}
	}
	for selector, want := range map[string]uint64{".chosen": receipt.Get("worker_id").Uint(), "li:nth-child(2)": receipt.Get("second.worker_id").Uint()} {
		if shown := b.text("aside .candidates " + selector + " strong"); shown != fmt.Sprintf("Worker %d", want) {
			t.Errorf("%s is %q, want worker %d", selector, shown, want)
		}
	}
	eval[bool](b, "document.querySelector('aside').dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
	b.until(2*time.Second, "Escape closes the receipt", "!document.querySelector('aside')")
	b.until(2*time.Second, "the focus is where the receipt came from", fmt.Sprintf("document.activeElement === document.querySelector(%q)", row+" a"))
}

// contrast lists texts whose colour is too near to that of their ground: a contrast
// below 4.5, which WCAG's level AA asks for. Grounds are mixed down to the page's.
const contrast = `(() => {
	const channels = (colour) => { const c = colour.match(/[\d.]+/g).map(Number); return [c[0], c[1], c[2], c[3] ?? 1]; };
	const over = (top, ground) => [0, 1, 2].map((i) => top[i] * top[3] + ground[i] * (1 - top[3]));
	const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
	const ground = (e) => e ? over(channels(getComputedStyle(e).backgroundColor), ground(e.parentElement)) : [255, 255, 255];
	const bad = new Set();
	const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	for (let n; (n = texts.nextNode()); ) {
		const e = n.parentElement;
		if (!n.data.trim() || !e.checkVisibility() || e.closest(":disabled, svg, .sr, option")) continue;
		const under = ground(e), a = light(over(channels(getComputedStyle(e).color), under)), b = light(under);
		const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
		if (ratio < 4.5) bad.add(e.className + ": " + n.data.slice(0, 30) + " " + ratio.toFixed(2));
	}
	return [...bad];
})()`

// standsOut reads all texts of some views in both colour schemes.
func (b *browser) standsOut(t *testing.T, s *test.Mocks) {
	for _, scheme := range []string{"light", "dark"} {
		b.like(1600, scheme)
		for _, view := range []string{"fleet", "requests/page-test-receipt", "tenants", "cache", "trends", "try"} {
			b.open(s.Port + "/ui/#/" + view)
			b.until(5*time.Second, view, "document.querySelector('.view:not([hidden])')")
			b.fits()
			for _, text := range eval[[]string](b, contrast) {
				t.Errorf("%s, %s: %s", view, scheme, text)
			}
			b.like(360, scheme)
			b.fits()
			b.like(1600, scheme)
		}
	}
	if err := chromedp.Do(b.ctx, chromedp.EmulateReset()); err != nil {
		t.Fatal(err)
	}
}

// seesTree holds the tree against the state that the stream reports.
func (b *browser) seesTree(t *testing.T, s *test.Mocks) {
	eval[bool](b, "(location.hash = '#/cache', true)")
	nodes := gjson.ParseBytes(firstState(t, s)).Get("cache.nodes").Array()
	if len(nodes) < 6 { // one for each group of the load at least
		t.Fatalf("the tree has %d nodes", len(nodes))
	}
	b.until(5*time.Second, "a row for each node", "document.querySelector('.cache .more button')?.click() || "+fmt.Sprintf("document.querySelectorAll('[data-node]').length === %d", len(nodes)))
	for _, node := range nodes {
		row := "[data-node='" + node.Get("id").String() + "']"
		for _, field := range []string{"tokens", "hits"} {
			if shown := b.text(row + " [data-field=" + field + "]"); number(shown) != node.Get(field).Float() {
				t.Errorf("%s has %s %q, it has %v", row, field, shown, node.Get(field))
			}
		}
	}
}

// seesTenants sends chats of two tenants, and holds the table against their accounts.
func (b *browser) seesTenants(t *testing.T, s *test.Mocks) {
	for i, tenant := range []string{"first", "second", "second"} {
		body, _ := json.Marshal(map[string]any{"messages": []map[string]string{test.Message("user", test.Words(rand.New(rand.NewPCG(5, uint64(i))), 40))}, "max_tokens": 4})
		request, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("x-llm-d-inference-fairness-id", tenant)
		request.Header.Set("x-llm-d-slo-ttft-ms", "60000")
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		readAll(t, response.Body)
	}
	eval[bool](b, "(location.hash = '#/tenants', true)")
	accounts := func() []gjson.Result {
		_, answer := testkit.HTTPGet(t, s.Port+"/tenants")
		return gjson.GetBytes(answer, "tenants").Array()
	}
	b.until(5*time.Second, "a row for each tenant", fmt.Sprintf("document.querySelectorAll('[data-tenant]').length === %d", len(accounts())))
	testkit.Eventually(t, 5*time.Second, "each row as GET /tenants", func() bool {
		for _, account := range accounts() {
			row := "[data-tenant='" + account.Get("tenant").String() + "']"
			for _, field := range []string{"requests", "prompt_tokens", "answered_tokens", "shed"} {
				if !same(b.text(row+" [data-field="+field+"]"), account.Get(field).Float()) {
					return false
				}
			}
		}
		return true
	})
	if kept := b.text("[data-tenant='second'] [data-field=kept]"); number(kept) != 100 {
		t.Errorf("the objectives kept read %q", kept)
	}
	if shown := eval[bool](b, "!!document.querySelector('[data-field=waiting]')"); shown {
		t.Error("requests wait in a fair queue that is off")
	}
}

// drains takes a worker out and back in, as a person does it.
func (b *browser) drains(t *testing.T, s *test.Mocks) {
	const card = ".card[data-worker='1']"
	eval[bool](b, "(location.hash = '#/fleet', true)")
	for _, step := range []struct{ ask, state string }{{"Drain worker 1?", "Cordoned"}, {"Readmit worker 1?", "Ready"}} {
		b.click(card + " footer button")
		b.until(2*time.Second, "a question", "document.querySelector('dialog[open] h2')")
		if asked := b.text("dialog h2"); asked != step.ask {
			t.Errorf("the page asks %q", asked)
		}
		b.click("dialog button.primary")
		b.until(5*time.Second, "worker 1 is "+step.state, fmt.Sprintf("document.querySelector(%q).innerText === %q", card+" [data-field=state]", step.state))
	}
}

// tries chats through the page, and asks where a chat would go.
func (b *browser) tries(t *testing.T, s *test.Mocks) {
	b.open(s.Port + "/ui/#/try")
	b.until(5*time.Second, "the box", "document.querySelector('#try-text')")
	prompt := test.Words(rand.New(rand.NewPCG(4, 4)), 200)
	eval[bool](b, `(() => {
		window.seen = [];
		new MutationObserver(() => {
			const said = document.querySelector(".turns .assistant .text")?.innerText || "";
			if (said !== window.seen.at(-1)) window.seen.push(said);
		}).observe(document.querySelector(".talk"), { subtree: true, childList: true, characterData: true });
		return true;
	})()`)
	b.fill("#try-text", prompt)
	b.click("#try-send")
	b.until(10*time.Second, "the answer's end", "document.querySelector('.timing')")
	if steps := eval[int](b, "window.seen.length"); steps < 10 {
		t.Errorf("the answer came in %d pieces", steps)
	}
	b.until(5*time.Second, "the receipt beside it", "document.querySelector('.beside .candidate.chosen') && document.querySelector('.beside [data-field=end]').innerText === 'done'")
	s.Settle()
	b.fill("#try-text", "Go on")
	b.click("#try-where")
	b.until(5*time.Second, "where it would go", "document.querySelector('.beside h2').innerText === 'Preview'")
	if said := b.text(".beside .summary"); !strings.HasPrefix(said, "Would be sent to worker ") {
		t.Errorf("the page says %q", said)
	}
	if s.InFlight() != 0 {
		t.Error("the question is booked")
	}
}

// seesTrends finds a drawn line in each chart.
func (b *browser) seesTrends(t *testing.T) {
	eval[bool](b, "(location.hash = '#/trends', true)")
	b.until(15*time.Second, "all charts", "document.querySelectorAll('.chart canvas').length === 7")
	for _, title := range []string{"Requests", "Time to first token", "Inter-token latency", "Hit rate", "Exact predictions", "In flight"} {
		if key := b.text(fmt.Sprintf("[data-chart='%s'] .keys .num", title)); math.IsNaN(number(key)) {
			t.Errorf("%s has the last value %q", title, key)
		}
	}
}

// firstState is the state that a viewer gets who comes now.
func firstState(t *testing.T, s *test.Mocks) []byte {
	t.Helper()
	var state []byte
	if err := follow(t.Context(), s, 1, func(data []byte) { state = bytes.Clone(data) }); err != nil {
		t.Fatal(err)
	}
	return state
}

// follow reads the stream for so many states.
func follow(ctx context.Context, s *test.Mocks, states int, heard func([]byte)) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, s.Port+"/ui/stream", nil)
	if err != nil {
		return err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 16<<20)
	for event := ""; states > 0 && lines.Scan(); {
		if name, is := strings.CutPrefix(lines.Text(), "event: "); is {
			event = name
		} else if data, is := bytes.CutPrefix(lines.Bytes(), []byte("data: ")); is && event == "state" {
			if !gjson.ValidBytes(data) {
				return fmt.Errorf("no JSON: %.100s", data)
			}
			heard(data)
			states--
		}
	}
	if states > 0 {
		return fmt.Errorf("status %d, %d states are missing: %w", response.StatusCode, states, errors.Join(lines.Err(), ctx.Err()))
	}
	return nil
}

// lookAtOnce has so many people look, who all see the same.
func lookAtOnce(t *testing.T, s *test.Mocks, viewers int) {
	const states = 3
	var mu sync.Mutex
	times := map[float64]int{} // states by their time
	var all sync.WaitGroup
	for range viewers {
		all.Go(func() {
			if err := follow(t.Context(), s, states, func(data []byte) {
				mu.Lock()
				defer mu.Unlock()
				times[gjson.GetBytes(data, "at").Float()]++
			}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if len(times) > 2*states+2 {
		t.Errorf("%d states were computed for %d viewers", len(times), viewers)
	}
}

// startKeyed starts a router over one worker whose page asks for the key open-sesame.
func startKeyed(t *testing.T) *test.Router {
	w := test.StartWorkers(t, 1)
	return test.Start(t, append([]string{"--engine=none", "--drain-timeout=5s", "--model=" + test.BuiltinModel(t), "--router-api-key=open-sesame"}, w.Attach()...)...)
}

func TestBrowserAsksForTheKey(t *testing.T) {
	b := startBrowser(t)
	s := startKeyed(t)
	b.open(s.Port + "/")
	b.until(10*time.Second, "the sign-in view", "document.querySelector('#key')")
	if dir := os.Getenv(envPictures); dir != "" {
		b.eachLook(pictureWidths, func(look string) { b.picture(filepath.Join(dir, "signin-"+look+".png")) })
	}
	b.fill("#key", "open-barley")
	b.click(".signin button")
	b.until(5*time.Second, "the refusal", "document.querySelector('[role=alert]')")
	if eval[bool](b, "!!document.querySelector('.card')") {
		t.Error("a wrong key shows the fleet")
	}
	b.fill("#key", "open-sesame")
	b.click(".signin button")
	b.until(10*time.Second, "the fleet", "document.querySelectorAll('.card').length === 1")
	if cookie := eval[string](b, "document.cookie"); cookie != "" {
		t.Errorf("a script can read %q", cookie)
	}
	if kept := eval[string](b, "JSON.stringify([location.href, {...localStorage}, {...sessionStorage}])"); strings.Contains(kept, "sesame") {
		t.Errorf("the browser keeps the key: %s", kept)
	}
	b.click(".right button")
	b.until(5*time.Second, "the sign-in view again", "document.querySelector('#key')")
	b.clean(s.Port)
}

// like sets a width and a colour scheme.
func (b *browser) like(width int64, scheme string) {
	b.t.Helper()
	size := emulation.SetDeviceMetricsOverrideParams{Width: width, Height: width * 5 / 8, DeviceScaleFactor: 1}
	if width < 500 { // a telephone
		size.Height, size.DeviceScaleFactor = 780, 2
	}
	media := emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}}
	_, err := chromedp.Call(b.ctx, emulation.SetDeviceMetricsOverride, size)
	if _, worse := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, media); err != nil || worse != nil {
		b.t.Fatal(err, worse)
	}
}

// eachLook sets widths and colour schemes in turn.
func (b *browser) eachLook(widths []int64, f func(look string)) {
	b.t.Helper()
	for _, width := range widths {
		for _, scheme := range []string{"light", "dark"} {
			b.like(width, scheme)
			f(fmt.Sprintf("%d-%s", width, scheme))
		}
	}
	if err := chromedp.Do(b.ctx, chromedp.EmulateReset()); err != nil {
		b.t.Fatal(err)
	}
}

// fits fails the test if the window would have to be scrolled sideways.
func (b *browser) fits() {
	b.t.Helper()
	if over := eval[int](b, "Math.ceil(document.documentElement.scrollWidth - document.documentElement.clientWidth)"); over > 0 {
		b.t.Errorf("%s is %d pixels too wide", eval[string](b, "location.hash"), over)
	}
}

// readAll reads an answer's body and closes it.
func readAll(t *testing.T, body io.ReadCloser) string {
	t.Helper()
	defer body.Close()
	text, err := io.ReadAll(body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
