package test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/collector"
)

// cellKeys are the keys of a cell: that of the router above, and another client's.
const cellKeys = `
- {name: upper, key: key-upper, trust-hints: true}
- {name: stranger, key: key-stranger}
`

// startAbove starts a router over cells, whose key is key-upper, with env beside the environment.
// It waits until it follows all of them.
func startAbove(t *testing.T, env []string, below []*Router, args ...string) *Router {
	t.Helper()
	all := []string{"--engine=none", "--drain-timeout=5s", "--model=" + BuiltinModel(t), "--served-model-name=mock"}
	for _, cell := range below {
		all = append(all, "--worker=url="+cell.OpenAI+",kind=router,key-env=CELL_KEY")
	}
	r := StartAt(t, Program, testkit.FreePorts(t, 2), append(env, "CELL_KEY=key-upper"), append(all, args...)...)
	r.WaitReady(len(below), 30*time.Second)
	return r
}

// TestACellThatHangsIsLeftUntilItGoesOn: its process is stopped, so that its connections stay open
// and nobody answers.
func TestACellThatHangsIsLeftUntilItGoesOn(t *testing.T) {
	t.Parallel()
	tree := plantCells(t, 2, 1, "--speedup-ratio=0.2") // a prompt takes a second
	upper, prompt := tree.uppers[0], Say(Words(rand.New(rand.NewPCG(3, 4)), 500))
	type result struct {
		whole bool
		cell  string
		err   error
	}
	results := make(chan result, 3)
	for range cap(results) {
		go func() {
			_, whole, header, err := tree.ask(t.Context(), upper, prompt)
			results <- result{whole, header.Get(web.HeaderWorker), err}
		}()
	}
	hung := -1
	testkit.Eventually(t, 10*time.Second, "a cell has a request", func() bool {
		for _, w := range upper.Workers() {
			if w.InFlight > 0 {
				hung = int(w.WorkerID)
			}
		}
		return hung >= 0
	})
	cell := tree.cells[hung].Command.Process
	t.Cleanup(func() { _ = cell.Signal(syscall.SIGCONT) }) // or it would not end
	if err := cell.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	lifecycle := func() string {
		record, _ := upper.Record(uint64(hung))
		return record.Lifecycle
	}
	testkit.Eventually(t, 20*time.Second, "the cell is out", func() bool { return lifecycle() != "schedulable" })
	took := time.Since(stopped)
	for range cap(results) {
		if r := <-results; !r.whole || r.cell != fmt.Sprint(1-hung) {
			t.Errorf("an answer of cell %q, whole: %t, %v; want one of cell %d", r.cell, r.whole, r.err, 1-hung)
		}
	}
	t.Logf("out after %v, all requests answered after %v", took.Round(time.Millisecond), time.Since(stopped).Round(time.Millisecond))
	if took < cells.Silence-time.Second || took > 2*cells.Silence { // twice, because this machine does other things, too
		t.Errorf("out after %v, want %v", took, cells.Silence)
	}
	if err := cell.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 20*time.Second, "the cell is back", func() bool { return lifecycle() == "schedulable" })
	tree.exact(upper, prompt, 5*time.Second)
	if record, _ := upper.Record(uint64(hung)); record.Cell == nil || record.Cell.Snapshots != 0 {
		t.Errorf("its summary was not resumed: %+v", record.Cell)
	}
	if _, whole, _, err := tree.ask(t.Context(), upper, prompt); !whole {
		t.Error(err)
	}
}

// TestTenantsGoThroughTwoRouters: the cell queues a request under the tenant and the class that
// the router above says, and not under those that a client claims, to either of them.
func TestTenantsGoThroughTwoRouters(t *testing.T) {
	t.Parallel()
	cell := StartMocker(t, 1, "--cell", "--cell-interval=50ms", "--speedup-ratio=0.02", "--router-queue-threshold=0", "--router-queue-policy=fair", keysFile(t, cellKeys))
	upper := startAbove(t, nil, []*Router{cell}, keysFile(t, "[{name: team, key: key-team, class: batch}]"))
	ctx, leave := context.WithCancel(t.Context())
	var asking sync.WaitGroup
	defer asking.Wait()
	defer leave()
	ask := func(r *Router, key string, i int) {
		claims := []string{hints.HeaderRouted, "1", hints.HeaderFairness, "other", hints.HeaderClass, "interactive"}
		asking.Go(func() { r.streamAs(ctx, key, i, 4, claims...) })
	}
	ask(upper, "key-team", longTopic)
	testkit.Eventually(t, 20*time.Second, "the cell computes a prompt", func() bool { return cell.InFlight() == 1 })
	ask(upper, "key-team", 1)
	ask(cell, "key-stranger", 2)
	var page testkit.MetricsLines
	for _, series := range []string{`kvrouter_tenant_waiting_requests{class="batch",tenant="team"}`, `kvrouter_tenant_waiting_requests{class="standard",tenant="stranger"}`} {
		testkit.Eventually(t, 20*time.Second, series, func() bool {
			page = cell.Metrics()
			return page[series] == 1
		})
	}
	if n := page[`kvrouter_tenant_requests_total{tenant="other"}`]; n > 0 {
		t.Errorf("%v requests count for a tenant that clients claimed", n)
	}
}

