package thompson

import (
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// epoch is when the tests of policy thompson begin.
var epoch = time.Unix(1_000_000_000, 0)

func mustPolicy(t testing.TB, fixes string) *Policy {
	t.Helper()
	config := defaultParameters()
	var err error
	if config.fixes, err = parseFixes(fixes); err != nil {
		t.Fatal(err)
	}
	return newPolicy(config)
}

// pool is a set of workers for one policy, without a router.
type pool struct {
	t          *testing.T
	policy     *Policy
	now        time.Time
	random     *rand.Rand
	candidates []policy.Candidate
	decisions  uint64
}

func newPool(t *testing.T, fixes string, workers int) *pool {
	p := &pool{t: t, policy: mustPolicy(t, fixes), now: epoch, random: rand.New(rand.NewPCG(1, 1))}
	for i := range workers {
		p.candidates = append(p.candidates, policy.Candidate{Target: &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1}, Load: &policy.Load{}})
	}
	return p
}

// decide sends a request of 1024 tokens.
func (p *pool) decide(hints hints.Prefix) (chosen int, decision uint64) {
	return p.ask(policy.Query{Prefix: hints}), p.decisions
}

// ask has q decided for a prompt of 1,024 tokens.
func (p *pool) ask(q policy.Query) (chosen int) {
	p.decisions++
	q.Now, q.Tokens, q.BlockSize, q.Decision = p.now, 1024, 64, p.decisions
	return p.policy.Choose(q, p.candidates, p.random)
}

func (p *pool) judge(decision uint64, how policy.Ending, latency time.Duration) policy.Verdict {
	p.t.Helper()
	verdict, known := p.policy.Judge(policy.Feedback{Decision: decision, Now: p.now, Ending: how, Latency: latency, FirstToken: latency / 2, TokensIn: 1024, TokensOut: 11})
	if !known {
		p.t.Fatalf("decision %d is not known", decision)
	}
	return verdict
}

// worker returns what is known of worker i as of now.
func (p *pool) worker(i int) *arm {
	w := p.policy.worker(p.candidates[i].Target)
	p.policy.fade(w)
	return w
}

// only leaves worker i in the choice while f runs.
func (p *pool) only(i int, f func()) {
	all := p.candidates
	p.candidates = all[i : i+1]
	f()
	p.candidates = all
}

func TestWorkerBaselineFix(t *testing.T) {
	for fixes, want := range map[string]float64{"none": 0.5, "worker-baseline": 0.25, "feedback": 0.5, "worker-baseline,feedback": 0.25} {
		p := newPool(t, fixes, 2)
		var verdict policy.Verdict
		for range 100 { // the slow one in between must not become the baseline
			p.only(0, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, time.Second) })
		}
		p.only(1, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, 3*time.Second) })
		for range 100 {
			p.only(0, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, time.Second) })
		}
		p.only(1, func() { _, d := p.decide(hints.Prefix{}); verdict = p.judge(d, policy.Finished, 3*time.Second) })
		if math.Abs(verdict.Reward-want) > 0.001 || verdict.Worker.Worker != 1 {
			t.Errorf("fixes %s: three times the latency of the others earns %+v, want %.2f", fixes, verdict, want)
		}
	}
}

func TestForgettingFix(t *testing.T) {
	for _, fixes := range []string{"none", "forgetting"} {
		p := newPool(t, fixes, 2)
		for range 2000 {
			p.only(0, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, time.Second) })
		}
		w := p.worker(0)
		if evidence := w.mean.alpha + w.mean.beta - 2; fixes == "none" && evidence != 2000 || fixes == "forgetting" && math.Abs(evidence-200) > 1 {
			t.Errorf("fixes %s: evidence of %v feedbacks", fixes, evidence)
		}
		p.only(1, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Failed, time.Second) })
		for range 2000 {
			p.only(0, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, time.Second) })
		}
		if w := p.worker(1); fixes == "none" && w.mean.beta != 2 || fixes == "forgetting" && w.mean.beta > 1.01 {
			t.Errorf("fixes %s: one failure long ago leaves beta at %v", fixes, w.mean.beta)
		}
	}
}

