package telemetry

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/logs"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// page returns the lines of a metrics page, but for comments.
func page(m *Metrics) (lines []string) {
	w := httptest.NewRecorder()
	m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	for line := range strings.Lines(w.Body.String()) {
		if !strings.HasPrefix(line, "#") {
			lines = append(lines, line)
		}
	}
	return lines
}

// serve counts what a request to a worker brings, of every kind. Another worker, which is not of
// the fleet, has computed its prompt.
func serve(m *Metrics, worker uint64) { serveBoth(m, worker, worker+1000) }

// serveBoth is serve with that other worker.
func serveBoth(m *Metrics, worker, prefill uint64) {
	label := m.names.Label(worker)
	now := time.Unix(1000, 0)
	m.Retried(worker)
	m.EventLag(kv.WorkerKey{Worker: worker}, time.Second)
	m.InterToken(label, time.Second, 2)
	m.Finished(&proxy.Exchange{
		Worker: label, Route: "/r", Status: 200, Arrived: now, FirstChunk: now, Decision: router.Decision{Tokens: 5},
		Usage: proxy.Usage{Known: true, PromptTokens: 5, OutputTokens: 1, CachedKnown: true}, Shared: &proxy.SharedRequest{Worker: m.names.Label(prefill)},
	}, now)
}

func TestSeriesOfWorkersThatAreGoneGoToo(t *testing.T) {
	fleet := []uint64{1}
	m := New(Deps{Fleet: func() []uint64 { return fleet }})
	m.Finished(&proxy.Exchange{Worker: noWorker, Route: "/r", Status: 503}, time.Unix(1000, 0))
	serve(m, 1)
	page(m)
	before := len(page(m))
	for id := uint64(2); id < 300; id++ {
		serve(m, id)
	}
	lines := page(m)
	if len(lines) != before {
		t.Errorf("%d lines before, %d after 298 workers have come and gone", before, len(lines))
	}
	text := strings.Join(lines, "")
	for _, want := range []string{`worker_id="1"`, `worker_id="none"`} {
		if !strings.Contains(text, want) {
			t.Errorf("%s is gone too", want)
		}
	}
	fleet = nil
	serve(m, 1) // a request that was still on its way
	if text := strings.Join(page(m), ""); strings.Contains(text, `worker_id="1`) {
		t.Error("a worker that is gone has series")
	}
	fleet = []uint64{7}
	serve(m, 7)
	if text := strings.Join(page(m), ""); !strings.Contains(text, `kvrouter_requests_total{route="/r",status="200",worker_id="7"} 1`) {
		t.Error("a worker that came back counts on from before")
	}
}

// TestSeriesOfThousandsOfWorkersGoAtOnce: in one pass over all series.
func TestSeriesOfThousandsOfWorkersGoAtOnce(t *testing.T) {
	const workers = 4096
	var fleet []uint64
	m := New(Deps{Fleet: func() []uint64 { return fleet }})
	before := len(page(m))
	for id := range uint64(workers) {
		fleet = append(fleet, id)
		serveBoth(m, id, (id+1)%workers)
	}
	if n := len(page(m)); n < 10*workers {
		t.Errorf("%d lines of %d workers", n, workers)
	}
	fleet = fleet[:1]
	one := len(page(m))
	fleet = nil
	if text := strings.Join(page(m), ""); one > before+1000 || strings.Contains(text, `worker_id="`) {
		t.Errorf("%d lines without a worker, %d of one; then\n%s", before, one, text)
	}
	if got := m.Totals(); got.Requests != workers {
		t.Errorf("%d requests are counted", got.Requests)
	}
}

// TestSeriesOfPodsThatAreGoneGoToo: rolling updates make new names for ever.
func TestSeriesOfPodsThatAreGoneGoToo(t *testing.T) {
	names, fleet := new(kv.Names), []uint64{}
	rt := routertest.New(t, "thompson", 0, routertest.WithNames(names))
	m := New(Deps{Names: names, Thompson: rt, Fleet: func() []uint64 { return fleet }})
	m.Register(models.NewCollector(routertest.Models(rt), nil), workers.NewCollector(names, testkit.Each(func() (list []workers.Sample) {
		for _, id := range fleet {
			list = append(list, workers.Sample{Worker: kv.WorkerKey{Worker: id}})
		}
		return list
	}), nil))
	// roll replaces the Pod by one of that name, which serves a request.
	roll := func(id uint64, name string) string {
		target := kv.Target{Key: kv.WorkerKey{Worker: id}}
		rt.Up(target)
		fleet = []uint64{id}
		names.Set([]kv.Worker{{ID: id, Name: name}})
		serve(m, id)
		m.Decided(&proxy.Exchange{Source: "local"}, &router.Pair{Decode: router.Decision{Target: target}, Whole: router.WholeNoPair})
		text := strings.Join(page(m), "")
		rt.Down(target.Key)
		return text
	}
	before := len(strings.Split(roll(1<<52, "vllm-0"), "\n"))
	for i := range uint64(300) {
		name := fmt.Sprintf("vllm-7d9f8c6b5-%05d", i)
		text := roll(1<<52+i+1, name)
		lines := strings.Split(text, "\n")
		for _, line := range lines {
			if _, label, has := strings.Cut(line, `worker_id="`); has && !strings.HasPrefix(label, name+`"`) {
				t.Fatalf("while only %s is there: %s", name, line)
			}
		}
		if len(lines) != before {
			t.Fatalf("%d lines before, %d after %d Pods have come and gone", before, len(lines), i+1)
		}
	}
	if text := roll(1<<53, "vllm-0"); !strings.Contains(text, `kvrouter_requests_total{route="/r",status="200",worker_id="vllm-0"} 1`) {
		t.Error("the next Pod of a name counts on from before")
	}
}

