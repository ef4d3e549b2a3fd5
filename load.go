package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"sort"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"
)

// Published is a worker's load as the worker itself reports it.
type Published struct {
	Running int       // requests in the engine's batch
	Waiting int       // requests in the engine's queue
	KVUsage float64   // share of the KV cache in use, 0..1
	At      time.Time // when it arrived here; zero: never
}

// Load is one worker's load: what it published and what this router has booked
// on it.
type Load struct {
	Published
	Fresh         bool // Published is recent enough to be believed
	Bumped        int  // requests sent since the last Published
	InFlight      int  // requests sent and not yet ended
	PrefillTokens int  // uncached prompt tokens of requests without a first token
	ContextTokens int  // prompt tokens of the others in flight, which decode
	AwaitedTokens int  // prompt tokens that other workers compute, of requests that will decode here
	ActiveBlocks  int  // blocks of requests in flight, shared ones once and by their weights; see Traits

	Prefills   []Prefill // the requests without a first token, as they were sent; to be read under the Router's lock
	FirstToken time.Time // when a first token last came from it; zero: never
}

// Prefill is a prompt that a worker computes, or will.
type Prefill struct {
	Tokens int // uncached ones
	Sent   time.Time
	Silent bool // nobody will tell of its first token
}

// QueueLength is how many requests wait on the worker: its published queue plus
// what was sent since then. A worker that publishes nothing counts by what is
// in flight.
func (l Load) QueueLength() int {
	if !l.Fresh {
		return l.InFlight
	}
	return l.Waiting + l.Bumped
}

// loadFreshFor is how long a published load is believed. The plugin repeats its
// last value every second, and polls of /metrics come as often.
const loadFreshFor = 10 * time.Second

// Loads holds every worker's load. It has no lock of its own: its owner, the
// Router, guards it.
type Loads struct {
	byWorker map[WorkerKey]*workerLoad
	// active counts, by sequence hash and worker number, the requests in flight
	// that have the block in their prompt.
	active table
	unused []uint32 // numbers of workers that are gone

	byID           map[string]*Booking
	oldest, newest *Booking // by when somebody last spoke of them
}

// workerLoad is a worker's load, its number in Loads.active and what it has done.
type workerLoad struct {
	Load
	number uint32
	gone   bool // to be dropped with its last booking
	done   tally
	tally  time.Time // when done was brought up to date

	tellsCached bool // an answer of it has said how many of its prompt's tokens were cached

	blocks  int                // distinct prompt blocks of requests in flight
	weights map[uint64]float64 // of those that do not count 1, by sequence hash
	excess  float64            // sum of those weights, less 1 each
	output  float64            // sum of the weights of output blocks
}

// activeBlocks is the sum of all weights, rounded.
func (l *workerLoad) activeBlocks() int {
	return int(math.Round(float64(l.blocks) + l.excess + l.output))
}

// weigh sets the weight of a block.
func (l *workerLoad) weigh(h uint64, weight float64) {
	if old, has := l.weights[h]; has {
		l.excess -= old - 1
	}
	if weight != 1 {
		if l.weights == nil {
			l.weights = map[uint64]float64{}
		}
		l.weights[h] = weight
		l.excess += weight - 1
	} else if delete(l.weights, h); len(l.weights) == 0 {
		l.excess = 0 // what rounding left
	}
}

// tally counts what a worker has done since its first request.
type tally struct {
	prompts int     // that got their first token
	tokens  int     // uncached ones of those
	context float64 // sum over time of ContextTokens, token·s
}

// tallyAt brings the tally up to now and returns it.
func (l *workerLoad) tallyAt(now time.Time) tally {
	if !l.tally.IsZero() {
		l.done.context += float64(l.ContextTokens) * now.Sub(l.tally).Seconds()
	}
	l.tally = now
	return l.done
}

// since returns what was done between two tallies that are d apart.
func (t tally) since(before tally, d time.Duration) Meanwhile {
	m := Meanwhile{Prompts: t.prompts - before.prompts, Tokens: t.tokens - before.tokens}
	if d > 0 {
		m.Context = (t.context - before.context) / d.Seconds()
	}
	return m
}

// NewLoads returns an empty table.
func NewLoads() *Loads {
	return &Loads{byWorker: map[WorkerKey]*workerLoad{}, byID: map[string]*Booking{}, active: table{seed: rand.Uint64()}} // the seed affects no result
}

// Publish takes over what worker w reports of itself.
func (l *Loads) Publish(w WorkerKey, p Published) {
	load := l.of(w)
	load.Published = p
	load.Bumped = 0
}

// Bump counts one request sent to w until w publishes again.
func (l *Loads) Bump(w WorkerKey) { l.of(w).Bumped++ }