func TestForgettingKeepsAsMuchOfEachOfManyWorkers(t *testing.T) {
	p := newPool(t, "forgetting", 40)
	for range 200 {
		for i := range p.candidates {
			p.only(i, func() { _, d := p.decide(hints.Prefix{}); p.judge(d, policy.Finished, time.Second) })
		}
	}
	w := p.worker(3)
	if evidence := w.mean.alpha + w.mean.beta - 2; evidence < 45 || evidence > 55 {
		t.Errorf("evidence of %v feedbacks, want about 50", evidence)
	}
}

func TestLoadSignFix(t *testing.T) {
	for fixes, helps := range map[string]bool{"none": true, "load-sign": false} {
		p := mustPolicy(t, fixes)
		query := requestTerms{tokens: 1024, decode: 2, iat: 1, reuse: 5, hasLast: true, last: kv.WorkerKey{Worker: 9}}
		score := func(queue float64) float64 {
			c := candidate{queue: queue, prefill: 1}
			p.features(&query, &c)
			return p.score(&query, &c, 0, 0.5) // less than 0: it would be a switch
		}
		if got := score(30) > score(0); got != helps {
			t.Errorf("fixes %s: a queue helps a score below 0: %v", fixes, got)
		}
	}
}

func TestOutstandingFix(t *testing.T) {
	budget := 9
	for fixes, want := range map[string]float64{"none": 9 * 3 * 1.0, "outstanding": 3} { // D 2 + P 1
		p := newPool(t, fixes, 1)
		p.decide(hints.Prefix{ID: "a", Budget: &budget})
		if got := p.worker(0).work; got != want {
			t.Errorf("fixes %s: outstanding %v, want %v", fixes, got, want)
		}
	}
}

func TestPinTTLFix(t *testing.T) {
	for _, fixes := range []string{"none", "pin-ttl"} {
		mended := fixes == "pin-ttl"
		p := newPool(t, fixes, 2)
		p.only(0, func() {
			_, d := p.decide(hints.Prefix{ID: "a", Total: 10})
			p.now = p.now.Add(pinTTL - time.Second)
			p.judge(d, policy.Finished, time.Second) // from which the time counts
			p.now = p.now.Add(pinTTL - time.Second)
			_, d = p.decide(hints.Prefix{ID: "b", Total: 10})
			p.judge(d, policy.Finished, time.Second)
			if got := p.worker(0).pins; got != 2 {
				t.Errorf("fixes %s: %d pins before their time is over", fixes, got)
			}
			p.now = p.now.Add(2 * time.Second)
			p.decide(hints.Prefix{})
		})
		if w := p.worker(0); mended && w.pins != 1 || !mended && w.pins != 2 {
			t.Errorf("fixes %s: %d pins of which one's time is over", fixes, w.pins)
		}
		p.candidates[0].Target.Generation++
		p.decide(hints.Prefix{})
		if w := p.worker(0); mended && (w.pins != 0 || w.work != 0) || !mended && w.pins != 2 {
			t.Errorf("fixes %s: the next incarnation has %d pins, work %v", fixes, w.pins, w.work)
		}
		p.decide(hints.Prefix{Total: 5})
		if got := p.policy.series.len(); mended && got != 1 || !mended && got != 3 {
			t.Errorf("fixes %s: %d series, where one has no id to come back with", fixes, got)
		}
	}
}

func TestPinTTLFixDropsAPinToAnAbsentWorker(t *testing.T) {
	for fixes, has := range map[string]bool{"none": true, "pin-ttl": false} {
		p := newPool(t, fixes, 2)
		p.only(0, func() { p.decide(hints.Prefix{ID: "a", Total: 10}) })
		p.only(1, func() {
			p.policy.choices = []candidate{{worker: p.worker(0)}}
			if got := p.policy.query(policy.Query{Prefix: hints.Prefix{ID: "a", Total: 10}}).hasLast; got != has {
				t.Errorf("fixes %s: the worker that is not there counts as last: %v", fixes, got)
			}
		})
	}
}

