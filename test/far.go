package test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/netspace"
)

const (
	farRegions = 3 // each with a cell and an upper router
	farWorkers = 4 // of each cell
	// farLimit is how long a request may take until it counts as hung.
	farLimit = 30 * time.Second
	// farInterval is --cell-interval, which has its default, and the longest way.
	farInterval = 250 * time.Millisecond
	// farWords is the length of a document that prompts begin with.
	farWords = 500
)

// far is cells and upper routers over all of them, in networks of their own.
type far struct {
	*testing.T
	cells, uppers []*Router
	network       *netspace.Network
	client        *http.Client
	model         string

	asking sync.WaitGroup
	faults atomic.Int64 // begins and ends of faults: what is predicted meanwhile may not come true
	down   [farRegions]atomic.Bool
	ends   [farRegions]atomic.Int64 // of upper routers

	mu      sync.Mutex // guards the rest
	answers []farAnswer
	lost    []string // requests without a first byte, other than those of an upper router that ended
	hung    []string
	cut     int // answers that ended early, with their upper router or otherwise
	broken  int // of these, those of an upper router that did not end
	retried int // requests that went to another upper router because theirs had ended
}

// farAnswer is how a request went.
type farAnswer struct {
	region, upper, cell     int
	sent, began, ended      time.Time
	reported, found, cached int // tokens: by the upper router, by the cell, by the engine
	prompt                  int // tokens
	calm                    bool
}

// cellNode and upperNode return the nodes of a region. Node 0 is that of the clients.
func cellNode(region int) int  { return 1 + region }
func upperNode(region int) int { return 1 + farRegions + region }

// startFar starts the cells and the upper routers. roundTrip is that between an upper router and
// a cell, in ms; that between clients and upper routers is 2 ms.
func startFar(t *testing.T, roundTrip func(upper, cell int) int, args ...string) *far {
	t.Helper()
	ways := make([][]time.Duration, 1+2*farRegions)
	for i := range ways {
		ways[i] = make([]time.Duration, len(ways))
	}
	for upper := range farRegions {
		ways[0][upperNode(upper)] = 2 * time.Millisecond
		for cell := range farRegions {
			ways[cellNode(cell)][upperNode(upper)] = time.Duration(roundTrip(upper, cell)) * time.Millisecond
		}
	}
	f := &far{T: t, cells: make([]*Router, farRegions), uppers: make([]*Router, farRegions), network: netspace.New(t, ways),
		model: BuiltinModel(t), client: &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 128, IdleConnTimeout: 2 * time.Second}}}
	t.Cleanup(f.client.CloseIdleConnections)
	for region := range farRegions {
		f.startCell(region, args...)
	}
	for region := range farRegions {
		f.openUpper(region)
	}
	for region := range farRegions {
		f.cells[region].WaitReady(farWorkers, 30*time.Second)
		f.uppers[region].WaitReady(farRegions, 30*time.Second)
	}
	return f
}

// startCell starts a cell.
func (f *far) startCell(region int, args ...string) {
	f.Helper()
	args = append([]string{"--engine=mocker", fmt.Sprintf("--num-workers=%d", farWorkers), "--served-model-name=mock", "--cell"}, args...)
	f.cells[region] = f.startIn(cellNode(region), args...)
}

// openUpper starts an upper router.
func (f *far) openUpper(region int) {
	f.Helper()
	args := []string{"--engine=none", "--model=" + f.model, "--served-model-name=mock", fmt.Sprintf("--seed=%d", region+1)}
	for cell := range f.cells {
		args = append(args, fmt.Sprintf("--worker=url=http://%s:8000,kind=router,id=%d", f.network.Node(cellNode(cell)).Address, cell))
	}
	f.uppers[region] = f.startIn(upperNode(region), args...)
}

// startIn starts a router in a node, at the ports that it has by default, and waits until they
// are open.
func (f *far) startIn(node int, args ...string) *Router {
	f.Helper()
	at := f.network.Node(node)
	args = append([]string{"--host=" + at.Address, "--router-host=" + at.Address, "--insecure", "--log-level=info", "--drain-timeout=2s",
		"--drain-delay=0s"}, args...)
	r := &Router{Process: runBy(f.T, at.Start, PlainProgram, nil, args...), OpenAI: "http://" + at.Address + ":8000",
		Port: "http://" + at.Address + ":7000"}
	for _, url := range []string{r.OpenAI, r.Port} {
		testkit.Eventually(f.T, 30*time.Second, url+" is open", func() bool {
			r.alive()
			conn, err := net.DialTimeout("tcp", strings.TrimPrefix(url, "http://"), time.Second)
			if err == nil {
				conn.Close()
			}
			return err == nil
		})
	}
	return r
}

