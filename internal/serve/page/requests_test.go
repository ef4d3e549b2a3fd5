package page

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

func TestARequestIsShownFromItsArrivalToItsEnd(t *testing.T) {
	b := newBench(t)
	at := time.Unix(1000, 0)
	x := &proxy.Exchange{Route: "/v1/chat/completions", Arrived: at, Worker: "none", Model: "m"}
	b.began("a", x)
	show := func() Request { return b.requests.list()[0] }
	if r := show(); r.End != EndRunning || r.Worker != nil || r.Duration != nil || r.At != 1000 {
		t.Errorf("on arrival: %+v", r)
	}
	decision := &router.Decision{Target: kv.Target{Key: kv.WorkerKey{Worker: 1, Rank: 2}, URL: "u"}, Tokens: 100, OverlapTokens: 64}
	b.Decided(x, &router.Pair{Decode: *decision})
	if r := show(); *r.Worker != 1 || r.Rank != 2 || r.PromptTokens != 100 || r.Predicted != 64 || r.Attempts != 1 || r.Model != "m" || r.PrefillWorker != nil {
		t.Errorf("decided: %+v", r)
	}
	b.Decided(x, &router.Pair{Decode: *decision, Prefill: router.Decision{Target: kv.Target{Key: kv.WorkerKey{Worker: 4}, URL: "u"}, Tokens: 100, OverlapTokens: 32}})
	if r := show(); *r.PrefillWorker != 4 || r.Predicted != 32 || r.Attempts != 2 {
		t.Errorf("shared: %+v", r)
	}
	x.Worker, x.Status, x.FirstChunk, x.Ending = "1", 200, at.Add(time.Second/4), policy.Finished
	x.Usage = proxy.Usage{Known: true, PromptTokens: 101, OutputTokens: 7, CachedKnown: true, CachedTokens: 32}
	b.Finished(x, at.Add(time.Second))
	if r := show(); r.End != EndDone || r.Status != 200 || *r.TTFT != 0.25 || *r.Duration != 1 || *r.Cached != 32 || *r.OutputTokens != 7 || r.PromptTokens != 101 || r.Explained {
		t.Errorf("at its end: %+v", r)
	}
}

func TestEndings(t *testing.T) {
	tests := []struct {
		name   string
		worker string
		status int
		ending policy.Ending
		want   string
	}{
		{"answered", "1", 200, policy.Finished, EndDone},
		{"cut", "1", 502, policy.Abandoned, EndFailed},
		{"failed within a stream", "1", 200, policy.Failed, EndFailed},
		{"the client left", "1", 499, policy.Abandoned, EndCancelled},
		{"nobody was there", "none", 503, policy.Abandoned, EndRefused},
		{"a bad request", "none", 400, policy.Abandoned, EndRefused},
		{"the worker does not like it", "1", 422, policy.Finished, EndRefused},
	}
	for _, test := range tests {
		if got := ending(&proxy.Exchange{Worker: test.worker, Status: test.status, Ending: test.ending}); got != test.want {
			t.Errorf("%s: %s, want %s", test.name, got, test.want)
		}
	}
}

// explained is a receipt of a decision between so many workers.
func explained(candidates int) *router.Receipt {
	chosen := uint64(0)
	r := &router.Receipt{Worker: &chosen, Explanation: policy.Explanation{Policy: "work"}}
	for i := range candidates {
		r.Candidates = append(r.Candidates, router.ReceiptCandidate{Worker: uint64(i), Score: &policy.Score{
			Total: -float64(i), Terms: []policy.Term{{Name: "first_token", Value: -1}, {Name: "copy", Value: 0}, {Name: "pushed", Value: 0}, {Name: "later", Value: 1}, {Name: "decode", Value: 2}, {Name: "others", Value: 3}, {Name: "slower", Value: 4}, {Name: "foreign", Value: 5}},
		}})
	}
	return r
}