// Begin books a request that is sent now.
func (l *Loads) Begin(b *Booking, now time.Time) {
	load := l.of(b.worker)
	b.sent, b.alone, b.atSent = now, len(load.Prefills) == 0, load.tallyAt(now)
	load.InFlight++
	if b.leg == LegDecode {
		load.AwaitedTokens += b.prompt
	} else {
		load.PrefillTokens += b.uncached
		load.Prefills = append(load.Prefills, b.prefill())
	}
	l.Activate(b.worker, b.sequence)
	if b.id != "" {
		l.byID[b.id] = b
	}
	l.link(b, now)
}

// Booking returns the booking under that id, or nil.
func (l *Loads) Booking(id string) *Booking { return l.byID[id] }

// Booked lists the workers that have bookings, in no order.
func (l *Loads) Booked() []WorkerKey {
	var keys []WorkerKey
	for w, load := range l.byWorker {
		if load.InFlight > 0 {
			keys = append(keys, w)
		}
	}
	return keys
}

// Heard notes that somebody spoke of a booking now.
func (l *Loads) Heard(b *Booking, now time.Time) {
	if !b.ended.Load() && b != l.newest {
		l.unlink(b)
		l.link(b, now)
	}
	b.heard = now
}

// link puts b behind all others.
func (l *Loads) link(b *Booking, now time.Time) {
	b.heard, b.older, b.newer = now, l.newest, nil
	if l.newest != nil {
		l.newest.newer = b
	} else {
		l.oldest = b
	}
	l.newest = b
}

func (l *Loads) unlink(b *Booking) {
	if b.older != nil {
		b.older.newer = b.newer
	} else {
		l.oldest = b.newer
	}
	if b.newer != nil {
		b.newer.older = b.older
	} else {
		l.newest = b.older
	}
	b.older, b.newer = nil, nil
}

// FirstToken tells that the prompt of a booked request has been computed: it
// decodes from now on.
func (l *Loads) FirstToken(b *Booking, now time.Time) {
	load := l.of(b.worker)
	load.tallyAt(now)
	load.ContextTokens += b.prompt
	if b.leg == LegDecode {
		load.AwaitedTokens -= b.prompt
		b.first, b.atFirst = now, load.done
		return
	}
	load.done.prompts++
	load.done.tokens += b.uncached
	b.first, b.atFirst = now, load.done
	load.PrefillTokens -= b.uncached
	if i := slices.Index(load.Prefills, b.prefill()); i >= 0 {
		load.Prefills = slices.Delete(load.Prefills, i, i+1)
	}
	if !b.silent {
		load.Load.FirstToken = now
	}
}

// End takes a finished request off, after FirstToken.
func (l *Loads) End(b *Booking, now time.Time) {
	load := l.of(b.worker)
	load.tallyAt(now)
	load.InFlight--
	load.ContextTokens -= b.prompt
	load.output -= b.outputWeight
	l.Deactivate(b.worker, b.sequence)
	l.unlink(b)
	if b.id != "" {
		delete(l.byID, b.id)
	}
	if load.InFlight == 0 {
		load.output = 0 // what rounding left
		l.drop(b.worker)
	}
}

// OutputBlock adds a block to a request's answer. A share is what each block
// counts from now on that no other request has.
func (l *Loads) OutputBlock(b *Booking, share *float64) {
	load := l.of(b.worker)
	b.outputs++
	weight := b.outputWeight + 1
	if share != nil {
		each := min(max(*share, 0), 1)
		weight = float64(b.outputs) * each
		for i := len(b.sequence) - 1; i >= 0 && l.active.get(b.sequence[i], load.number) == 1; i-- {
			load.weigh(b.sequence[i], each) // all before one that is shared are shared
		}
	}
	load.output += weight - b.outputWeight
	b.outputWeight = weight
}

// Outcome sums up a request that is ending now with so many tokens, before End.
func (l *Loads) Outcome(b *Booking, output int, now time.Time) Outcome {
	o := Outcome{
		Worker: b.worker, Leg: b.leg, Uncached: b.uncached, Output: output, Alone: b.alone,
		FirstToken: b.first.Sub(b.sent), Decode: now.Sub(b.first),
	}
	o.Before = b.atFirst.since(b.atSent, o.FirstToken)
	o.During = l.of(b.worker).tallyAt(now).since(b.atFirst, o.Decode)
	return o
}

// Activate books the blocks of a prompt, by sequence hash, on w.
func (l *Loads) Activate(w WorkerKey, sequence []uint64) {
	load := l.of(w)
	for _, h := range sequence {
		requests := l.active.get(h, load.number)
		if requests == 0 {
			load.blocks++
		}
		l.active.put(h, load.number, requests+1)
	}
}