func TestWhatBoundsTheRouterIsShown(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	lines := testkit.Scrape(t, append(web.NewBodies(1, web.BodySettings{}.Memory(1)).Collectors(), logs.NewCollector(log), guard.NewCollector(guard.New()), NewLostLines((*Recorder)(nil), lost(2), lost(3)))...)
	for name, want := range map[string]float64{
		"kvrouter_inflight_body_bytes": 0, "kvrouter_bodies_refused_total": 0, "kvrouter_log_lines_suppressed_total": 0,
		`kvrouter_parser_panics_total{edge="kv_events"}`: 0, "kvrouter_record_lines_lost_total": 5,
	} {
		if got, has := lines[name]; !has || got != want {
			t.Errorf("%s is %v (%v), want %v", name, got, has, want)
		}
	}
}

// lost is a file that has lost lines.
type lost uint64

func (l lost) Lost() uint64 { return uint64(l) }

func TestTotalsAreTheSumsOfThePageAndKeepWhoIsGone(t *testing.T) {
	fleet := []uint64{1, 2}
	m := New(Deps{Fleet: func() []uint64 { return fleet }})
	serve(m, 1)
	serve(m, 1)
	serve(m, 2)
	m.Finished(&proxy.Exchange{Worker: noWorker, Route: "/r", Status: 503}, time.Unix(1000, 0))
	check := func(step string, workers int) {
		t.Helper()
		got := m.Totals()
		if got.Requests != 4 || got.Errors != 1 || got.PromptTokens != 15 || got.ComparedTokens != 15 || got.OutputTokens != 3 || got.Compared != 3 || got.Exact != 3 {
			t.Errorf("%s: %+v", step, got)
		}
		if first, inter := got.FirstToken.Counts, got.InterToken.Counts; first[len(first)-1] != 3 || inter[len(inter)-1] != 6 {
			t.Errorf("%s: %d first tokens, %d others", step, first, inter)
		}
		if len(got.Workers) != workers || got.Workers["1"] != (metrics.WorkerTotals{Requests: 2}) {
			t.Errorf("%s: %+v", step, got.Workers)
		}
	}
	check("all are there", 3)
	check("asked again", 3)
	fleet = []uint64{1}
	check("one is gone", 2)
	page(m)
	check("the page was read", 2)
}

func TestRequestsRoutedByLoadAloneAreNotInTheHitRate(t *testing.T) {
	m := New(Deps{})
	m.Finished(&proxy.Exchange{Worker: "1", Route: "/r", Status: 200, Usage: proxy.Usage{Known: true, PromptTokens: 9, CachedKnown: true, CachedTokens: 4}}, time.Unix(1000, 0))
	if got := m.Totals(); got.PromptTokens != 9 || got.CachedTokens != 0 || got.ComparedTokens != 0 {
		t.Errorf("%+v", got)
	}
}

