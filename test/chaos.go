package test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"kvrouter/internal/testkit"
)

const (
	// chaosIll workers get faults; the other chaosWell do not.
	chaosIll, chaosWell = 6, 2
	chaosWorkers        = chaosIll + chaosWell
	// chaosSilent is the worker that falls silent now and then.
	chaosSilent  = chaosIll - 1
	chaosRouters = 2
	// chaosSilence is the routers' --silence-timeout.
	chaosSilence = 15 * time.Second
	// slowClients ask for long answers, one after the other, each in a way of its own.
	slowClients = 6
	// slowLimit is the limit of such an answer, and slowPause how long some of its clients do
	// not read.
	slowLimit = 3 * time.Minute
	slowPause = 20 * time.Second
	// slowPrompt is the length of a long prompt, bytes; the model takes 131,072 tokens.
	slowPrompt = 60_000
	// lastChats fill the caches before they are compared with the index: without requests,
	// crashes have emptied them.
	lastChats = 40
)

// ChaosSettings say how much a chaos run has to carry, and through what.
type ChaosSettings struct {
	Clients int    // each has one request in flight
	Pace    string // flags of the simulated workers that make them slow enough for the machine's cores
	// Limit is the time after which a request counts as hung: chaosSilence and the 20 s of work
	// that explain silence until a stuck worker is given up, 5 s to be answered elsewhere, and
	// two answers' time.
	Limit time.Duration
	Long  int // tokens of a long answer: tens of seconds
	// Phase is the time for which a worker stays stuck or failing. It is longer than
	// Limit, so that a request that is kept waiting shows.
	Phase time.Duration
	// Gateway starts a gateway that asks the pickers for a worker, all given as
	// host:port, and returns its URL and its process. nil: clients ask the routers.
	Gateway func(pickers, workers []string) (url string, pid int)
}

// chaos is two routers over eight simulated workers, and all that goes wrong.
type chaos struct {
	t       *testing.T
	farm    *Mocks // starts the workers, and follows their events as the routers do
	routers *rollout
	links   []*testkit.Link // to the worker that falls silent
	soak    *soak
	slow    *soak // clients of long answers
	gateway int   // its process; 0: there is none

	ChaosSettings

	mu     sync.Mutex   // guards what follows
	sizes  [3][]size    // of the first router, in each third of the run
	memory [3][]float64 // of the gateway, MB
	load   [3][]float64 // of the machine: processes that run or want to, by the kernel's average of a minute
}

// ChaosTime returns KVROUTER_CHAOS, and skips the test without it.
func ChaosTime(t *testing.T) time.Duration {
	t.Helper()
	d, err := time.ParseDuration(os.Getenv("KVROUTER_CHAOS"))
	if err != nil {
		t.Skip("set KVROUTER_CHAOS=2m, or run `make chaos`")
	}
	return d
}

// RunChaos keeps two routers busy for d while workers crash, fail fast, stand still and
// fall silent, events get lost, clients leave, and the routers are restarted in
// turn. Each request must come to an answer or one clear error. Workers without a fault
// must not be ejected, whole answers, long prompts and clients that do not read notwithstanding.
func RunChaos(t *testing.T, d time.Duration, s ChaosSettings) {
	c := newChaos(t, s)
	ctx, cancel := context.WithCancel(t.Context())
	var beside sync.WaitGroup
	began := time.Now()
	beside.Go(func() { c.faults(ctx, began) })
	beside.Go(func() { c.measure(ctx, began, d) })
	beside.Go(func() { c.slowWork(ctx) })
	turn, looks, wrong := 0, 0, 0
	c.soak.run(d, min(20*time.Second, d/6), func(elapsed time.Duration) {
		// From the second third on the first router stays, to see whether it grows.
		which := turn % 2
		if elapsed > d/3 {
			which = 1
		}
		turn++
		c.routers.restart(which)
		found := c.soak.look(t)
		looks, wrong = looks+found.workers, wrong+found.wrong
		t.Logf("%3.0f s: %s", elapsed.Seconds(), found)
	})
	cancel()
	beside.Wait()
	wrong += c.settle()
	c.report(d, looks, wrong)
}

