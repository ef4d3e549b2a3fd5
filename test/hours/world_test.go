// Package hours runs the router's proxy, books and detector for hours of virtual time before
// workers that work, some of them slowly, and workers that fail, and counts what they are taken
// for. A seed draws the workers, the requests and the faults of some minutes.
package hours

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
)

const headerRequest = "X-Simulated"

// signs is what a worker shows beside its answers.
type signs int

const (
	signsNone signs = iota
	signsCounters
	signsEvents // and counters
)

// kind is a kind of request.
type kind struct {
	name    string
	route   string
	share   float64
	prompt  [2]int // tokens
	output  [2]int // tokens
	streams bool
	silent  bool // a stream without text until its end, such as a tool call
	unbound bool // its limit is not that of what it writes
	blocks  bool // the server computes for long, and answers nothing meanwhile
	slow    bool // its client reads slowly
}

var kinds = []kind{
	{name: "chat", route: "/v1/chat/completions", share: 0.45, prompt: [2]int{100, 4000}, output: [2]int{10, 300}, streams: true},
	{name: "long chat", route: "/v1/chat/completions", share: 0.05, prompt: [2]int{20_000, 200_000}, output: [2]int{50, 500}, streams: true},
	{name: "whole answer", route: "/v1/chat/completions", share: 0.12, prompt: [2]int{100, 8000}, output: [2]int{20, 3000}},
	{name: "whole answer without its length", route: "/v1/chat/completions", share: 0.06, prompt: [2]int{100, 4000}, output: [2]int{20, 2000}, unbound: true},
	{name: "embedding", route: "/v1/embeddings", share: 0.1, prompt: [2]int{20, 8000}},
	{name: "transcription", route: "/v1/audio/transcriptions", share: 0.05, prompt: [2]int{1500, 1500}, output: [2]int{50, 800}, unbound: true},
	{name: "tool call", route: "/v1/chat/completions", share: 0.08, prompt: [2]int{500, 20_000}, output: [2]int{100, 4000}, streams: true, silent: true},
	{name: "slow reader", route: "/v1/chat/completions", share: 0.07, prompt: [2]int{100, 4000}, output: [2]int{50, 300}, streams: true, slow: true},
	{name: "prompt logprobs", route: "/v1/chat/completions", share: 0.02, prompt: [2]int{2000, 8000}, output: [2]int{10, 50}, blocks: true},
}

// figures are what was counted.
type figures struct {
	Seeds, Requests, Answered, Left  int
	Virtual                          time.Duration
	FalseEjections, FalseDowns       int // of workers that work
	Twice, TwiceBlocked, TwiceFaulty int // requests sent to a second worker: beside one that works, one whose event loop is busy, one that has a fault
	Lost, LostFaulty                 int // without an answer: on workers that work, on one that has a fault
	Ejections, Downs                 int // of workers with a fault
	Faults                           map[state]int
	Avoided                          map[state][]time.Duration // from the fault until new requests go elsewhere
	Missed                           map[state]int             // faults that ended before
	Bad                              []string                  // what must not be, with its seed
}

func (f *figures) add(o *figures) {
	f.Seeds, f.Requests, f.Answered, f.Left, f.Virtual = f.Seeds+o.Seeds, f.Requests+o.Requests, f.Answered+o.Answered, f.Left+o.Left, f.Virtual+o.Virtual
	f.FalseEjections, f.FalseDowns, f.Twice, f.TwiceBlocked, f.TwiceFaulty = f.FalseEjections+o.FalseEjections, f.FalseDowns+o.FalseDowns, f.Twice+o.Twice, f.TwiceBlocked+o.TwiceBlocked, f.TwiceFaulty+o.TwiceFaulty
	f.Lost, f.LostFaulty, f.Ejections, f.Downs = f.Lost+o.Lost, f.LostFaulty+o.LostFaulty, f.Ejections+o.Ejections, f.Downs+o.Downs
	for s, n := range o.Faults {
		f.Faults[s] += n
	}
	for s, list := range o.Avoided {
		f.Avoided[s] = append(f.Avoided[s], list...)
	}
	for s, n := range o.Missed {
		f.Missed[s] += n
	}
	f.Bad = append(f.Bad, o.Bad...)
}

func newFigures() *figures {
	return &figures{Faults: map[state]int{}, Avoided: map[state][]time.Duration{}, Missed: map[state]int{}}
}

