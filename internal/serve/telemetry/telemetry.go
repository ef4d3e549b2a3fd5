// Package telemetry observes requests: it keeps their Prometheus metrics, and a record
// of finished requests that kvrouter simulate can replay.
package telemetry

import (
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/serve/proxy"
)

// Metrics keeps the metrics of requests and serves the metrics page, which also shows
// the collectors of other packages. Label worker_id has the worker's name, else its id.
// It is safe for concurrent use.
type Metrics struct {
	registry  *prometheus.Registry
	names     *kv.Names
	fleet     func() []uint64
	exemplars bool
	dynamo    *dynamoMetrics
	disagg    *disaggMetrics

	requests        *prometheus.CounterVec
	duration        *prometheus.HistogramVec
	firstToken      *prometheus.HistogramVec
	interToken      *prometheus.HistogramVec
	decision        *prometheus.HistogramVec
	promptTokens    *prometheus.CounterVec
	outputTokens    *prometheus.CounterVec
	predicted       *prometheus.CounterVec
	reachable       *prometheus.CounterVec
	cached          *prometheus.CounterVec
	compared        *prometheus.CounterVec
	predictions     *prometheus.CounterVec
	predictedByTier *prometheus.CounterVec
	tierPredictions *prometheus.CounterVec
	guesses         *prometheus.CounterVec
	promptDiffers   *prometheus.CounterVec
	retries         *prometheus.CounterVec
	denied          *prometheus.CounterVec
	migrations      *prometheus.CounterVec
	hedges          *prometheus.CounterVec
	eventLag        *prometheus.HistogramVec

	reportCompared func(worker kv.WorkerKey, predicted kv.TierTokens, found int) // nil: nothing is reported

	// seen has the value of worker_id of every worker that may have series above: a
	// sync.Map, as nearly every request finds its worker there.
	seen  sync.Map
	known atomic.Int64 // entries of seen
	most  int          // of them; 0: no limit

	summing sync.Mutex     // held while series are summed or deleted, and while Deps.Fleet is called
	gone    metrics.Totals // of removed workers; summing guards it
}

// Deps are the parts that Metrics reads.
type Deps struct {
	Names    *kv.Names       // of workers; nil: workers are named by their ids
	Fleet    func() []uint64 // ids of the current workers; nil: no series is ever deleted
	Thompson *router.Router  // its policy has metrics if it is thompson, for which Fleet must be set; nil: none
	// Compared is called with each prediction for a worker, by tier, and what it found of
	// the prompt, tokens; nil: nothing is.
	Compared  func(worker kv.WorkerKey, predicted kv.TierTokens, found int)
	Workers   int  // with series of their own; the others are summed in kv.OtherWorkers. 0: all
	Exemplars bool // offer OpenMetrics, with trace ids as exemplars of the time to first token
}

// maxScrapes is the maximum number of answers of a page that are being written.
const maxScrapes = 32

// secondsBuckets range from one token of a fast engine to a long prompt on a slow one.
var secondsBuckets = []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300}

// decisionBuckets range from an index lookup to a prompt that a worker renders.
var decisionBuckets = prometheus.ExponentialBuckets(0.000001, 3, 16)