func newChaos(t *testing.T, s ChaosSettings) *chaos {
	c := &chaos{t: t, ChaosSettings: s}
	pace := append(strings.Fields(s.Pace), "--mock=num-gpu-blocks=4096", "--mock=drop-events=0.01")
	well := StartWorkers(t, chaosWell, pace...)
	c.farm = StartMocks(t, chaosIll, append(pace, "--mock=crash-every=10s")...)
	workers := []string{"--silence-timeout=" + chaosSilence.String()}
	workers = append(workers, c.farm.Attach()[:chaosSilent]...)
	for i := range chaosWell {
		workers = append(workers, fmt.Sprintf("--worker=url=%s,id=%d", well.URL(i), chaosIll+i))
	}
	ports := c.farm.Settings.Ports
	for _, base := range []int{ports.HTTP, ports.KVEvents, ports.KVReplay, ports.Load} {
		c.links = append(c.links, testkit.NewLink(t, fmt.Sprintf("127.0.0.1:%d", base+chaosSilent)))
	}
	workers = append(workers, fmt.Sprintf("--worker=url=http://%s,id=%d,kv-events=tcp://%s,replay=tcp://%s,load=tcp://%s",
		c.links[0].Address(), chaosSilent, c.links[1].Address(), c.links[2].Address(), c.links[3].Address()))
	pickers, flags := []string(nil), func(int) []string { return workers }
	if s.Gateway != nil {
		at := testkit.FreePorts(t, 2*chaosRouters) // of the picker, and of replica sync
		for i := range chaosRouters {
			pickers = append(pickers, fmt.Sprintf("127.0.0.1:%d", at+2*i))
		}
		flags = func(i int) []string {
			return append(slices.Clone(workers), fmt.Sprintf("--ext-proc-port=%d", at+2*i), "--cluster=test",
				fmt.Sprintf("--cluster-port=%d", at+2*i+1), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", at+2*(1-i)+1))
		}
	}
	c.routers = startRolloutOf(t, chaosRouters, flags)
	c.routers.watched = regexp.MustCompile(fmt.Sprintf(`(?m)^.*worker [%d-%d].*(ejected|down|does not answer).*$`, chaosIll, chaosWorkers-1))
	c.soak = newSoak(c.farm.Workers, c.farm.Router, s.Limit)
	c.soak.where, c.soak.leaving, c.soak.clients = c.routers.where, 0.05, s.Clients
	if s.Gateway != nil {
		var addresses []string
		for i := range chaosSilent {
			addresses = append(addresses, strings.TrimPrefix(c.farm.URL(i), "http://"))
		}
		addresses = append(addresses, c.links[0].Address())
		for i := range chaosWell {
			addresses = append(addresses, strings.TrimPrefix(well.URL(i), "http://"))
		}
		var url string
		url, c.gateway = s.Gateway(pickers, addresses)
		c.soak.where, c.soak.gateway = func() string { return url }, true
	}
	c.slow = newSoak(nil, nil, slowLimit)
	c.slow.where, c.slow.gateway = c.soak.where, c.soak.gateway
	c.slow.client.Transport = &http.Transport{DisableKeepAlives: true, DialContext: dialNarrow}
	return c
}

// dialNarrow opens a connection whose buffer holds little of an answer that is not read.
func dialNarrow(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return conn, conn.(*net.TCPConn).SetReadBuffer(4 << 10)
}

// slowWork asks for what makes a worker look stuck, until ctx ends: whole answers, some after
// a long prompt, and streams that their clients do not read for a while.
func (c *chaos) slowWork(ctx context.Context) {
	var clients sync.WaitGroup
	for i := range slowClients {
		clients.Go(func() {
			for random := rand.New(rand.NewPCG(uint64(i), 5)); ctx.Err() == nil; {
				prompt, pause := 200, time.Duration(0)
				switch i % 3 {
				case 1:
					prompt = slowPrompt
				case 2:
					pause = slowPause
				}
				if _, ok := c.slow.ask(Say(soakText(random, prompt)), pause > 0, c.Long, slowLimit, pause); !ok {
					<-time.After(soakRest)
				}
			}
		})
	}
	clients.Wait()
}

// faults has one worker fail fast, one stand still and one be silent, in turn,
// until ctx ends; then all are well.
func (c *chaos) faults(ctx context.Context, began time.Time) {
	kinds := []int32{http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout, 529}
	ticker := time.NewTicker(100 * time.Millisecond) // a worker that was started again is well
	defer ticker.Stop()
	for running := true; running; {
		select {
		case <-ctx.Done():
			running = false
		case <-ticker.C:
		}
		elapsed := time.Since(began)
		phase := int(elapsed / c.Phase)
		for i := range chaosSilent {
			w := c.farm.Worker(i)
			failing := int32(0)
			if running && i == phase%chaosSilent {
				failing = kinds[int(elapsed.Seconds())%len(kinds)]
			}
			w.Failing.Store(failing)
			w.Stuck.Store(running && i == (phase+3)%chaosSilent)
		}
		for _, link := range c.links {
			if running && elapsed%c.Phase > c.Phase/2 {
				link.Silence()
			} else {
				link.Mend()
			}
		}
	}
}

// measure notes the size of the first router in each third of the run.
func (c *chaos) measure(ctx context.Context, began time.Time, d time.Duration) {
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		third := int(3 * time.Since(began) / d)
		now, ok := sizeOf(c.routers.router(0))
		gateway, there := memoryOf(c.gateway, "VmRSS")
		load, known := loadAverage()
		if third >= 3 {
			continue
		}
		c.mu.Lock()
		if ok {
			c.sizes[third] = append(c.sizes[third], now)
		}
		if there {
			c.memory[third] = append(c.memory[third], gateway)
		}
		if known {
			c.load[third] = append(c.load[third], load)
		}
		c.mu.Unlock()
	}
}