// reached waits until upper routers send requests to a cell, or send it none, and says how long
// that took.
func (f *far) reached(cell int, want bool, uppers ...int) (took []time.Duration) {
	f.Helper()
	began := time.Now()
	took = make([]time.Duration, len(uppers))
	testkit.Eventually(f.T, 20*time.Second, fmt.Sprintf("cell %d in the service of upper routers %v: %v", cell, uppers, want), func() bool {
		all := true
		for i, upper := range uppers {
			if took[i] > 0 {
				continue
			}
			if record, ok := f.uppers[upper].Record(uint64(cell)); ok && (record.Lifecycle == "schedulable") == want {
				took[i] = time.Since(began)
			}
			all = all && took[i] > 0
		}
		return all
	})
	return took
}

// ask sends a chat of a region's client to its upper router, or to another one where that has
// ended, and notes how it went. The answer's text is empty if it was not whole.
func (f *far) ask(region, upper int, messages []map[string]string, tokens int) (text string) {
	for range farRegions {
		for f.down[upper].Load() && upper != region {
			upper = (upper + 1) % farRegions
		}
		ends, faults := f.ends[upper].Load(), f.faults.Load()
		a, text, begun, whole, err := f.try(upper, messages, tokens)
		a.region, a.calm = region, faults == f.faults.Load() && faults%2 == 0
		ended := f.down[upper].Load() || ends != f.ends[upper].Load()
		f.mu.Lock()
		switch {
		case whole:
			f.answers = append(f.answers, a)
		case a.ended.Sub(a.sent) >= farLimit:
			f.hung = append(f.hung, fmt.Sprintf("upper router %d, begun %v: %v", upper, begun, err))
		case begun:
			f.cut++
			if !ended {
				f.broken++
				f.lost = append(f.lost, fmt.Sprintf("upper router %d, after the first byte: %v", upper, err))
			}
		case ended:
			f.retried++
		default:
			f.lost = append(f.lost, fmt.Sprintf("upper router %d: %v", upper, err))
		}
		f.mu.Unlock()
		if whole || begun || !ended {
			return text
		}
		upper = (upper + 1) % farRegions
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.lost = append(f.lost, "all upper routers have ended")
	return ""
}

// begins notes when the first byte of a body comes.
type begins struct {
	io.Reader
	at time.Time
}

// Read reads.
func (b *begins) Read(p []byte) (n int, err error) {
	n, err = b.Reader.Read(p)
	if n > 0 && b.at.IsZero() {
		b.at = time.Now()
	}
	return n, err
}

// try sends a chat to an upper router and reads its whole answer.
func (f *far) try(upper int, messages []map[string]string, tokens int) (a farAnswer, text string, begun, whole bool, err error) {
	a = farAnswer{upper: upper, cell: -1, sent: time.Now()}
	defer func() { a.ended = time.Now() }()
	ctx, cancel := context.WithTimeout(context.Background(), farLimit)
	defer cancel()
	body, _ := json.Marshal(map[string]any{"model": "mock", "messages": messages, "max_tokens": tokens, "ignore_eos": true, "stream": true,
		"stream_options": map[string]bool{"include_usage": true}})
	request, err := http.NewRequestWithContext(ctx, http.MethodPost,
		"http://"+f.network.Node(upperNode(upper)).Address+":8000"+testkit.ChatPath, strings.NewReader(string(body)))
	if err != nil {
		return a, "", false, false, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := f.client.Do(request)
	if err != nil {
		return a, "", false, false, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		reason, _ := io.ReadAll(io.LimitReader(response.Body, 1<<10))
		return a, "", false, false, fmt.Errorf("%s: %s", response.Status, reason)
	}
	stream := &begins{Reader: response.Body}
	answer, err := ReadAnswer(response.Header, stream, true)
	a.cell, a.began = int(answer.Worker), stream.at
	a.reported, a.cached, a.prompt = answer.Predicted, answer.Cached, answer.Prompt
	a.found, _ = strconv.Atoi(response.Header.Get(web.HeaderCellOverlap))
	return a, answer.Text, !stream.at.IsZero(), answer.Finished && !answer.Broken, err
}

// documents returns texts that prompts begin with.
func documents(seed uint64, count int) (texts []string) {
	for i := range count {
		texts = append(texts, Words(rand.New(rand.NewPCG(seed, uint64(i))), farWords))
	}
	return texts
}

// arrive sends requests of conversations until ctx ends: one of each region in turn, each a pause
// after the last, whether those before are answered or not. A conversation begins with one of its
// region's documents, or now and then another's, and has three turns.
func (f *far) arrive(ctx context.Context, pause time.Duration, texts []string) {
	const most = 300 // requests in flight
	random := rand.New(rand.NewPCG(3, 3))
	slots := make(chan struct{}, most)
	idle := make([]chan []map[string]string, farRegions)
	for region := range idle {
		idle[region] = make(chan []map[string]string, most)
	}
	tick := time.NewTicker(pause)
	defer tick.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		region := n % farRegions
		var messages []map[string]string
		select {
		case messages = <-idle[region]:
			messages = append(messages, Message("user", Words(random, 10)))
		default:
			at := region
			if random.IntN(4) == 0 {
				at = random.IntN(farRegions)
			}
			own := len(texts) / farRegions
			messages = Say(texts[at*own+random.IntN(own)] + " " + Words(random, 10))
		}
		slots <- struct{}{} // each ends by farLimit
		f.asking.Go(func() {
			defer func() { <-slots }()
			text := f.ask(region, region, messages, 16)
			if text == "" || len(messages) >= 5 {
				return
			}
			select {
			case idle[region] <- append(slices.Clone(messages), Message("assistant", text)):
			default:
			}
		})
	}
}

// count returns how many requests were answered.
func (f *far) count() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.answers)
}

