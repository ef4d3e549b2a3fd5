package test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// pageKey is the router port's key in these tests.
const pageKey = "sesame"

// viewer is somebody who looks at the page.
type viewer struct {
	t      testing.TB
	base   string
	lines  *bufio.Reader
	latest page.State
}

// look opens the page's stream, which ends with the test.
func look(t *testing.T, base string) *viewer {
	t.Helper()
	request, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, base+"/ui/stream", nil)
	request.Header.Set("Authorization", "Bearer "+pageKey)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	if response.StatusCode != http.StatusOK {
		t.Fatalf("the stream: %s", response.Status)
	}
	return &viewer{t: t, base: base, lines: bufio.NewReader(response.Body)}
}

// until reads states until one is as wanted.
func (v *viewer) until(what string, is func(*page.State) bool) {
	v.t.Helper()
	event := ""
	for limit := time.Now().Add(20 * time.Second); time.Now().Before(limit); {
		line, err := v.lines.ReadString('\n')
		if err != nil {
			v.t.Fatalf("%s: the stream ended: %v", what, err)
		}
		if name, named := strings.CutPrefix(line, "event: "); named {
			event = strings.TrimSpace(name)
		}
		data, told := strings.CutPrefix(line, "data: ")
		if !told || event != "state" {
			continue
		}
		var state page.State
		if err := json.Unmarshal([]byte(data), &state); err != nil {
			v.t.Fatal(err)
		}
		if v.latest = state; is(&state) {
			return
		}
	}
	v.t.Fatalf("%s: never shown; last %+v", what, v.latest)
}

// send sends what the page's script would.
func (v *viewer) send(method, path, body string) (*http.Response, string) {
	v.t.Helper()
	request, _ := http.NewRequestWithContext(v.t.Context(), method, v.base+path, strings.NewReader(body))
	request.Header.Set("Authorization", "Bearer "+pageKey)
	request.Header.Set("X-Kvrouter-Page", "1")
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		v.t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		v.t.Fatal(err)
	}
	return response, string(answer)
}

// TestThePageShowsWhatTheMetricsSay looks from the page's own port.
func TestThePageShowsWhatTheMetricsSay(t *testing.T) {
	t.Parallel()
	port := testkit.FreePorts(t, 1)
	s := StartMocks(t, 2, "--router-api-key="+pageKey, "--api-key=other", fmt.Sprintf("--page-port=%d", port), "--page-show-text", "--block-size=16", "--policy=round-robin")
	v := look(t, fmt.Sprintf("http://127.0.0.1:%d", port))
	v.until("the first state", func(*page.State) bool { return true })
	const requests = 12
	for i := range requests {
		s.as("other", map[string]any{"messages": Say(fmt.Sprintf("%s%d", strings.Repeat("a page to look at ", 30), i%3)), "max_tokens": 4, "stream": i%2 == 0})
	}
	s.as("other", map[string]any{"model": "none such", "messages": Say("hi")})
	v.until("all requests", func(state *page.State) bool { return state.Totals.Requests == requests+1 && state.Totals.InFlight == 0 })
	s.Settle()
	v.until("one more state", func(*page.State) bool { return true })

	_, text := testkit.HTTPGet(t, s.OpenAI+"/metrics")
	metrics := testkit.ReadMetricsPage(string(text))
	totals := v.latest.Totals
	for name, shown := range map[string]uint64{
		"kvrouter_requests_total": totals.Requests, "kvrouter_prompt_tokens_total": totals.PromptTokens, "kvrouter_cached_tokens_reported_total": totals.CachedTokens,
		"kvrouter_overlap_tokens_predicted_total": totals.PredictedTokens, "kvrouter_predictions_total": totals.Compared,
	} {
		if sum(metrics, name) != float64(shown) || shown == 0 {
			t.Errorf("%s is %v, the page shows %d", name, sum(metrics, name), shown)
		}
	}
	if totals.CachedTokens == 0 || totals.Exact != totals.Compared || *v.latest.Rates.Exact != 1 || v.latest.Rates.TTFT50 == nil {
		t.Errorf("totals %+v, rates %+v", totals, v.latest.Rates)
	}
	for _, w := range v.latest.Workers {
		at := fmt.Sprintf(`{dp_rank="%d",worker_id="%d"}`, w.Rank, w.Worker)
		for name, shown := range map[string]int{"kvrouter_worker_blocks": w.Blocks, "kvrouter_worker_in_flight": w.InFlight, "kvrouter_worker_restarts_total": w.Restarts, "kvrouter_worker_prefill_tokens": w.PrefillTokens} {
			if got, there := metrics[name+at]; !there || got != float64(shown) {
				t.Errorf("%s%s is %v, the page shows %d", name, at, got, shown)
			}
		}
		answered := 0.0
		for series, value := range metrics {
			if strings.HasPrefix(series, "kvrouter_requests_total{") && strings.Contains(series, fmt.Sprintf(`worker_id="%d"`, w.Worker)) {
				answered += value
			}
		}
		if w.State != page.StateReady || w.Known != kv.Exact.String() || float64(w.Requests) != answered || w.Model != "mock" || w.EventLag == nil {
			t.Errorf("worker %d answered %v: %+v", w.Worker, answered, w)
		}
	}

	if list := v.latest.Requests; len(list) != requests+1 || list[0].End != page.EndRefused || list[0].Status != 404 {
		t.Errorf("%d requests are shown, the newest is %+v", len(list), list[0])
	}
	for _, r := range v.latest.Requests[1:] {
		_, answer := v.send("GET", "/ui/requests/"+r.ID, "")
		receipt := gjson.Parse(answer)
		if r.End != page.EndDone || !r.Explained || receipt.Get("worker_id").Uint() != *r.Worker || len(receipt.Get("candidates").Array()) != 2 || receipt.Get("request.id").String() != r.ID || r.Cached == nil || *r.Cached != r.Predicted || !strings.HasPrefix(r.Prompt, "a page to look at") {
			t.Errorf("%+v is explained by %s", r, answer)
		}
	}
	cache := v.latest.Cache.Nodes
	if len(cache) < 2 || cache[0].Hits != requests || cache[0].Parent != "" || len(cache[0].Workers) == 0 || !strings.Contains(cache[0].Text, "page to look") {
		t.Errorf("the cache is shown as %+v", cache)
	}
}