// settle waits until nothing is booked any more, and holds what both routers know
// against the workers' caches; wrong are the matches that go too far.
func (c *chaos) settle() (wrong int) {
	var chats sync.WaitGroup
	for i := range lastChats {
		chats.Go(func() { c.soak.converse(c.t.Context(), rand.New(rand.NewPCG(uint64(i), 6))) })
	}
	chats.Wait()
	for i := range c.routers.sites {
		router := c.routers.router(i)
		testkit.Eventually(c.t, 2*c.Limit, fmt.Sprintf("router %d has nothing booked and all workers", i), func() bool {
			booked, up := 0, 0
			for _, w := range router.Workers() {
				booked += w.InFlight
				if w.Lifecycle == "schedulable" {
					up++
				}
			}
			return booked == 0 && up == chaosWorkers
		})
		var found standing
		// A removal that was lost last shows when a quiet stream is asked again.
		for limit := time.Now().Add(c.Limit); time.Now().Before(limit); <-time.After(time.Second) {
			if found = c.soak.compare(c.t, c.soak.some(), matches(router)); found.wrong == 0 && found.workers == chaosIll {
				break
			}
		}
		c.t.Logf("router %d in the end: %s", i, found)
		if found.blocks == 0 {
			c.t.Error("nothing was compared")
		}
		wrong += found.wrong
	}
	return wrong
}