func TestFeedbackFix(t *testing.T) {
	for _, fixes := range []string{"none", "feedback"} {
		mended := fixes == "feedback"
		p := newPool(t, fixes, 1)
		_, gone := p.decide(hints.Prefix{})
		_, running := p.decide(hints.Prefix{})
		p.judge(gone, policy.Abandoned, time.Second)
		if w := p.worker(0); w.mean != newBetaBandit() || mended && w.waits != 1 || !mended && w.waits != 2 {
			t.Errorf("fixes %s: a client that left: %+v, %d pending", fixes, w.mean, w.waits)
		}
		p.now = p.now.Add(p.policy.timeout + time.Minute)
		p.decide(hints.Prefix{})
		_, known := p.policy.Judge(policy.Feedback{Decision: running, Now: p.now, Ending: policy.Finished, Latency: 2 * time.Minute})
		s := p.policy.Stats()
		if mended && (!known || s.Timeouts != 0) || !mended && (known || s.Timeouts != 2 || s.Workers[0].Beta != 3) {
			t.Errorf("fixes %s: a long request is known %v, %+v", fixes, known, s)
		}
		_, d := p.decide(hints.Prefix{})
		if verdict := p.judge(d, policy.Failed, time.Second); verdict.Reward != 0 {
			t.Errorf("fixes %s: a failure earns %v", fixes, verdict.Reward)
		}
	}
}

func TestFeedbackFixComparesLikeWithLike(t *testing.T) {
	for fixes, fair := range map[string]bool{"worker-baseline": false, "worker-baseline,feedback": true} {
		p := mustPolicy(t, fixes)
		feedback := func(tokens, answer int) float64 { // 1 ms a prompt token, 10 ms a token of the answer
			first := time.Duration(tokens) * time.Millisecond
			latency := first + time.Duration(answer)*10*time.Millisecond
			return p.judge(&pendingDecision{tokens: tokens, bin: hints.LevelHigh}, policy.Feedback{Ending: policy.Finished, FirstToken: first, Latency: latency, TokensOut: answer + 1}).reward
		}
		for range 50 {
			feedback(1500, 500)
			feedback(8000, 10)
		}
		long := feedback(8000, 10)
		if got := math.Abs(long-0.5) < 0.01; got != fair {
			t.Errorf("fixes %s: a short answer to a long prompt earns %.3f on an average worker", fixes, long)
		}
		if fast := p.judge(&pendingDecision{tokens: 8000}, policy.Feedback{Ending: policy.Finished, FirstToken: 800 * time.Millisecond, Latency: 900 * time.Millisecond, TokensOut: 11}).reward; fair && fast < 0.65 {
			t.Errorf("fixes %s: a cached prompt earns %.3f only", fixes, fast)
		}
	}
}

func TestColdStartFix(t *testing.T) {
	for _, fixes := range []string{"none", "cold-start"} {
		counts := [2]int{}
		for seed := range uint64(500) {
			p := newPool(t, fixes, 2)
			p.random = rand.New(rand.NewPCG(seed, seed))
			p.candidates[0].Overlap = 15
			chosen, _ := p.decide(hints.Prefix{})
			counts[chosen]++
		}
		if fixes == "none" && counts[0] > 350 || fixes != "none" && counts[0] < 475 {
			t.Errorf("fixes %s: the first request goes %d times of 500 where 15/16 of it are cached", fixes, counts[0])
		}
	}
}

func TestReuseBudget(t *testing.T) {
	p := newPool(t, "none", 1)
	three := 3
	steps := []struct {
		hints hints.Prefix
		want  int // requests to come after it
	}{
		{hints.Prefix{ID: "a", Total: 3}, 2},
		{hints.Prefix{ID: "a", Total: 2}, 1},
		{hints.Prefix{ID: "a", Total: 5}, 2}, // it was said to be longer
		{hints.Prefix{ID: "a"}, 1},
		{hints.Prefix{ID: "a"}, 0},
		{hints.Prefix{ID: "a", Total: 5}, 4}, // late: counted anew
		{hints.Prefix{ID: "b"}, 0},
		{hints.Prefix{}, 0},
		{hints.Prefix{Total: 4}, 3},
		{hints.Prefix{ID: "c", Budget: &three}, 3},
		{hints.Prefix{ID: "c", Budget: &three, Total: 50}, 3}, // the caller counts
	}
	for i, step := range steps {
		before := p.policy.Stats().Reuse.Sum
		p.decide(step.hints)
		if got := int(p.policy.Stats().Reuse.Sum - before); got != step.want {
			t.Errorf("step %d: %d to come, want %d", i, got, step.want)
		}
	}
}

// A request that another worker has failed is one of its series, not two.
func TestCountsARetriedRequestOnce(t *testing.T) {
	p := newPool(t, "all", 1)
	for i, step := range []struct {
		retry bool
		want  int
	}{{false, 2}, {true, 2}, {false, 1}, {true, 1}, {false, 0}, {true, 0}} {
		before := p.policy.Stats().Reuse.Sum
		p.ask(policy.Query{Retry: step.retry, Prefix: hints.Prefix{ID: "a", Total: 3}})
		if got := int(p.policy.Stats().Reuse.Sum - before); got != step.want {
			t.Errorf("step %d: %d to come, want %d", i, got, step.want)
		}
	}
}