// TestHitRatesAreThoseOfTheWorkersThatHeldThePrompts: of a shared request that is the
// prefill worker.
func TestHitRatesAreThoseOfTheWorkersThatHeldThePrompts(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindNIXL, 1, 1, "--disagg-min-uncached-tokens=256", "--block-size=16")
	v := look(t, s.Port)
	cached, prompts := [2]float64{}, [2]float64{} // tokens of each worker
	rate := func(worker int) string { return fmt.Sprintf("%.6f", cached[worker]/prompts[worker]) }
	short, long := strings.Repeat("short ", 10), LongPrompt(0)[0]["content"]
	for i, c := range []struct {
		content string
		worker  int // that computes the prompt
	}{{long, 0}, {long + strings.Repeat(" and on", 80), 0}, {short, 1}, {short, 1}, {short, 1}} {
		s.Settle()
		response := s.as("", map[string]any{"messages": []any{map[string]any{"role": "user", "content": c.content}}, "max_tokens": 2})
		if response.StatusCode != http.StatusOK || (response.Header.Get(proxy.HeaderPrefillWorker) == "0") != (c.worker == 0) {
			t.Fatalf("request %d: %s, %v: %s", i, response.Status, response.Header, response.Text)
		}
		v.until("the request", func(state *page.State) bool {
			return state.Totals.Requests == uint64(i+1) && state.Totals.InFlight == 0
		})
		cached[c.worker] += float64(*v.latest.Requests[0].Cached)
		prompts[c.worker] += float64(v.latest.Requests[0].PromptTokens)
		for worker, w := range v.latest.Workers {
			got := "NaN"
			if w.HitRate != nil {
				got = fmt.Sprintf("%.6f", *w.HitRate)
			}
			if got != rate(worker) {
				t.Errorf("after request %d worker %d has the hit rate %s, want %s", i, worker, got, rate(worker))
			}
		}
	}
	if cached[0] == 0 || cached[1] == 0 || v.latest.Totals.ComparedTokens != uint64(prompts[0]+prompts[1]) {
		t.Errorf("%v of %v tokens were cached, totals %+v", cached, prompts, v.latest.Totals)
	}
}

func TestTryAndWhereOnThePage(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--router-api-key="+pageKey, "--api-key=other", "--decision-headers=false", "--page-show-text=false")
	v := look(t, s.Port)
	v.until("the first state", func(*page.State) bool { return true })
	ask := `{"model":"mock","stream":true,"max_tokens":5,"messages":[{"role":"user","content":"` + strings.Repeat("where would this go ", 40) + `"}]}`
	response, where := v.send("POST", "/ui/where", ask)
	if response.StatusCode != http.StatusOK || !gjson.Get(where, "query_only").Bool() || len(gjson.Get(where, "candidates").Array()) != 2 {
		t.Fatalf("%s %s", response.Status, where)
	}
	if n := s.InFlight(); n != 0 {
		t.Errorf("%d requests are booked by a dry run", n)
	}
	response, answer := v.send("POST", "/ui/try", ask)
	if response.StatusCode != http.StatusOK || !strings.HasPrefix(response.Header.Get("Content-Type"), "text/event-stream") || !strings.HasSuffix(answer, "data: [DONE]\n\n") {
		t.Fatalf("%s %s", response.Status, answer)
	}
	id := response.Header.Get(web.HeaderRequest)
	if _, receipt := v.send("GET", "/ui/requests/"+id, ""); gjson.Get(receipt, "request.output_tokens").Int() != 5 || gjson.Get(receipt, "request.end").String() != page.EndDone {
		t.Errorf("its receipt: %s", receipt)
	}
	v.until("the request that was tried, and no other", func(state *page.State) bool {
		return len(state.Requests) == 1 && state.Requests[0].ID == id && state.Requests[0].Prompt == ""
	})
	for _, node := range v.latest.Cache.Nodes {
		if node.Text != "" {
			t.Errorf("text is shown unasked: %+v", node)
		}
	}
	if response := s.as(pageKey, map[string]any{"messages": Say("hi")}); response.StatusCode != http.StatusUnauthorized {
		t.Errorf("the page's key opens the OpenAI port: %s", response.Status)
	}
	if response, answer := v.send("POST", "/ui/where", `{"model":"none such","prompt":"a"}`); response.StatusCode != http.StatusNotFound || !strings.Contains(answer, "none such") {
		t.Errorf("an unknown model: %s %s", response.Status, answer)
	}
}

