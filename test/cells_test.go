package test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/testkit"
)

// cellTree is routers over cells over mock workers.
type cellTree struct {
	*testing.T
	cells  []*Mocks
	ports  []int // of the upper routers
	uppers []*Router
}

// plantCells starts so many cells of two workers, and upper routers over all of them.
func plantCells(t *testing.T, cells, uppers int, args ...string) *cellTree {
	t.Helper()
	tree := &cellTree{T: t, ports: make([]int, uppers), uppers: make([]*Router, uppers)}
	for range cells {
		tree.cells = append(tree.cells, StartMocks(t, 2, append([]string{"--cell", "--cell-interval=50ms", "--log-level=info"}, args...)...))
	}
	base := testkit.FreePorts(t, 2*uppers)
	for i := range uppers {
		tree.ports[i] = base + 2*i
		tree.start(i)
	}
	return tree
}

// start starts an upper router, and waits until it follows all cells that live.
func (c *cellTree) start(i int) {
	c.Helper()
	args := []string{"--engine=none", "--log-level=info", "--drain-timeout=5s", "--model=" + BuiltinModel(c.T), "--served-model-name=mock"}
	alive := 0
	for _, cell := range c.cells {
		args = append(args, "--worker=url="+cell.OpenAI+",kind=router")
		select {
		case <-cell.Ended:
		default:
			alive++
		}
	}
	c.uppers[i] = StartAt(c.T, Program, c.ports[i], nil, args...)
	c.uppers[i].WaitReady(alive, 30*time.Second)
}

// heldOf returns how many blocks of a prompt each worker of a router holds, or is told to hold.
func (r *Router) heldOf(messages []map[string]string) map[uint64]int {
	r.T.Helper()
	body, _ := json.Marshal(map[string]any{"messages": messages})
	_, text := Post(r.T, r.OpenAI+"/tokenize", string(body))
	_, scores := Post(r.T, r.Port+"/overlap_scores", `{"token_ids":`+gjson.GetBytes(text, "tokens").Raw+`}`)
	found := map[uint64]int{}
	for _, w := range gjson.GetBytes(scores, "workers").Array() {
		found[w.Get("worker_id").Uint()] = int(w.Get("device_blocks").Int())
	}
	return found
}

// held returns how many blocks of a prompt each cell that lives holds.
func (c *cellTree) held(messages []map[string]string) map[uint64]int {
	held := map[uint64]int{}
	for i, cell := range c.cells {
		select {
		case <-cell.Ended:
			continue
		default:
		}
		held[uint64(i)] = 0
		for _, blocks := range cell.heldOf(messages) {
			held[uint64(i)] = max(held[uint64(i)], blocks)
		}
	}
	return held
}

// exact waits until an upper router knows what the cells hold of a prompt, which some do.
func (c *cellTree) exact(upper *Router, messages []map[string]string, limit time.Duration) {
	c.Helper()
	testkit.Eventually(c.T, limit, "the upper router knows what the cells hold", func() bool {
		told, held := upper.heldOf(messages), c.held(messages)
		same, any := true, false
		for cell, blocks := range held {
			same, any = same && told[cell] == blocks, any || blocks > 0
		}
		return same && any
	})
}

// ask sends a streamed chat through an upper router. begun: the first byte of the answer came.
func (c *cellTree) ask(ctx context.Context, upper *Router, messages []map[string]string) (begun, whole bool, header http.Header, err error) {
	body, _ := json.Marshal(map[string]any{"model": "mock", "messages": messages, "max_tokens": 64, "stream": true})
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, upper.OpenAI+testkit.ChatPath, bytes.NewReader(body))
	if err != nil {
		return false, false, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return false, false, nil, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return false, false, response.Header, fmt.Errorf("%s", response.Status)
	}
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		data, is := strings.CutPrefix(lines.Text(), "data: ")
		begun = begun || is
		whole = whole || data == "[DONE]"
	}
	return begun, whole, response.Header, nil
}

func TestAPrefixIsFoundThroughTwoRouters(t *testing.T) {
	t.Parallel()
	tree := plantCells(t, 2, 1)
	upper, random := tree.uppers[0], rand.New(rand.NewPCG(1, 2))
	prompt := Say(Words(random, 900))
	_, whole, first, err := tree.ask(t.Context(), upper, prompt)
	if err != nil || !whole {
		t.Fatal(whole, err)
	}
	tree.exact(upper, prompt, 5*time.Second)
	_, _, second, err := tree.ask(t.Context(), upper, prompt)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{web.HeaderWorker, web.HeaderCellWorker} {
		if first.Get(name) == "" || first.Get(name) != second.Get(name) {
			t.Errorf("%s: first %q, then %q", name, first.Get(name), second.Get(name))
		}
	}
	if told, found := second.Get(web.HeaderOverlap), second.Get(web.HeaderCellOverlap); told == "0" || told != found {
		t.Errorf("overlap told %s, found %s", told, found)
	}
	record, _ := upper.Record(0)
	if record.Cell == nil || record.Cell.Workers != 2 || record.Cell.NetworkMS <= 0 || record.Cell.SummaryBytes == 0 {
		t.Errorf("GET /workers shows %+v", record.Cell)
	}
}