// TestPredictionsAreComparedByTier: the sum with every answer, each tier with those that
// report tiers, and guesses apart.
func TestPredictionsAreComparedByTier(t *testing.T) {
	var reported []kv.TierTokens
	m := New(Deps{Names: new(kv.Names), Fleet: func() []uint64 { return []uint64{1} }, Compared: func(_ kv.WorkerKey, predicted kv.TierTokens, _ int) { reported = append(reported, predicted) }})
	finish := func(predicted, guessed kv.TierTokens, cached int, byTier kv.TierTokens) {
		d := router.Decision{Target: kv.Target{Key: kv.WorkerKey{Worker: 1}}, Tokens: 900, Predicted: predicted, Guessed: guessed, OverlapTokens: predicted.Total()}
		m.Finished(&proxy.Exchange{Worker: "1", Route: "/r", Status: 200, Decision: d, Usage: proxy.Usage{Known: true, PromptTokens: 900, CachedKnown: true, CachedTokens: cached, CachedByTier: byTier}}, time.Unix(1000, 0))
	}
	host := kv.TierTokens{Device: 100, Host: 300}
	finish(host, kv.TierTokens{}, 400, kv.TierTokens{})
	finish(host, kv.TierTokens{}, 400, kv.TierTokens{Device: 100, Host: 200, Disk: 100})
	finish(host, kv.TierTokens{}, 400, kv.TierTokens{Device: 7}) // does not add up
	finish(kv.TierTokens{Device: 100}, kv.TierTokens{Disk: 64}, 164, kv.TierTokens{})
	finish(kv.TierTokens{Device: 100}, kv.TierTokens{Disk: 64}, 100, kv.TierTokens{})
	lines := page(m)
	for _, want := range []string{
		`kvrouter_predictions_total{result="exact",worker_id="1"} 3`,
		`kvrouter_guesses_total{result="exact",worker_id="1"} 1`,
		`kvrouter_guesses_total{result="over",worker_id="1"} 1`,
		`kvrouter_predicted_tokens_total{tier="device",worker_id="1"} 500`,
		`kvrouter_predicted_tokens_total{tier="host",worker_id="1"} 900`,
		`kvrouter_predicted_tokens_total{tier="disk",worker_id="1"} 128`,
		`kvrouter_tier_predictions_total{result="exact",tier="device",worker_id="1"} 1`,
		`kvrouter_tier_predictions_total{result="over",tier="host",worker_id="1"} 1`,
		`kvrouter_tier_predictions_total{result="under",tier="disk",worker_id="1"} 1`,
		`kvrouter_overlap_tokens_predicted_total{worker_id="1"} 1400`,
	} {
		if !slices.Contains(lines, want+"\n") {
			t.Errorf("no %s in\n%s", want, strings.Join(lines, ""))
		}
	}
	if len(reported) != 3 {
		t.Errorf("%d predictions were reported, want the 3 that are no guess", len(reported))
	}
	m.fleet = func() []uint64 { return nil }
	for _, line := range page(m) {
		if strings.Contains(line, `worker_id="1"`) {
			t.Errorf("%s stays of a worker that is gone", line)
		}
	}
}

// TestWorkersBeyondTheLimitAreSummed: the sum of a counter over all workers never falls,
// and a place that a removed worker leaves goes to the next one.
func TestWorkersBeyondTheLimitAreSummed(t *testing.T) {
	fleet := []uint64{1, 2, 3, 4, 5}
	m := New(Deps{Fleet: func() []uint64 { return fleet }, Workers: 2})
	m.Finished(&proxy.Exchange{Worker: noWorker, Route: "/r", Status: 503}, time.Unix(1000, 0))
	for range 2 {
		for _, id := range fleet {
			m.Retried(id)
		}
	}
	want := func(lines ...string) {
		t.Helper()
		text := strings.Join(page(m), "")
		for _, line := range lines {
			if !strings.Contains(text, line+"\n") {
				t.Errorf("no %s in\n%s", line, text)
			}
		}
		if n := strings.Count(text, "kvrouter_retries_total{"); n != len(lines) {
			t.Errorf("%d series, want %d", n, len(lines))
		}
	}
	want(`kvrouter_retries_total{worker_id="1"} 2`, `kvrouter_retries_total{worker_id="2"} 2`, `kvrouter_retries_total{worker_id="(others)"} 6`)
	fleet = []uint64{2, 3, 4, 5}
	page(m)
	m.Retried(5)
	m.Retried(4)
	want(`kvrouter_retries_total{worker_id="2"} 2`, `kvrouter_retries_total{worker_id="5"} 1`, `kvrouter_retries_total{worker_id="(others)"} 7`)
}

// BenchmarkPage serves the metrics of n workers with requests, all of them and the most
// loaded. The page of all 4,096 is of 34 MB, and takes seconds.
func BenchmarkPage(b *testing.B) {
	for _, n := range []int{256, 512, 4096} {
		for _, limit := range []int{0, 256} {
			b.Run(fmt.Sprintf("workers=%d/limit=%d", n, limit), func(b *testing.B) {
				rt := routertest.New(b, "work", n)
				var ids []uint64
				for i := range n {
					ids = append(ids, uint64(i))
				}
				set, stats := routertest.Models(rt), new(events.Stats)
				shown := func() map[uint64]bool { return set.Busiest(ids, limit) }
				m := New(Deps{Fleet: func() []uint64 { return ids }, Workers: limit})
				m.Register(models.NewCollector(set, shown), workers.NewCollector(nil, func(yield func(*workers.Sample) bool) {
					var s workers.Sample
					for _, id := range ids {
						key := kv.WorkerKey{Worker: id}
						s = workers.Sample{Worker: key, URL: "http://w", Models: []string{"m"}, Up: true, Blocks: set.Blocks(key), Load: set.LoadOf(key), Events: stats}
						if !yield(&s) {
							return
						}
					}
				}, shown))
				for i, id := range ids {
					serveBoth(m, id, ids[(i+1)%n])
				}
				w := httptest.NewRecorder()
				b.ReportAllocs()
				for b.Loop() {
					w = httptest.NewRecorder()
					m.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
				}
				b.ReportMetric(float64(w.Body.Len()), "bytes")
			})
		}
	}
}