// TestARequestIsExplainedByBothRouters: one trace, a receipt of each router, the names of both
// workers in the answer and in the record, and a session that stays with both.
func TestARequestIsExplainedByBothRouters(t *testing.T) {
	t.Parallel()
	const session = "x-session-id"
	c := collector.Start(t)
	var below []*Router
	for range 2 {
		below = append(below, startTraced(t, traceTo(c.HTTP, "OTEL_SERVICE_NAME=cell"), 2, "--cell", "--cell-interval=50ms", "--session-header="+session, keysFile(t, cellKeys)).Router)
	}
	file := filepath.Join(t.TempDir(), "requests.jsonl")
	upper := startAbove(t, traceTo(c.HTTP, "OTEL_SERVICE_NAME=upper"), below, "--session-header="+session, "--record="+file, "--decision-headers", keysFile(t, "[{name: team, key: key-team, trust-hints: true}]"))
	decisions := func(r *Router) []gjson.Result {
		return gjson.GetBytes(r.Get(r.Port+"/decisions"), "decisions").Array()
	}
	for _, r := range append(below, upper) {
		decisions(r) // from now on they are explained
	}
	id := "" // of the last request
	ask := func(name, text string, headers ...string) (cell int, worker string) {
		t.Helper()
		e := upper.ask(map[string]any{"messages": Say(text), "max_tokens": 8, "stream": true}, append(headers, "Authorization", "Bearer key-team", session, name)...)
		cell, err := strconv.Atoi(e.Worker)
		if worker = e.Header.Get(web.HeaderCellWorker); err != nil || worker == "" || e.StatusCode != http.StatusOK {
			t.Fatalf("%s: cell %q, its worker %q", e.Status, e.Worker, worker)
		}
		id = e.Header.Get(web.HeaderRequest)
		return cell, worker
	}
	cell, worker := ask("s", strings.Repeat("Hi ", 100), "traceparent", clientParent)

	want := `
POST /v1/chat/completions SERVER [first_token]
  tokens INTERNAL
  decision INTERNAL
  attempt CLIENT [first_token]
    POST /v1/chat/completions SERVER [first_token]
      tokens INTERNAL
      decision INTERNAL
      attempt CLIENT [first_token]
`
	if got := "\n" + treeOf(t, c, clientTrace, 8); got != want {
		t.Errorf("the trace is%swant%s", got, want)
	}
	services := map[string]int{}
	for _, span := range c.Spans(clientTrace) {
		services[span.Service]++
	}
	if services["upper"] != 4 || services["cell"] != 4 {
		t.Errorf("spans of %v", services)
	}

	upon := decisions(upper)[0]
	if got := upon.Get("worker_id").Int(); got != int64(cell) {
		t.Errorf("the receipt names cell %d, the answer %d", got, cell)
	}
	if network := upon.Get(fmt.Sprintf(`candidates.#(worker_id==%d).terms.#(name=="network").value`, cell)); !(network.Num < 0) {
		t.Errorf("the receipt has no term of the network: %s", upon.Raw)
	}
	if got := decisions(below[cell])[0].Get("worker_id").Raw; got != worker {
		t.Errorf("the receipt of cell %d names worker %s, the answer %q", cell, got, worker)
	}
	for _, r := range []*Router{upper, below[cell]} {
		r.says("id=" + id)
	}

	place := func(cell int, worker string) string { return fmt.Sprintf("worker %s of cell %d", worker, cell) }
	stays := map[string]string{"s": place(cell, worker)}
	for i := range 6 {
		name := []string{"s", "t"}[i%2]
		now := place(ask(name, fmt.Sprint("question ", i)))
		if before := stays[name]; before != "" && before != now {
			t.Errorf("session %s goes from %s to %s", name, before, now)
		}
		stays[name] = now
	}
	counts := upper.sessionCounts()
	sums := sessionCounts{}
	for _, b := range below {
		n := b.sessionCounts()
		sums.New, sums.Kept, sums.Moved = sums.New+n.New, sums.Kept+n.Kept, sums.Moved+n.Moved
	}
	if all := (sessionCounts{New: 2, Kept: 5}); counts != all || sums != all {
		t.Errorf("sessions of the router above %+v, of the cells %+v, want %+v", counts, sums, all)
	}

	upper.Stop()
	if line := readRecord(t, file)[0]; line.Worker != upon.Get("worker_id").Raw || line.CellWorker == "" || line.CellTokens == nil {
		t.Errorf("the record has cell %s, worker %q, tokens %v", line.Worker, line.CellWorker, line.CellTokens)
	}
}