// table shows the figures.
func (f *figures) table() string {
	out := &strings.Builder{}
	row := func(name string, value any) { fmt.Fprintf(out, "| %s | %v |\n", name, value) }
	row("seeds", f.Seeds)
	row("virtual hours", fmt.Sprintf("%.1f", f.Virtual.Hours()))
	row("requests / answered / left by their clients", fmt.Sprintf("%d / %d / %d", f.Requests, f.Answered, f.Left))
	row("false ejections", f.FalseEjections)
	row("workers that work taken down", f.FalseDowns)
	row("requests sent twice for nothing", f.Twice)
	row("beside a blocked server", f.TwiceBlocked)
	row("beside a fault", f.TwiceFaulty)
	row("lost on workers that work", f.Lost)
	row("lost on workers with a fault", f.LostFaulty)
	row("true ejections / downs", fmt.Sprintf("%d / %d", f.Ejections, f.Downs))
	for _, s := range []state{dead, hung, stuck} {
		list := f.Avoided[s]
		if slices.Sort(list); len(list) > 0 {
			row(fmt.Sprintf("%s: avoided after (median, 95 %%, longest)", s), fmt.Sprintf("%s, %s, %s; %d of %d, %d ended before", list[len(list)/2].Round(time.Millisecond), list[len(list)*95/100].Round(time.Millisecond), list[len(list)-1].Round(time.Millisecond), len(list), f.Faults[s], f.Missed[s]))
		}
	}
	return out.String()
}

// world is one simulation.
type world struct {
	seed    uint64
	random  *rand.Rand
	signs   signs
	workers []*worker
	router  *router.Router
	proxy   *proxy.Proxy
	show    func(string)
	began   time.Time
	long    time.Duration
	running sync.WaitGroup
	clients sync.WaitGroup

	mu       sync.Mutex // guards the rest
	requests map[string]*request
	figures  *figures
	ejected  map[uint64]uint64
}

// between draws a number, small ones more often.
func between(random *rand.Rand, of [2]int) int {
	x := random.Float64()
	return of[0] + int(x*x*float64(of[1]-of[0]))
}

// newWorld returns the world of a seed.
func newWorld(seed uint64, show func(string)) *world {
	return &world{seed: seed, random: rand.New(rand.NewPCG(seed, 1)), show: show, requests: map[string]*request{}, figures: newFigures(), ejected: map[uint64]uint64{}}
}

// run runs it in a synctest bubble.
func (w *world) run() {
	w.began = time.Now()
	w.long = time.Duration(3+w.random.IntN(5)) * time.Minute
	w.signs = []signs{signsEvents, signsEvents, signsCounters, signsNone}[w.random.IntN(4)]
	log := slog.New(slog.DiscardHandler)
	if w.show != nil {
		log = slog.New(slog.NewTextHandler(lines{w}, nil))
	}
	rule, err := policies.New("work", testkit.Defaults[policies.Settings]())
	if err != nil {
		panic(err)
	}
	w.router = router.New(testkit.Defaults[router.Settings](), router.Deps{Index: radix.NewTree(), Policy: rule, BlockSize: 64, Seed: w.seed, Log: log})
	settings := testkit.Defaults[proxy.Settings]()
	settings.RequestTimeout = 30 * time.Minute
	w.proxy = proxy.New(settings, proxy.Deps{Observer: testkit.SilentObserver{}, Failed: w.failed, Names: w.router.Names(), Transport: w, Log: log})
	ctx, cancel := context.WithCancel(context.Background())
	read, write := 2000+w.random.Float64()*18_000, time.Duration(8+w.random.IntN(40))*time.Millisecond
	for i := range 2 + w.random.IntN(3) {
		worker := &worker{world: w, id: uint64(i), read: read * (0.8 + 0.4*w.random.Float64()), write: write, wake: make(chan struct{}, 1), state: well, generation: 1}
		w.workers = append(w.workers, worker)
		w.up(worker, 1)
		w.running.Go(func() { worker.run(ctx) })
		supervisor := &supervisor{world: w, worker: worker, random: rand.New(rand.NewPCG(w.seed, 100+uint64(i))), up: true, generation: 1, wake: make(chan struct{}, 1)}
		worker.supervisor(supervisor)
		w.running.Go(func() { supervisor.run(ctx) })
	}
	w.running.Go(func() { w.watch(ctx) })
	w.plan()
	w.send()
	w.clients.Wait()
	cancel()
	w.running.Wait()
	w.proxy.Close()
	w.figures.Seeds, w.figures.Virtual = 1, time.Since(w.began)
	time.Sleep(time.Minute)
}

// up makes a worker known to the router.
func (w *world) up(worker *worker, generation int) {
	w.router.Up(kv.Target{Key: worker.key(), URL: "http://w" + strconv.FormatUint(worker.id, 10), Ranks: 1, Generation: generation, TotalBlocks: 16384, MaxBatchedTokens: passTokens})
}

// RoundTrip implements http.RoundTripper.
func (w *world) RoundTrip(r *http.Request) (*http.Response, error) {
	id, _ := strconv.Atoi(r.URL.Host[1:])
	return w.workers[id].RoundTrip(r)
}

// CloseIdleConnections is called by the proxy's Close.
func (w *world) CloseIdleConnections() {}

func (w *world) request(id string) *request {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.requests[id]
}

// failed has a worker checked at once.
func (w *world) failed(worker uint64) { w.workers[worker].supervised.checkSoon() }

// bad records what must not be.
func (w *world) bad(format string, args ...any) {
	text := fmt.Sprintf("seed %d at %s: ", w.seed, time.Since(w.began).Round(time.Millisecond)) + fmt.Sprintf(format, args...)
	w.figures.Bad = append(w.figures.Bad, text)
	w.log(text)
}