// New returns the metrics of requests, of the Go runtime and of the process.
func New(deps Deps) *Metrics {
	t := &Metrics{registry: prometheus.NewRegistry(), names: deps.Names, fleet: deps.Fleet, exemplars: deps.Exemplars, most: deps.Workers,
		reportCompared: deps.Compared}
	register := promauto.With(t.registry)
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return register.NewCounterVec(prometheus.CounterOpts{Name: "kvrouter_" + name, Help: help}, labels)
	}
	histogram := func(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
		return register.NewHistogramVec(prometheus.HistogramOpts{Name: "kvrouter_" + name, Help: help, Buckets: buckets}, labels)
	}
	t.requests = counter("requests_total",
		"Requests by the worker that answered (none: no worker), route and HTTP status (499: the client disconnected).", "worker_id", "route",
		"status")
	t.duration = histogram("request_duration_seconds", "Time from the arrival of a request to the end of its response.", secondsBuckets,
		"route")
	t.firstToken = histogram("time_to_first_token_seconds", "Time from the arrival of a request to the first chunk of its stream.",
		secondsBuckets, "worker_id")
	t.interToken = histogram("inter_token_latency_seconds", "Time between two tokens of a stream.", secondsBuckets, "worker_id")
	t.decision = histogram("decision_seconds", "Time of a routing decision, by stage: tokens, hash, lookup, schedule, total.", decisionBuckets,
		"stage")
	t.promptTokens = counter("prompt_tokens_total", "Prompt tokens, as reported in the workers' usage.", "worker_id")
	t.outputTokens = counter("output_tokens_total", "Output tokens, as reported in the workers' usage.", "worker_id")
	t.predicted = counter("overlap_tokens_predicted_total", "Prompt tokens that the index predicted in the cache of the selected worker.",
		"worker_id")
	t.reachable = counter("reachable_cached_tokens_total",
		"Prompt tokens that the index predicted in the cache of the eligible worker with the most of them, of the requests counted in "+
			"kvrouter_overlap_tokens_predicted_total.")
	t.cached = counter("cached_tokens_reported_total", "Prompt tokens that the worker reported as cached.", "worker_id")
	t.compared = counter("compared_prompt_tokens_total", "Prompt tokens of the requests counted in kvrouter_cached_tokens_reported_total.",
		"worker_id")
	t.predictions = counter("predictions_total",
		"Responses with reported cached tokens, by worker and accuracy of the prediction: exact, over, under.", "worker_id", "result")
	t.predictedByTier = counter("predicted_tokens_total",
		"Prompt tokens that the index predicted or guessed in the cache of the selected worker, by tier, of responses with reported cached "+
			"tokens.", "worker_id", "tier")
	t.guesses = counter("guesses_total",
		"Responses with reported cached tokens of which the prediction includes blocks that may be gone without an event, by worker and "+
			"accuracy: exact, over, under.", "worker_id", "result")
	t.tierPredictions = counter("tier_predictions_total",
		"Responses that report cached tokens by tier, by worker, tier and accuracy of the prediction: exact, over, under.", "worker_id", "tier",
		"result")
	t.promptDiffers = counter("prompt_tokens_mismatch_total",
		"Responses whose usage.prompt_tokens differs from the router's own count, by source of the router's tokens.", "source")
	t.retries = counter("retries_total", "Retries on another worker after the worker failed before the first byte of its response.",
		"worker_id")
	t.hedges = counter("hedges_total",
		"Requests without a first byte on a silent worker that began on another one, too, by result: won (it answered first), lost, failed.",
		"result")
	for _, result := range []string{proxy.HedgeWon, proxy.HedgeLost, proxy.HedgeFailed} {
		t.hedges.WithLabelValues(result)
	}
	t.migrations = counter("migrations_total",
		"Streams whose worker failed during the answer, by result: ok, failed, refused, limited, no_worker.", "result")
	for _, result := range []string{proxy.MigratedOK, proxy.MigratedFailed, proxy.MigratedRefused, proxy.MigratedLimited,
		proxy.MigratedNoWorker} {
		t.migrations.WithLabelValues(result)
	}
	t.denied = counter("retry_budget_exhausted_total", "Retries denied because of the retry budget, by reason: total, client.", "reason")
	for _, why := range []string{proxy.DeniedTotal, proxy.DeniedClient} {
		t.denied.WithLabelValues(string(why))
	}
	t.eventLag = histogram("kv_event_lag_seconds", "Time from the engine's timestamp of a KV event batch to its arrival at the router.",
		secondsBuckets, "worker_id")
	t.dynamo = newDynamoMetrics(register)
	t.disagg = newDisaggMetrics(register)
	if deps.Thompson != nil && thompson.With(deps.Thompson.WithPolicy, func(*thompson.Policy) {}) {
		t.Register(thompsonCollector(deps.Thompson, deps.Fleet, t.hasOwn))
	}
	t.Register(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return t
}

// Register adds the metrics of other packages to the page. It panics if two of them
// have the same name.
func (t *Metrics) Register(c ...prometheus.Collector) { t.registry.MustRegister(c...) }

// Handler serves the metrics page. The series of removed workers are deleted first.
func (t *Metrics) Handler() http.Handler { return t.page(t.registry) }

// Anonymous is Handler without the metrics whose labels name keys or tenants.
func (t *Metrics) Anonymous() http.Handler {
	return t.page(prometheus.GathererFunc(func() ([]*dto.MetricFamily, error) {
		families, err := t.registry.Gather()
		return slices.DeleteFunc(families, namesClients), err
	}))
}

// namesClients reports whether series of a metric have the name of a key or of a tenant.
func namesClients(family *dto.MetricFamily) bool {
	return slices.ContainsFunc(family.Metric, func(m *dto.Metric) bool {
		return slices.ContainsFunc(m.Label, func(l *dto.LabelPair) bool { return l.GetName() == "key" || l.GetName() == "tenant" })
	})
}