func TestStaysWithTheSeriesWorker(t *testing.T) {
	for _, fixes := range []string{"all", "outstanding"} { // in the original all that a series is to bring counts against its own worker
		p := newPool(t, fixes, 4)
		for series := range 50 {
			for range 10 {
				_, d := p.decide(hints.Prefix{ID: fmt.Sprint(series), Total: 10})
				p.judge(d, policy.Finished, time.Second)
			}
		}
		if s := p.policy.Stats(); s.Stayed+s.Switched != 450 || s.Stayed < 350 || s.Series != 0 {
			t.Errorf("fixes %s: %+v", fixes, s)
		}
	}
}

func TestLooksWithoutDeciding(t *testing.T) {
	p := newPool(t, "all", 3)
	p.decide(hints.Prefix{ID: "a", Total: 9})
	before := p.policy.Stats()
	for range 10 {
		p.policy.Choose(policy.Query{Now: p.now, Tokens: 99, BlockSize: 16, Prefix: hints.Prefix{ID: "a", Total: 9}}, p.candidates, p.random)
	}
	if after := p.policy.Stats(); !reflect.DeepEqual(before, after) {
		t.Errorf("%+v became %+v by decisions that nobody makes", before, after)
	}
}

func TestKVLoadTakesTheLeastUsage(t *testing.T) {
	config := defaultParameters()
	config.routerType = typeKVLoad
	load := func(waiting int, usage float64) *policy.Load {
		return &policy.Load{Published: policy.Published{Waiting: waiting, KVUsage: usage, At: time.Unix(1, 0)}, Fresh: true}
	}
	candidates := []policy.Candidate{{Overlap: 9, Load: load(0, 0.3)}, {Load: load(90, 0.2)}, {Load: load(0, 0.2)}}
	p, random, counts := newPolicy(config), rand.New(rand.NewPCG(1, 2)), [3]int{}
	for i := range candidates {
		candidates[i].Target = &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}}
	}
	for range 1000 {
		counts[p.Choose(policy.Query{Tokens: 640, BlockSize: 64, Decision: 1}, candidates, random)]++
	}
	if counts[0] != 0 || counts[1] < 400 || counts[2] < 400 {
		t.Errorf("chosen %v times, want a tie of the last two", counts)
	}
}

func TestRemembersNoMoreThanItsBounds(t *testing.T) {
	p := newPool(t, "all", 2)
	p.policy.series.limit, p.policy.pending.limit, p.policy.workers.limit = 10, 20, 3
	for i := range 300 {
		p.candidates[1].Target.Key.Worker = uint64(1 + i/10)
		p.decide(hints.Prefix{ID: fmt.Sprint(i), Total: 100})
		pins, waits := 0, 0
		for _, w := range p.policy.workers.all {
			pins, waits = pins+w.pins, waits+w.waits
		}
		if p.policy.series.len() > 10 || p.policy.pending.len() > 20 || p.policy.workers.len() > 3 || pins > 10 || waits > 20 {
			t.Fatalf("%d series, %d pending, %d workers with %d pins and %d pending", p.policy.series.len(), p.policy.pending.len(), p.policy.workers.len(), pins, waits)
		}
	}
}