func (w *world) log(text string) {
	if w.show != nil {
		w.show(fmt.Sprintf("%12s %s", time.Since(w.began).Round(time.Millisecond), text))
	}
}

// lines shows log lines.
type lines struct{ w *world }

// Write implements io.Writer.
func (l lines) Write(b []byte) (int, error) {
	_, text, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
	l.w.log("   " + text)
	return len(b), nil
}

// send sends the requests of a world.
func (w *world) send() {
	random := rand.New(rand.NewPCG(w.seed, 2))
	ctx, cancel := context.WithCancel(context.Background())
	defer context.AfterFunc(ctx, func() {})()
	// The load leaves a worker that works some time to rest.
	var work float64 // seconds of one worker for a request, on average
	for i := range kinds {
		k := &kinds[i]
		prompt, output := float64(k.prompt[0]+(k.prompt[1]-k.prompt[0])/3), float64(k.output[0]+(k.output[1]-k.output[0])/3)
		work += k.share * (prompt/w.workers[0].read + output*w.workers[0].write.Seconds()/16)
	}
	pause := max(work/(0.1+0.4*random.Float64())/float64(len(w.workers)), 0.4)
	n := 0
	for time.Since(w.began) < w.long {
		time.Sleep(time.Duration(random.ExpFloat64() * pause * float64(time.Second)))
		x := random.Float64()
		k := &kinds[0]
		for i := range kinds {
			if k = &kinds[i]; x < k.share {
				break
			}
			x -= k.share
		}
		n++
		q := &request{world: w, id: fmt.Sprintf("q%d", n), kind: k, prompt: between(random, k.prompt), output: between(random, k.output), reads: random.Uint64()}
		q.ctx, q.cancel = context.WithCancel(ctx)
		if random.Float64() < 0.04 {
			q.leaves = time.Duration(random.ExpFloat64() * 10 * float64(time.Second))
		}
		w.mu.Lock()
		w.requests[q.id] = q
		w.figures.Requests++
		w.mu.Unlock()
		w.clients.Go(q.run)
	}
	w.clients.Wait()
	cancel()
}

// plan has the faults of the world happen in their time: in half of the worlds one worker has one.
func (w *world) plan() {
	random := rand.New(rand.NewPCG(w.seed, 3))
	if random.Float64() < 0.5 {
		return
	}
	worker := w.workers[random.IntN(len(w.workers))]
	what := []state{dead, hung, stuck}[random.IntN(3)]
	at, long := time.Duration(60+random.IntN(60))*time.Second, time.Duration(90+random.IntN(120))*time.Second
	w.running.Go(func() {
		time.Sleep(at)
		began := time.Now()
		w.log(fmt.Sprintf("worker %d: %s for %s", worker.id, what, long))
		worker.set(what)
		w.mu.Lock()
		w.figures.Faults[what]++
		w.mu.Unlock()
		known := false
		for time.Since(began) < long {
			time.Sleep(100 * time.Millisecond)
			record, up := w.router.Health.Record(worker.key())
			if !known && (!up || record.State != health.StateIn && record.State != health.StateBack) {
				known = true
				w.mu.Lock()
				w.figures.Avoided[what] = append(w.figures.Avoided[what], time.Since(began))
				w.mu.Unlock()
			}
		}
		if !known {
			w.mu.Lock()
			w.figures.Missed[what]++
			w.mu.Unlock()
		}
		if what != dead { // it is killed, and started again
			worker.set(dead)
			time.Sleep(30 * time.Second)
		}
		worker.set(well)
		w.log(fmt.Sprintf("worker %d: started again", worker.id))
	})
}

// watch counts the ejections, and reads the workers' counters.
func (w *world) watch(ctx context.Context) {
	progress := make([]int, len(w.workers))
	for i := 0; ctx.Err() == nil; i++ {
		select {
		case <-time.After(250 * time.Millisecond):
		case <-ctx.Done():
		}
		list, _ := w.router.Health.Records()
		for _, record := range list {
			w.count(record)
		}
		if i%4 != 0 || w.signs == signsNone {
			continue
		}
		for i, worker := range w.workers {
			s, generation, busy := worker.is()
			worker.mu.Lock()
			now := worker.progress
			worker.mu.Unlock()
			if s != dead && s != hung && busy == 0 && now != progress[i] {
				progress[i] = now
				w.lives(worker.id, generation)
			}
		}
	}
}

// count counts new ejections of a worker.
func (w *world) count(record health.Record) {
	id, n := record.Worker.Worker, uint64(0)
	for _, times := range record.Ejections {
		n += times
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if n == w.ejected[id] {
		return
	}
	w.ejected[id] = n
	if w.workers[id].faultyNow(10 * time.Second) {
		w.figures.Ejections++
		return
	}
	w.figures.FalseEjections++
	w.bad("worker %d works, and is ejected: %s", id, record.Why)
}