// TestRequestsSurviveCellsAndRoutersThatEnd: clients of two upper routers, of which one ends, over
// three cells, of which one ends.
func TestRequestsSurviveCellsAndRoutersThatEnd(t *testing.T) {
	t.Parallel()
	tree := plantCells(t, 3, 2, "--speedup-ratio=5")
	const clients, documents = 8, 6
	var asked, lost, cut atomic.Int64
	var upperEnds atomic.Bool // requests of the first one may fail now
	ctx, stop := context.WithCancel(t.Context())
	prompts := make([]string, documents)
	for i := range prompts {
		prompts[i] = Words(rand.New(rand.NewPCG(uint64(i), 7)), 600)
	}
	var running sync.WaitGroup
	for client := range clients {
		running.Go(func() {
			random := rand.New(rand.NewPCG(uint64(client), 9))
			for n := client; ctx.Err() == nil; n++ {
				prompt := Say(prompts[random.IntN(documents)] + " " + Words(random, 5))
				at := n % len(tree.uppers)
				if upperEnds.Load() {
					at = 1
				}
				begun, whole, _, err := tree.ask(t.Context(), tree.uppers[at], prompt)
				if asked.Add(1); !whole && at == 0 && upperEnds.Load() {
					continue // a balancer would send it to the other one
				}
				if !begun {
					lost.Add(1)
					t.Errorf("lost before the first byte: %v", err)
				} else if !whole {
					cut.Add(1)
				}
			}
		})
	}
	after := func(n int64, what string) {
		t.Helper()
		from := asked.Load()
		testkit.Eventually(t, time.Minute, what, func() bool { return asked.Load()-from >= n })
	}
	after(40, "requests go on at first")
	tree.cells[0].Kill()
	began := time.Now()
	for i, upper := range tree.uppers {
		testkit.Eventually(t, 10*time.Second, "the cell is out", func() bool {
			record, _ := upper.Record(0)
			return record.Lifecycle != "schedulable"
		})
		t.Logf("upper router %d knows after %v that a cell has ended", i, time.Since(began))
	}
	after(40, "requests go on without a cell")
	upperEnds.Store(true)
	tree.uppers[0].Kill()
	after(40, "requests go on without a router")
	tree.start(0)
	tree.exact(tree.uppers[0], Say(prompts[0]), 5*time.Second)
	stop()
	running.Wait()
	t.Logf("%d requests, %d lost before the first byte, %d cut after it", asked.Load(), lost.Load(), cut.Load())
	if cut.Load() > 0 { // a stream continues at another cell
		t.Errorf("%d streams were cut", cut.Load())
	}

	// What is reported of prompts that nobody has sent is false.
	wrong, looks := 0, 0
	random := rand.New(rand.NewPCG(5, 5))
	for range 150 {
		for _, blocks := range tree.uppers[0].heldOf(Say(Words(random, 80))) {
			if looks++; blocks > 0 {
				wrong++
			}
		}
	}
	t.Logf("%d of %d look-ups for prompts that nobody has sent were false; stated are %.3f %%", wrong, looks, 100*summary.FalsePositive)
	if wrong > 1 {
		t.Errorf("%d of %d matches are wrong", wrong, looks)
	}
	for i := range prompts {
		for _, upper := range tree.uppers {
			tree.exact(upper, Say(prompts[i]), 5*time.Second)
		}
	}
}

// TestACellThatDrainsFinishesItsRequests: and gets no new ones.
func TestACellThatDrainsFinishesItsRequests(t *testing.T) {
	t.Parallel()
	tree := plantCells(t, 2, 1, "--speedup-ratio=0.5")
	upper := tree.uppers[0]
	type result struct {
		whole bool
		cell  string
		err   error
	}
	results := make(chan result, 1)
	go func() {
		_, whole, header, err := tree.ask(t.Context(), upper, Say("hello"))
		results <- result{whole, header.Get(web.HeaderWorker), err}
	}()
	busy := -1
	testkit.Eventually(t, 10*time.Second, "the request is with a cell", func() bool {
		busy = slices.IndexFunc(tree.cells, func(cell *Mocks) bool { return cell.InFlight() > 0 })
		return busy >= 0
	})
	if err := tree.cells[busy].Command.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 10*time.Second, "the cell gets no new requests", func() bool {
		record, _ := upper.Record(uint64(busy))
		return record.Lifecycle != "schedulable"
	})
	if r := <-results; !r.whole || r.err != nil || r.cell != fmt.Sprint(busy) {
		t.Errorf("the request that was in flight on cell %d: %+v", busy, r)
	}
	if _, whole, header, err := tree.ask(t.Context(), upper, Say("hello")); !whole || header.Get(web.HeaderWorker) != fmt.Sprint(1-busy) {
		t.Errorf("the next one: %v %v, cell %s", whole, err, header.Get(web.HeaderWorker))
	}
}

// TestRoutersBelowEachOtherAreNotAttached: a ring of cells would send requests round.
func TestRoutersBelowEachOtherAreNotAttached(t *testing.T) {
	t.Parallel()
	mocks := StartWorkers(t, 1)
	ports := testkit.FreePorts(t, 4)
	urls := []string{fmt.Sprintf("http://127.0.0.1:%d", ports), fmt.Sprintf("http://127.0.0.1:%d", ports+2)}
	var ring []*Router
	for i := range urls {
		ring = append(ring, StartAt(t, Program, ports+2*i, nil, append([]string{"--engine=none", "--cell", "--model=" + BuiltinModel(t), "--served-model-name=mock", "--worker=id=9,url=" + urls[1-i] + ",kind=router"}, mocks.Attach()...)...))
	}
	testkit.Eventually(t, 30*time.Second, "one of them refuses the other", func() bool {
		refused := 0
		for _, r := range ring {
			if record, _ := r.Record(9); strings.Contains(strings.Join(record.Reasons, " "), "routing loop") {
				refused++
			}
		}
		return refused > 0
	})
	for _, r := range ring {
		r.Model = "mock"
		if a, err := r.Chat(t.Context(), Say("hello"), true, 3); err != nil || !a.Finished {
			t.Errorf("%+v %v", a, err)
		}
	}
}