// goOn waits until so many more requests were answered.
func (f *far) goOn(n int, what string) {
	f.Helper()
	from := f.count()
	testkit.Eventually(f.T, time.Minute, "requests continue "+what, func() bool { return f.count()-from >= n })
}

// between returns the answered requests of a region's clients that were sent to its upper router
// in a time.
func (f *far) between(region int, from, to time.Time) (sent []farAnswer) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.answers {
		if a.region == region && a.upper == region && !a.sent.Before(from) && a.sent.Before(to) {
			sent = append(sent, a)
		}
	}
	return sent
}

// underWay returns how many requests an upper router had at a time.
func (f *far) underWay(upper int, at time.Time) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range f.answers {
		if a.upper == upper && a.sent.Before(at) && a.ended.After(at) {
			n++
		}
	}
	return n
}

// share returns which share of the answers came from a cell.
func share(answers []farAnswer, cell int) float64 {
	n := 0
	for _, a := range answers {
		if a.cell == cell {
			n++
		}
	}
	return float64(n) / float64(max(1, len(answers)))
}

// prompt is a text that requests begin with, and its tokens.
type prompt struct {
	text   string
	tokens string // JSON
}

// prompts returns texts with their tokens.
func (f *far) prompts(texts []string) (all []prompt) {
	f.Helper()
	for _, text := range texts {
		body, _ := json.Marshal(map[string]any{"messages": Say(text)})
		_, answer := Post(f.T, f.cells[0].OpenAI+"/tokenize", string(body))
		all = append(all, prompt{text, gjson.GetBytes(answer, "tokens").Raw})
	}
	return all
}

// runs returns how many blocks of a prompt are held: by each worker, as a router knows it.
func (p prompt) runs(r *Router) map[int]int {
	r.T.Helper()
	_, scores := Post(r.T, r.Port+"/overlap_scores", `{"token_ids":`+p.tokens+`}`)
	found := map[int]int{}
	for _, w := range gjson.GetBytes(scores, "workers").Array() {
		found[int(w.Get("worker_id").Int())] = int(w.Get("device_blocks").Int())
	}
	return found
}

// held returns how many blocks of a prompt the worker of each cell holds that holds most of it.
func (f *far) held(p prompt) (blocks [farRegions]int) {
	f.Helper()
	for cell, r := range f.cells {
		for _, run := range p.runs(r) {
			blocks[cell] = max(blocks[cell], run)
		}
	}
	return blocks
}

// exactFor waits until an upper router knows the cells' blocks of all prompts, and
// returns when it was asked for the last of them.
func (f *far) exactFor(upper int, prompts []prompt) (at time.Time) {
	f.Helper()
	for _, p := range prompts {
		testkit.Eventually(f.T, 20*time.Second, "the upper router knows what the cells hold", func() bool {
			before := f.held(p)
			at = time.Now()
			reported := p.runs(f.uppers[upper])
			for cell, blocks := range before {
				if reported[cell] < blocks {
					return false
				}
			}
			return slices.Max(before[:]) > 0
		})
	}
	return at
}

// falseMatches returns for how many prompts and cells an upper router expects more blocks than
// a worker of the cell holds, and still is an interval later; and how many were looked at.
func (f *far) falseMatches(upper int, prompts []prompt) (wrong, looks int) {
	f.Helper()
	for _, p := range prompts {
		over := 0
		for try := range 2 {
			if try > 0 {
				<-time.After(farInterval)
			}
			reported, held := p.runs(f.uppers[upper]), f.held(p)
			over = 0
			for cell, blocks := range held {
				if reported[cell] > blocks {
					over++
				}
			}
			if over == 0 {
				break
			}
		}
		wrong, looks = wrong+over, looks+farRegions
	}
	return wrong, looks
}