func (t *Metrics) page(all prometheus.Gatherer) http.Handler {
	page := promhttp.HandlerFor(all, promhttp.HandlerOpts{EnableOpenMetrics: t.exemplars, MaxRequestsInFlight: maxScrapes})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.forgetGone()
		page.ServeHTTP(w, r)
	})
}

// series returns the value of worker_id under which a worker's values count: its own, or
// kv.OtherWorkers if it is new and as many as may have series do. A worker keeps its
// series, whatever its load, because a sum that others leave would look like a restart.
func (t *Metrics) series(worker string) string {
	if _, known := t.seen.Load(worker); known {
		return worker
	}
	if worker != noWorker && t.most > 0 && t.known.Load() >= int64(t.most) {
		return kv.OtherWorkers
	}
	if _, known := t.seen.LoadOrStore(worker, nil); !known && worker != noWorker {
		t.known.Add(1)
	}
	return worker
}

// hasOwn reports whether a worker, one of so many, has series of its own.
func (t *Metrics) hasOwn(worker string, workers int) bool {
	_, known := t.seen.Load(worker)
	return known || t.most <= 0 || workers <= t.most
}

// perWorker lists the metrics with the label worker_id: their series stay until they
// are deleted.
func (t *Metrics) perWorker() []*prometheus.MetricVec {
	return []*prometheus.MetricVec{
		t.requests.MetricVec, t.firstToken.MetricVec, t.interToken.MetricVec, t.promptTokens.MetricVec, t.outputTokens.MetricVec,
		t.predicted.MetricVec, t.cached.MetricVec, t.compared.MetricVec, t.predictions.MetricVec, t.predictedByTier.MetricVec,
		t.tierPredictions.MetricVec, t.guesses.MetricVec, t.retries.MetricVec, t.eventLag.MetricVec,
	}
}

// forgetGone deletes the series of removed workers. A request that was still in flight
// may create some again; the next call deletes them.
func (t *Metrics) forgetGone() {
	if t.fleet == nil {
		return
	}
	t.summing.Lock()
	defer t.summing.Unlock()
	ids := t.fleet()
	there := make(map[string]bool, len(ids)+2)
	there[noWorker], there[kv.OtherWorkers] = true, true
	for _, id := range ids {
		there[t.names.Label(id)] = true
	}
	gone := map[string]bool{}
	t.seen.Range(func(worker, _ any) bool {
		if !there[worker.(string)] {
			t.seen.Delete(worker) // first: a request that makes a series from now on stores it again
			t.known.Add(-1)
			gone[worker.(string)] = true
		}
		return true
	})
	if len(gone) == 0 {
		return
	}
	t.sum(&t.gone, func(worker string) bool { return gone[worker] })
	for _, metric := range t.perWorker() {
		// DeletePartialMatch would go over all series for each worker: 8 s for 4,096 of them.
		var doomed []prometheus.Labels
		each(metric, func(m *dto.Metric) {
			if gone[label(m, "worker_id")] {
				doomed = append(doomed, labels(m))
			}
		})
		for _, series := range doomed {
			metric.Delete(series)
		}
	}
}

// noWorker is the value of worker_id for requests that no worker answered.
const noWorker = kv.NoWorker

// Began implements openai.Observer.
func (t *Metrics) Began(*http.Request, *proxy.Exchange) {}

// Accepted implements openai.Observer.
func (t *Metrics) Accepted(*proxy.Exchange, *jsonbody.Body) {}

// Decided implements openai.Observer: it records the times of one routing decision of a
// request that has a prompt.
func (t *Metrics) Decided(x *proxy.Exchange, pair *router.Pair) {
	if x.Source == "" {
		return
	}
	tokens, d := x.Prepared, pair.Took()
	t.decision.WithLabelValues("tokens").Observe(tokens.Seconds())
	t.decision.WithLabelValues("hash").Observe(d.HashTime.Seconds())
	t.decision.WithLabelValues("lookup").Observe(d.LookupTime.Seconds())
	t.decision.WithLabelValues("schedule").Observe(d.ScheduleTime.Seconds())
	t.decision.WithLabelValues("total").Observe((tokens + d.HashTime + d.LookupTime + d.ScheduleTime).Seconds())
	t.dynamo.decided(d)
}

// Retried implements proxy.Observer.
func (t *Metrics) Retried(worker uint64) {
	t.retries.WithLabelValues(t.series(t.names.Label(worker))).Inc()
}