// Deactivate takes off w what Activate booked.
func (l *Loads) Deactivate(w WorkerKey, sequence []uint64) {
	load := l.of(w)
	for _, h := range sequence {
		requests := l.active.get(h, load.number)
		if requests > 1 {
			l.active.put(h, load.number, requests-1)
			continue
		}
		l.active.delete(h, load.number)
		load.blocks--
		if len(load.weights) > 0 {
			load.weigh(h, 1)
		}
	}
}

// Active returns how many of these blocks requests in flight on w have in their
// prompts. Sequence hashes name whole prefixes, so those are the first ones, and
// a search finds their number.
func (l *Loads) Active(w WorkerKey, sequence []uint64) int {
	load := l.byWorker[w]
	if load == nil || load.blocks == 0 {
		return 0
	}
	has := func(i int) bool { return l.active.get(sequence[i], load.number) != 0 }
	active, end := 0, 1 // blocks before active are, from end on are not or unknown
	for end <= len(sequence) && has(end-1) {
		active, end = end, end*2
	}
	end = min(end-1, len(sequence))
	return active + sort.Search(end-active, func(i int) bool { return !has(active + i) })
}

// Get returns w's load as of now; a worker never heard of is idle.
func (l *Loads) Get(w WorkerKey, now time.Time) Load {
	load := l.byWorker[w]
	if load == nil {
		return Load{}
	}
	answer := load.Load
	answer.ActiveBlocks = load.activeBlocks()
	answer.Fresh = !load.At.IsZero() && now.Sub(load.At) < loadFreshFor
	return answer
}

// PrefillTokens returns that part of w's load.
func (l *Loads) PrefillTokens(w WorkerKey) int {
	if load := l.byWorker[w]; load != nil {
		return load.Load.PrefillTokens
	}
	return 0
}

// Silence forgets what w published: it is down, and its next incarnation starts
// idle. Bookings stay until their requests end.
func (l *Loads) Silence(w WorkerKey) {
	if load := l.byWorker[w]; load != nil {
		load.Published = Published{}
		load.Bumped = 0
		load.gone = true
		l.drop(w)
	}
}

// Expect keeps w, which is up, even while it has no bookings.
func (l *Loads) Expect(w WorkerKey) { l.of(w).gone = false }

// drop forgets w if it is gone and has no bookings.
func (l *Loads) drop(w WorkerKey) {
	if load := l.byWorker[w]; load.gone && load.InFlight == 0 {
		delete(l.byWorker, w)
		l.unused = append(l.unused, load.number)
	}
}

func (l *Loads) of(w WorkerKey) *workerLoad {
	load := l.byWorker[w]
	if load == nil {
		load = &workerLoad{number: uint32(len(l.byWorker) + len(l.unused))}
		if last := len(l.unused) - 1; last >= 0 {
			load.number, l.unused = l.unused[last], l.unused[:last]
		}
		l.byWorker[w] = load
	}
	return load
}

// loadPollInterval is how often a worker without a load socket is asked for
// its /metrics; loadRetry is the pause after a failure of either source.
const (
	loadPollInterval = time.Second
	loadRetry        = 500 * time.Millisecond
	maxMetricsBytes  = 16 << 20
)