func TestReceiptsTellTheSecondAndWhatCameBefore(t *testing.T) {
	b := newBench(t)
	x := &proxy.Exchange{Arrived: time.Now(), Status: 200, Worker: "0", Receipts: []*router.Receipt{explained(2), explained(3)}}
	x.Receipts[1].Candidates[1].Excluded = "ejected"
	b.Finished(b.began("a", x), time.Now())
	response, answer := b.send(t, "GET", "/ui/requests/a", "")
	var got struct {
		Candidates []any   `json:"candidates"`
		Worker     *uint64 `json:"worker_id,string"`
		Second     *Place  `json:"second"`
		Earlier    []any   `json:"earlier"`
		Request    Request `json:"request"`
	}
	if err := json.Unmarshal([]byte(answer), &got); err != nil || response.StatusCode != 200 || len(got.Candidates) != 3 || got.Second == nil || got.Second.Worker != 2 || len(got.Earlier) != 1 || got.Request.ID != "a" || !got.Request.Explained || *got.Worker != 0 {
		t.Errorf("%v %d %s", err, response.StatusCode, answer)
	}
	if response, _ := b.send(t, "GET", "/ui/requests/b", ""); response.StatusCode != 404 {
		t.Errorf("an unknown one: %d", response.StatusCode)
	}
	y := &proxy.Exchange{Arrived: time.Now(), Status: 200, Worker: "0"}
	b.Finished(b.began("c/d?", y), time.Now())
	if response, answer := b.send(t, "GET", "/ui/requests/c%2Fd%3F", ""); response.StatusCode != 200 || strings.Contains(answer, "candidates") {
		t.Errorf("one that nobody had explained: %d %s", response.StatusCode, answer)
	}
}

// TestIdsThatJavaScriptCannotCountAreTexts has workers whose ids only differ beyond
// what it counts exactly.
func TestIdsThatJavaScriptCannotCountAreTexts(t *testing.T) {
	b := newBench(t)
	const large = 1<<64 - 1
	receipt := explained(2)
	*receipt.Worker, receipt.Candidates[0].Worker, receipt.Candidates[1].Worker = large, large, large-1
	x := &proxy.Exchange{Arrived: time.Now(), Status: 200, Worker: "0", Receipts: []*router.Receipt{receipt, receipt}}
	b.began("a", x)
	b.Decided(x, &router.Pair{Decode: router.Decision{Target: kv.Target{Key: kv.WorkerKey{Worker: large}, URL: "u"}}})
	b.Finished(x, time.Now())
	_, answer := b.send(t, "GET", "/ui/requests/a", "")
	for _, want := range []string{`"worker_id":"18446744073709551615","candidates":[{"worker_id":"18446744073709551615",`, `{"worker_id":"18446744073709551614",`, `"second":{"worker_id":"18446744073709551614",`, `"worker":"18446744073709551615",`} {
		if !strings.Contains(answer, want) {
			t.Errorf("%s is not in %s", want, answer)
		}
	}
	if strings.Contains(answer, ":184467") {
		t.Errorf("a number is in %s", answer)
	}
	if text, _ := json.Marshal(Worker{Worker: large}); !strings.HasPrefix(string(text), `{"worker":"18446744073709551615"`) {
		t.Errorf("%s", text)
	}
}

func TestRequestsOfTheSameNameAreToldApart(t *testing.T) {
	b := newBench(t)
	for _, status := range []int{200, 503} {
		x := &proxy.Exchange{Arrived: time.Now(), Status: status}
		b.Finished(b.began("a", x), time.Now())
	}
	list := b.requests.list()
	for name, want := range map[string]int{list[0].Key: 503, list[1].Key: 200, "a": 503} {
		if receipt, ok := b.requests.receipt(name); !ok || receipt.Request.Status != want {
			t.Errorf("%s: %+v, want that with status %d", name, receipt, want)
		}
	}
}