func TestDrainAndResetOnThePage(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--router-api-key="+pageKey, "--policy=round-robin")
	v := look(t, s.Port)
	text := strings.Repeat("some words ", 60)
	chat := func() string {
		return s.as("", map[string]any{"messages": Say(text), "max_tokens": 1}).Worker
	}
	chat()
	chat()
	act := func(path string, want int) {
		t.Helper()
		if response, answer := v.send("POST", path, ""); response.StatusCode != want {
			t.Fatalf("%s: %s %s", path, response.Status, answer)
		}
	}
	act("/ui/workers/0/drain", http.StatusNoContent)
	v.until("worker 0 rests", func(state *page.State) bool { return state.Workers[0].State == page.StateCordoned })
	for range 4 {
		if worker := chat(); worker != "1" {
			t.Errorf("a request went to worker %s, and 0 rests", worker)
		}
	}
	act("/ui/workers/0/readmit", http.StatusNoContent)
	v.until("worker 0 is back", func(state *page.State) bool { return state.Workers[0].State == page.StateReady })
	act("/ui/workers/1/reset-cache", http.StatusNoContent)
	text = "hi" // an engine reports its reset with its next pass
	chat()
	chat()
	v.until("worker 1's blocks are gone", func(state *page.State) bool { return state.Workers[1].Blocks == 0 })
	act("/ui/workers/9/reset-cache", http.StatusNotFound)
	for _, path := range []string{"/debug/pprof/", "/debug/vars", "/"} {
		if response, _ := v.send("GET", path, ""); response.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", path, response.Status)
		}
	}
	if _, text := testkit.HTTPGet(t, s.OpenAI+"/"); !strings.Contains(string(text), s.Port+"/ui/") {
		t.Errorf("GET / of the OpenAI port: %s", text)
	}
}

func TestCrashOnThePage(t *testing.T) {
	t.Parallel()
	s := StartMocker(t, 1, "--router-api-key="+pageKey, "--restart-backoff-max=2s", "--mock=crash-every=3s")
	v := look(t, s.Port)
	v.until("worker 0 is down, or was", func(state *page.State) bool {
		w := state.Workers[0]
		return w.State == page.StateDown && strings.Contains(w.Why, mocker.ErrMockCrash.Error()) || w.Restarts > 0 && strings.Contains(w.Why, "restarted")
	})
	v.until("worker 0 is back", func(state *page.State) bool {
		return state.Workers[0].State == page.StateReady && state.Workers[0].Restarts > 0
	})
}

func TestTheDemoNeedsMockWorkersAndServesThem(t *testing.T) {
	t.Parallel()
	if text, err := Output(t, "--demo", "--engine=none"); err == nil || !strings.Contains(text, "--demo") || !strings.Contains(text, "--engine mocker") {
		t.Errorf("--demo without mock workers: %v, %s", err, text)
	}
	s := StartMocker(t, 2, "--demo", "--api-key=other", "--router-api-key="+pageKey)
	v := look(t, s.Port)
	v.until("traffic comes by itself", func(state *page.State) bool {
		return state.Demo && state.Totals.Requests > 5 && len(state.Cache.Nodes) > 0 && state.Rates.TTFT50 != nil
	})
}

// TestTopShowsTheFleet: one frame has the workers and requests of a router, as its
// metrics count them, and wants the router port's key.
func TestTopShowsTheFleet(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 3, "--router-api-key=secret")
	look := func(args ...string) (string, error) {
		t.Helper()
		return Output(t, append([]string{"top", "--router-url=" + s.Port, "--once"}, args...)...)
	}
	if text, err := look(); err == nil || !strings.Contains(text, "--router-api-key") {
		t.Errorf("without a key: %v, %s", err, text)
	}
	for i := range 4 {
		if a, err := s.Chat(t.Context(), LongPrompt(i%2), true, 8); err != nil || !a.Finished {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	s.Settle()
	var text string
	testkit.Eventually(t, 20*time.Second, "the four requests are shown", func() bool {
		var err error
		if text, err = look("--router-api-key=secret"); err != nil {
			t.Fatal(err)
		}
		return strings.Contains(text, " 4 requests ")
	})
	if !strings.Contains(text, "3 of 3 workers") || strings.Contains(text, "\x1b") {
		t.Errorf("%q", text)
	}
	for i := range 3 {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^%d +ready +0 .*%s$`, i, regexp.QuoteMeta(s.URL(i)))).MatchString(text) {
			t.Errorf("worker %d is not shown as ready:\n%s", i, text)
		}
	}
}