// FollowLoad reports worker w's load to publish until ctx is done: every
// message of its load socket (ZMQ PUB of JSON, as the plugin sends) where
// zmqEndpoint names one, else its Prometheus page at metricsURL once a second.
// It reconnects for ever. Of a page that shows several engines the fragment of
// metricsURL names the one that counts; without one all do.
func FollowLoad(ctx context.Context, w WorkerKey, zmqEndpoint, metricsURL string, publish func(WorkerKey, Published), log *slog.Logger) {
	source, where := pollMetrics, metricsURL
	if zmqEndpoint != "" {
		source, where = readLoadSocket, zmqEndpoint
	}
	for failures := 0; ctx.Err() == nil; failures++ {
		err := source(ctx, where, func(p Published) {
			failures = 0
			publish(w, p)
		})
		if ctx.Err() != nil {
			return
		}
		if failures == 10 { // a worker that is starting is silent for a while
			log.Warn("no load from worker", "worker", w.Worker, "rank", w.Rank, "from", where, "error", err)
		}
		pause := time.NewTimer(loadRetry + rand.N(loadRetry))
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}

// loadMessage is the plugin's JSON. The example's older publisher calls the
// usage gpu_cache_usage.
type loadMessage struct {
	Waiting  *int     `json:"num_waiting_reqs"`
	Running  int      `json:"num_running_reqs"`
	KVUsage  *float64 `json:"kv_cache_usage"`
	GPUUsage *float64 `json:"gpu_cache_usage"`
}

func (m loadMessage) published() (Published, error) {
	p := Published{Running: m.Running, At: time.Now()}
	if m.Waiting == nil || (m.KVUsage == nil && m.GPUUsage == nil) {
		return p, fmt.Errorf("load message lacks num_waiting_reqs or kv_cache_usage")
	}
	p.Waiting = *m.Waiting
	if m.KVUsage != nil {
		p.KVUsage = *m.KVUsage
	} else {
		p.KVUsage = *m.GPUUsage
	}
	return p, nil
}

// readLoadSocket passes on what the socket publishes until it fails or ctx is
// done.
func readLoadSocket(ctx context.Context, endpoint string, publish func(Published)) error {
	conn, err := DialSub(ctx, endpoint, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		var load loadMessage
		if err := json.Unmarshal(frames[len(frames)-1], &load); err != nil {
			return fmt.Errorf("load message from %s: %w", endpoint, err)
		}
		p, err := load.published()
		if err != nil {
			return fmt.Errorf("%s: %w", endpoint, err)
		}
		publish(p)
	}
}

// pollMetrics asks a worker's Prometheus page again and again.
func pollMetrics(ctx context.Context, url string, publish func(Published)) error {
	ticker := time.NewTicker(loadPollInterval)
	defer ticker.Stop()
	for {
		p, err := getMetrics(ctx, url)
		if err != nil {
			return err
		}
		publish(p)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

func getMetrics(ctx context.Context, url string) (Published, error) {
	_, engine, _ := strings.Cut(url, "#")
	return readMetrics(ctx, url, func(page io.Reader) (Published, error) { return parseMetrics(page, engine) })
}

// readMetrics fetches a Prometheus page and reads it with parse.
func readMetrics[T any](ctx context.Context, url string, parse func(io.Reader) (T, error)) (T, error) {
	var none T
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return none, err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return none, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return none, fmt.Errorf("%s answered %s", url, response.Status)
	}
	return parse(io.LimitReader(response.Body, maxMetricsBytes))
}

// parseMetrics reads the engine's load out of a Prometheus page in vLLM's names
// (its older one for the KV usage too). Without an engine's number counts are
// summed over engines, and the usage is the fullest engine's.
func parseMetrics(page io.Reader, engine string) (Published, error) {
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(page)
	if err != nil {
		return Published{}, fmt.Errorf("metrics page: %w", err)
	}
	running, ok := gauges(families, engine, "vllm:num_requests_running")
	waiting, ok2 := gauges(families, engine, "vllm:num_requests_waiting")
	usage, ok3 := gauges(families, engine, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
	if !ok || !ok2 || !ok3 {
		return Published{}, fmt.Errorf("metrics page lacks vllm:num_requests_running, vllm:num_requests_waiting or vllm:kv_cache_usage_perc")
	}
	p := Published{At: time.Now()}
	for _, v := range running {
		p.Running += int(v)
	}
	for _, v := range waiting {
		p.Waiting += int(v)
	}
	for _, v := range usage {
		p.KVUsage = max(p.KVUsage, v)
	}
	return p, nil
}

// cacheSizes tells how many tokens the KV cache of each data-parallel rank holds.
type cacheSizes map[uint32]int

// parseCacheSizes reads the sizes of the engines' KV caches out of a Prometheus
// page in vLLM's names; engines that name none are left out.
func parseCacheSizes(page io.Reader) (cacheSizes, error) {
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(page)
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	sizes := cacheSizes{}
	for _, metric := range families["vllm:cache_config_info"].GetMetric() {
		labels := map[string]uint64{}
		for _, label := range metric.Label {
			if n, err := strconv.ParseUint(label.GetValue(), 10, 31); err == nil {
				labels[label.GetName()] = n
			}
		}
		// vLLM keeps one block for itself.
		if blocks := labels["num_gpu_blocks"]; blocks > 1 && labels["block_size"] > 0 {
			sizes[uint32(labels["engine"])] = int((blocks - 1) * labels["block_size"])
		}
	}
	return sizes, nil
}

// gauges returns the values of the first of names that the page has, for one
// engine or, if empty, for all.
func gauges(families map[string]*dto.MetricFamily, engine string, names ...string) ([]float64, bool) {
	for _, name := range names {
		family := families[name]
		if family == nil {
			continue
		}
		var values []float64
		for _, metric := range family.Metric {
			other := slices.ContainsFunc(metric.Label, func(l *dto.LabelPair) bool { return l.GetName() == "engine" && l.GetValue() != engine })
			if engine == "" || !other {
				values = append(values, metric.GetGauge().GetValue())
			}
		}
		return values, true
	}
	return nil, false
}