// report prints the table, and fails on what must not be.
func (c *chaos) report(d time.Duration, looks, wrong int) {
	t, s := c.t, c.soak
	refused := s.broken
	for _, n := range s.refused {
		refused += n
	}
	answered, lost := len(s.wholes), len(s.odd)
	share := float64(answered+refused+s.cut) / float64(max(1, answered+refused+s.cut+lost+s.hung))
	crashes := int(c.farm.Starts.Load()) - c.farm.Count
	var text strings.Builder
	table := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	row := func(cells ...any) {
		for _, cell := range cells {
			fmt.Fprintf(table, "%v\t", cell)
		}
		fmt.Fprintln(table)
	}
	row("routers restarted", fmt.Sprint(c.routers.restarts, " times, workers crashed ", crashes, " times"))
	row("answered", answered)
	row("one clear error", refused, fmt.Sprint("streams ", s.broken, ", status ", s.refused))
	if c.gateway != 0 {
		row("cut by the gateway", s.cut, "answers that ended with their connection")
	}
	row("clients that left", s.left)
	row("lost", lost)
	row("hung", s.hung, fmt.Sprint(s.stalled, " after the answer had begun"))
	row("answered or one clear error", fmt.Sprintf("%.3f %%", 100*share))
	slow := c.slow
	row("long answers", len(slow.wholes), fmt.Sprintf("one clear error: streams %d, status %v; lost %d, hung %d", slow.broken, slow.refused,
		len(slow.odd), slow.hung))
	ejected := c.routers.watch()
	row("well workers ejected or down", len(ejected))
	row("wrong matches", wrong, fmt.Sprintf("in %d looks at a worker's cache", looks+chaosRouters*chaosIll))
	row("predicted too much", fmt.Sprintf("%.2f %% of the answers", 100*float64(s.over)/float64(max(1, answered))))
	row("", "p50", "p99")
	row("first byte of a stream", quantile(s.firsts, 0.5), quantile(s.firsts, 0.99))
	row("whole answer", quantile(s.wholes, 0.5), quantile(s.wholes, 0.99))
	row("first router", "beginning", "middle", "end")
	streams, short := 0.0, 0.0 // at one router or at the other: by a gateway, and as thirds within one fault differ
	if c.gateway != 0 {
		streams = float64(c.Clients)
	}
	if d/3 < c.Phase {
		short = float64(c.Clients)
	}
	for _, of := range []struct {
		name  string
		slack float64 // that is no growth
		of    func(size) float64
	}{
		{"memory, MB", 16 + streams/25, func(s size) float64 { return s.memory }},
		{"goroutines", 50 + streams + short, func(s size) float64 { return s.goroutines }},
		{"descriptors", 50 + short, func(s size) float64 { return s.descriptors }},
	} {
		first, second, third := middle(c.sizes[0], of.of), middle(c.sizes[1], of.of), middle(c.sizes[2], of.of)
		row(of.name, fmt.Sprintf("%.0f", first), fmt.Sprintf("%.0f", second), fmt.Sprintf("%.0f", third))
		if !(third <= second*1.1+of.slack) {
			t.Errorf("%s: %.0f in the last third after %.0f in the second", of.name, third, second)
		}
	}
	plain := func(v float64) float64 { return v }
	thirds := func(name, format string, of [3][]float64) {
		row(name, fmt.Sprintf(format, middle(of[0], plain)), fmt.Sprintf(format, middle(of[1], plain)), fmt.Sprintf(format, middle(of[2], plain)))
	}
	if c.gateway != 0 {
		thirds("memory of the gateway, MB", "%.0f", c.memory)
	}
	thirds("load average of the machine", "%.1f", c.load)
	table.Flush()
	for _, said := range slices.SortedFunc(maps.Keys(s.texts), func(a, b string) int { return s.texts[b] - s.texts[a] }) {
		t.Logf("%6d times %s", s.texts[said], said)
	}
	for _, which := range s.late[:min(20, len(s.late))] {
		t.Logf("hung: %s", which)
	}
	t.Logf("chaos of %s, %d workers, %d clients\n%s", d, chaosWorkers, s.clients, &text)
	if len(ejected) > 0 {
		t.Errorf("workers without a fault were ejected, %d times, such as %q", len(ejected), ejected[:min(5, len(ejected))])
	}
	if len(slow.wholes) == 0 || slow.hung > 0 || len(slow.odd) > 0 {
		t.Errorf("%d long answers, %d hung: %q, lost %q", len(slow.wholes), slow.hung, slow.late[:min(5, slow.hung)],
			slow.odd[:min(5, len(slow.odd))])
	}
	if s.hung > 0 || wrong > 0 || looks == 0 || answered == 0 || share < 0.999 {
		t.Errorf("hung %d, wrong matches %d, %.3f %% came to an answer or one clear error; the first of %d others: %q", s.hung, wrong, 100*share,
			lost, s.odd[:min(5, lost)])
	}
}

// loadAverage returns the machine's load average of the last minute.
func loadAverage() (load float64, ok bool) {
	text, err := os.ReadFile("/proc/loadavg")
	first, _, found := strings.Cut(string(text), " ")
	if err != nil || !found {
		return 0, false
	}
	load, err = strconv.ParseFloat(first, 64)
	return load, err == nil
}