func TestOnlyTheLastRequestsAreKept(t *testing.T) {
	b := newBench(t)
	at := time.Unix(1000, 0)
	var first uint64
	for i := range maxRequests + 5 {
		x := &proxy.Exchange{Arrived: at, Status: 200, Worker: "0", Model: strings.Repeat("m", 1000), Receipts: []*router.Receipt{explained(100)}}
		b.began(fmt.Sprint(i), x)
		if i == 0 {
			first = x.Serial
			continue // it runs on
		}
		b.Finished(x, at)
	}
	b.Finished(&proxy.Exchange{Serial: first, Arrived: at, Status: 200}, at) // its place has another one's
	list := b.requests.list()
	if len(list) != maxRequests || list[0].ID != fmt.Sprint(maxRequests+4) || list[maxRequests-1].ID != "5" || len(list[0].Model) != maxName {
		t.Errorf("%d requests from %s to %s", len(list), list[0].ID, list[len(list)-1].ID)
	}
	kept := 0
	for _, r := range list {
		if r.Explained {
			kept++
		}
	}
	if b.requests.weight > maxKept || kept != maxKept/101 {
		t.Errorf("%d receipts of %d candidates", kept, b.requests.weight)
	}
	if _, ok := b.requests.receipt("0"); ok {
		t.Error("the first one is still there")
	}
}

func TestDryRunsAreNotListed(t *testing.T) {
	b := newBench(t)
	for i := range 2 * maxDryRuns {
		receipt := explained(1)
		receipt.QueryOnly = true
		x := &proxy.Exchange{Arrived: time.Now(), Status: 200, Worker: "none", Receipts: []*router.Receipt{receipt}}
		b.Finished(b.began(fmt.Sprint("dry", i), x), time.Now())
	}
	if list := b.requests.list(); len(list) != 0 {
		t.Errorf("%d are listed", len(list))
	}
	if _, ok := b.requests.receipt(fmt.Sprint("dry", 2*maxDryRuns-1)); !ok {
		t.Error("the last one is gone")
	}
	if _, ok := b.requests.receipt("dry0"); ok {
		t.Error("the first one is kept")
	}
}

// TestThePageTakesAtMost8MB fills everything that the page keeps up to its bounds.
func TestThePageTakesAtMost8MB(t *testing.T) {
	before := testkit.LiveHeap()
	b := newBench(t, testKey)
	now := time.Now()
	for range maxViewers {
		b.viewers.join("a", now)
	}
	for i := range 2 * maxRequests {
		x := &proxy.Exchange{Arrived: now, Status: 200, Worker: "0", Model: strings.Repeat("m", 1000), Receipts: []*router.Receipt{explained(maxKept / maxRequests)}}
		b.began(fmt.Sprint(strings.Repeat("i", 250), i), x)
		b.requests.name(x.Serial, strings.Repeat("ü", maxPromptText))
		b.Finished(x, now)
	}
	text := func(int) string { return strings.Repeat("ü", maxText) }
	for i := range uint64(maxNodes) {
		b.prompts.add(testkit.BlockSize, testkit.Prompt(i, maxBlocks/maxNodes), now, text)
	}
	inFlight := map[string]int{}
	for i := range 500 {
		inFlight[fmt.Sprint(i)] = 1
	}
	for range steps {
		b.trends.step(metrics.Totals{FirstToken: metrics.Histogram{Bounds: make([]float64, 17), Counts: make([]uint64, 18)}}, 1, inFlight, now)
	}
	for i := range maxSessions {
		b.sessions.begin(now.Add(time.Duration(i)))
	}
	b.show()
	if nodes, blocks := b.prompts.nodes, b.prompts.blocks; nodes != maxNodes || blocks != maxBlocks || b.requests.weight < maxKept*9/10 || len(b.trends.inFlight) != maxTrendWorkers {
		t.Errorf("not full: %d nodes, %d blocks, %d candidates, %d workers", nodes, blocks, b.requests.weight, len(b.trends.inFlight))
	}
	if took := int64(testkit.LiveHeap()) - int64(before); took > 8<<20 {
		t.Errorf("the page takes %.1f MB", float64(took)/(1<<20))
	} else {
		t.Logf("the page takes %.1f MB", float64(took)/(1<<20))
	}
	b.Close()
}