// RetryDenied implements proxy.Observer.
func (t *Metrics) RetryDenied(why string) { t.denied.WithLabelValues(why).Inc() }

// Migrated implements proxy.Observer.
func (t *Metrics) Migrated(result string) { t.migrations.WithLabelValues(result).Inc() }

// Hedged implements proxy.Observer.
func (t *Metrics) Hedged(result string) { t.hedges.WithLabelValues(result).Inc() }

// InterToken implements proxy.Observer.
func (t *Metrics) InterToken(worker string, gap time.Duration, n int) {
	observer := t.interToken.WithLabelValues(t.series(worker))
	for range n {
		observer.Observe(gap.Seconds() / float64(n))
	}
}

// EventLag records the age of a KV event batch of w on arrival.
func (t *Metrics) EventLag(w kv.WorkerKey, lag time.Duration) {
	t.eventLag.WithLabelValues(t.series(t.names.Label(w.Worker))).Observe(lag.Seconds())
}

// Finished implements openai.Observer: it records a finished request.
func (t *Metrics) Finished(x *proxy.Exchange, now time.Time) {
	if x.Refused != nil {
		t.refused(x.Served, x.Route, x.Refused)
	}
	by := t.series(x.Worker)
	t.requests.WithLabelValues(by, x.Route, strconv.Itoa(x.Status)).Inc()
	t.duration.WithLabelValues(x.Route).Observe(now.Sub(x.Arrived).Seconds())
	if !x.FirstChunk.IsZero() {
		observe(t.firstToken.WithLabelValues(by), x.FirstChunk.Sub(x.Arrived), x.Trace.SampledID())
	}
	if !x.Usage.Known {
		return
	}
	t.promptTokens.WithLabelValues(by).Add(float64(x.Usage.PromptTokens))
	t.outputTokens.WithLabelValues(by).Add(float64(x.Usage.OutputTokens))
	if x.Decision.Tokens > 0 && x.Usage.PromptTokens != x.Decision.Tokens {
		t.promptDiffers.WithLabelValues(x.Source).Inc()
	}
	decision, usage := x.Predicted()
	if decision.Tokens > 0 && usage.CachedKnown {
		worker := by
		if x.Shared != nil { // the prediction was for the prefill worker
			worker = t.series(x.Shared.Worker)
		}
		t.predicted.WithLabelValues(worker).Add(float64(decision.OverlapTokens))
		t.reachable.WithLabelValues().Add(float64(decision.Reachable))
		t.compareTiers(worker, decision.Predicted.Plus(decision.Guessed), *usage)
		t.cached.WithLabelValues(worker).Add(float64(usage.CachedTokens))
		t.compared.WithLabelValues(worker).Add(float64(usage.PromptTokens))
		if guess := decision.Guessed.Total(); guess > 0 {
			t.guesses.WithLabelValues(worker, resultOf(decision.OverlapTokens+guess, usage.CachedTokens)).Inc()
			return
		}
		t.predictions.WithLabelValues(worker, resultOf(decision.OverlapTokens, usage.CachedTokens)).Inc()
		if t.reportCompared != nil && x.Shared == nil {
			t.reportCompared(decision.Target.Key, decision.Predicted, usage.CachedTokens)
		}
	}
}

// compareTiers counts a prediction by tier and, if the answer reports tiers, how exact it
// was for each.
func (t *Metrics) compareTiers(worker string, predicted kv.TierTokens, usage proxy.Usage) {
	found := usage.CachedByTier
	reported := usage.CachedTokens > 0 && found.Total() == usage.CachedTokens
	for tier := kv.Device; tier <= kv.External; tier++ {
		if n := predicted.Of(tier); n > 0 {
			t.predictedByTier.WithLabelValues(worker, tier.String()).Add(float64(n))
		}
		if reported && predicted.Of(tier)+found.Of(tier) > 0 {
			t.tierPredictions.WithLabelValues(worker, tier.String(), resultOf(predicted.Of(tier), found.Of(tier))).Inc()
		}
	}
}

// resultOf is the value of the label result for a prediction.
func resultOf(predicted, found int) string {
	switch {
	case predicted > found:
		return "over"
	case predicted < found:
		return "under"
	}
	return "exact"
}

// observe records a duration, with the id of a trace as its exemplar unless it is empty.
func observe(into prometheus.Observer, took time.Duration, trace string) {
	if exemplars, can := into.(prometheus.ExemplarObserver); can && trace != "" {
		exemplars.ObserveWithExemplar(took.Seconds(), prometheus.Labels{"trace_id": trace})
		return
	}
	into.Observe(took.Seconds())
}