// TestThompsonKeepsItsBooks lets anything happen and counts again.
func TestKeepsItsBooks(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		names := []string{"none", "all", "pin-ttl", "feedback", "forgetting,cold-start,load-sign"}
		p := newPool(t, rapid.SampledFrom(names).Draw(rt, "fixes"), 3)
		p.policy.series.limit = 4
		var open []uint64
		rt.Repeat(map[string]func(*rapid.T){
			"decide": func(rt *rapid.T) {
				for i := range p.candidates {
					c := &p.candidates[i]
					c.Overlap = rapid.IntRange(0, 16).Draw(rt, "overlap")
					c.Load.Fresh = rapid.Bool().Draw(rt, "fresh")
					c.Load.KVUsage = rapid.SampledFrom([]float64{0, 0.5, 1, 7, -1, math.NaN(), math.Inf(1)}).Draw(rt, "usage")
					c.Load.Waiting = rapid.IntRange(0, 1000).Draw(rt, "waiting")
				}
				hints := hints.Prefix{ID: rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e", "f"}).Draw(rt, "id"), Total: rapid.IntRange(0, 5).Draw(rt, "total"), OSL: hints.Level(rapid.IntRange(0, 2).Draw(rt, "osl")), IAT: hints.Level(rapid.IntRange(0, 2).Draw(rt, "iat"))}
				chosen, d := p.decide(hints)
				if chosen < 0 || chosen >= len(p.candidates) {
					rt.Fatalf("chosen %d", chosen)
				}
				open = append(open, d)
			},
			"judge": func(rt *rapid.T) {
				f := policy.Feedback{Decision: 12345, Now: p.now, Ending: policy.Ending(rapid.IntRange(0, 2).Draw(rt, "ending")), Latency: time.Duration(rapid.Int64Range(-1e9, 1e13).Draw(rt, "latency")), FirstToken: time.Duration(rapid.Int64Range(-1e9, 1e13).Draw(rt, "first")), TokensOut: rapid.IntRange(0, 100).Draw(rt, "out")}
				if len(open) > 0 {
					f.Decision = rapid.SampledFrom(open).Draw(rt, "decision")
				}
				if verdict, _ := p.policy.Judge(f); !(verdict.Reward >= 0 && verdict.Reward <= 1) || math.IsNaN(verdict.Baseline) {
					rt.Fatalf("%+v for %+v", verdict, f)
				}
			},
			"time": func(rt *rapid.T) {
				p.now = p.now.Add(time.Duration(rapid.Int64Range(0, 200).Draw(rt, "s")) * time.Second)
			},
			"restart a worker": func(rt *rapid.T) {
				p.candidates[rapid.IntRange(0, 2).Draw(rt, "worker")].Target.Generation++
			},
			"": func(rt *rapid.T) { p.policy.check(rt) },
		})
	})
}

// check counts again what is counted as it goes.
func (p *Policy) check(t rapid.TB) {
	type count struct {
		waits, pins int
		work        float64
	}
	counts := map[kv.WorkerKey]count{}
	for _, d := range p.pending.all {
		c := counts[d.worker]
		c.waits++
		counts[d.worker] = c
	}
	for id, s := range p.series.all {
		if s.id != id || p.fixes.pinTTL && id == "" {
			t.Fatalf("series %q is kept as %q", s.id, id)
		}
		if s.pinned {
			c := counts[s.pin.worker]
			c.pins++
			c.work += p.workOf(&s.pin)
			counts[s.pin.worker] = c
		}
	}
	for key, w := range p.workers.all {
		c := counts[key]
		if w.waits != c.waits || w.pins != c.pins || math.Abs(w.work-c.work) > 1e-6 {
			t.Fatalf("worker %v: %d pending, %d pins, work %v; counted %+v", key, w.waits, w.pins, w.work, c)
		}
		p.fade(w)
		var z banditVector
		x := banditVector{1, 1, 1, 1, 1, 1, 1, 1, 1}
		if s := w.linear.sample(&x, &z, p.v); math.IsNaN(s) || math.IsInf(s, 0) || w.linear.eigen != nil || !(w.mean.alpha > 0 && w.mean.beta > 0) {
			t.Fatalf("worker %v is believed to be worth %v, mean %+v", key, s, w.mean)
		}
	}
}

func BenchmarkDecision(b *testing.B) {
	for _, fixes := range []string{"all", "none"} {
		b.Run(fixes, func(b *testing.B) {
			p := mustPolicy(b, fixes)
			random := rand.New(rand.NewPCG(1, 1))
			candidates := make([]policy.Candidate, 8)
			for i := range candidates {
				candidates[i] = policy.Candidate{Target: &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1}, Load: &policy.Load{}}
			}
			var decision uint64
			decide := func() {
				decision++
				p.Choose(policy.Query{Now: epoch, Tokens: 4096, BlockSize: 64, Decision: decision, Prefix: hints.Prefix{ID: "a", Total: 1 << 40}}, candidates, random)
				p.Judge(policy.Feedback{Decision: decision, Now: epoch, Ending: policy.Finished, Latency: time.Second, FirstToken: time.Second / 4, TokensOut: 100})
			}
			for range 300 {
				decide()
			}
			b.ReportAllocs()
			for b.Loop() {
				decide()
			}
		})
	}
}
