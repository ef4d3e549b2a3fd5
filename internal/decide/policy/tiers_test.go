package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// lower lets the last candidate have blocks in lower tiers, of which tiers is known.
func (p *pool) lower(blocks kv.LowerBlocks, tiers *Tiers) *pool {
	c := &p.candidates[len(p.candidates)-1]
	c.Lower, c.Load.Tiers = blocks, tiers
	return p
}

// transferring is what counters show of an engine that loads with these bytes a second
// from host memory, and reads with these from disk, 1,000 bytes a token.
func transferring(host, disk float64) *Tiers {
	t := new(Tiers)
	t.Count(Transfers{})
	now := Transfers{HostBytes: 1e9, HostSeconds: 1e9 / host, HostTokens: 1e6}
	if disk > 0 {
		now.DiskBytes, now.DiskSeconds = 1e9, 1e9/disk
	}
	t.Count(now)
	return t
}

// broken is a tier from which nothing came in that many answers.
func broken(answers int, of kv.LowerBlocks) *Tiers {
	t := new(Tiers)
	for range answers {
		t.Came(of, 0)
	}
	return t
}

func TestWorkWeighsLoadsFromLowerTiers(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64}
	host, disk := kv.LowerBlocks{Host: 90}, kv.LowerBlocks{Disk: 90}
	loads := func(l Load, ago time.Duration, tokens kv.TierTokens) Load {
		l.InFlight++
		l.Prefills, l.Fetching = append(l.Prefills, Prefill{Tokens: 1, Loads: tokens, Sent: testNow.Add(-ago)}), l.Fetching+1
		return l
	}
	fast, slow := transferring(1e9, 0), transferring(1e4, 0) // 0.001 and 100 ms a token; computing takes 0.02
	doubtful := new(pool).add(0, Load{}).lower(host, fast).add(0, Load{}).lower(kv.LowerBlocks{Host: 60}, fast)
	doubtful.candidates[0].Doubtful = true
	tests := []struct {
		name string
		pool *pool
		want int
	}{
		{"blocks in host memory win against none", new(pool).add(0, Load{}).lower(host, nil).add(0, Load{}), 0},
		{"the device wins against host memory", new(pool).add(0, Load{}).lower(host, fast).add(90, Load{}), 1},
		{"loads that were not measured are no dearer than computing", new(pool).add(0, Load{}).lower(disk, nil).add(10, Load{}), 0},
		{"a load that is slower than computing is a cost", new(pool).add(0, Load{}).lower(host, slow).add(0, Load{}), 1},
		{"of two tiers the faster one wins", new(pool).add(0, Load{}).lower(disk, transferring(1e9, 1e6)).add(0, Load{}).lower(host, transferring(1e9, 1e6)), 1},
		{"of two holders the one without loads wins", new(pool).add(0, loads(Load{}, 0, kv.TierTokens{Host: 50_000})).lower(host, transferring(1e6, 0)).add(0, Load{InFlight: 1}).lower(host, transferring(1e6, 0)), 1},
		{"loads that are over by now do not count", new(pool).add(0, loads(Load{}, time.Second, kv.TierTokens{Host: 500})).lower(host, transferring(1e6, 0)).add(0, loads(Load{}, 0, kv.TierTokens{Host: 500})).lower(host, transferring(1e6, 0)), 0},
		{"a tier that never delivers is worth nothing", new(pool).add(0, Load{}).lower(host, broken(20, host)).add(5, Load{}), 1},
		{"three answers do not settle that", new(pool).add(0, Load{}).lower(host, broken(3, host)).add(5, Load{}), 0},
		{"a tier in doubt counts half", doubtful, 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if counts := draws(NewWork(), query, test.pool.candidates); counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
		})
	}
}

// TestWorkSparesTheLoadsBehind: where loads are rare, one that is a little faster than
// computing wins; where the queue of loads is hardly ever empty, those to come pay for it.
func TestWorkSparesTheLoadsBehind(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64}
	tiers := transferring(6e7, 0) // 0.0167 ms a token; computing takes 0.02
	for _, test := range []struct {
		name        string
		share, busy float64
		want        int
	}{
		{"loads are rare", 0.01, 0, 0},
		{"many load, and find the queue empty", 0.9, 0.1, 0},
		{"many load, and wait for each other", 0.9, 0.95, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			counts := map[int]int{}
			for seed := range uint64(100) {
				p := NewWork()
				p.gap, p.busy = runningMean{50, workMeanOver}, runningMean{0.1, workMeanOver}
				p.loadShare, p.loadBusy = runningMean{test.share, workMeanOver}, runningMean{test.busy, workMeanOver}
				counts[p.Choose(query, new(pool).add(0, Load{}).lower(kv.LowerBlocks{Host: 99}, tiers).add(0, Load{}).candidates, rand.New(rand.NewPCG(seed, 1)))]++
			}
			if counts[test.want] != 100 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
		})
	}
}

// TestAWorkerThatLoadsDoesNotCompute: prompts that wait for loads make the queue of loads
// busy, not the passes.
func TestAWorkerThatLoadsDoesNotCompute(t *testing.T) {
	p := NewWork()
	candidates := new(pool).add(0, loadingPrompt(0, 50_000, 1)).add(0, loadingPrompt(10*time.Second, 50_000, 1)).add(0, waiting(0, 1)).add(0, Load{}).candidates
	if all := p.survey(&Query{Now: testNow}, candidates); all.computing != 2 || all.loading != 1 {
		t.Errorf("%v compute and %d load, want 2 and 1", all.computing, all.loading)
	}
}

// TestALoadBeginsWithAPassThatHasRoom: behind prompts that fill passes it is not yet asked
// for, and it waits for the loads before.
func TestALoadBeginsWithAPassThatHasRoom(t *testing.T) {
	p := NewWork()
	p.Timing.Pass, p.Timing.Token, p.Timing.decode, p.Timing.context = 10, 0.01, 5, 0.0001
	tiers := transferring(5e7, 0) // 0.02 ms a token
	for _, test := range []struct {
		name        string
		load        Load
		asked, over float64 // ms
	}{
		{"on an idle worker", Load{Tiers: tiers}, 0, 64},
		{"behind prompts", waiting(0, 8192, 8192), 2 * 91.92, 2*91.92 + 64},
		{"behind a load", loadingPrompt(0, 5000, 1), 0, 100 + 64},
		{"behind the rest of a load", loadingPrompt(60*time.Millisecond, 5000, 1), 0, 40 + 64},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.load.Tiers = tiers
			l := p.loading(&Query{Now: testNow, BlockSize: 64}, &Candidate{Lower: kv.LowerBlocks{Host: 50}, Load: &test.load}, false)
			if math.Abs(l.own-64) > 1e-6 || math.Abs(l.asked-test.asked) > 1e-6 || math.Abs(l.over-test.over) > 1e-6 || l.tokens != 3200 {
				t.Errorf("%+v; want 64 ms, asked in %v, over in %v", l, test.asked, test.over)
			}
		})
	}
}

// learnLoads has a policy learn from first tokens, with noise: computing takes perToken ms a
// token, and a load share of that. loads sets the outcome of a load of so many tokens.
func learnLoads(p *Work, perToken, share float64, loads func(o *Outcome, tokens int)) {
	random := rand.New(rand.NewPCG(3, 4))
	noise := func(ms float64) time.Duration {
		return time.Duration(ms * (0.95 + 0.1*random.Float64()) * float64(time.Millisecond))
	}
	for range 200 {
		n := 1000 + random.IntN(8000)
		p.Learn(Outcome{Uncached: n, Output: 1, Alone: true, FirstToken: noise(5 + perToken*float64(n)), Before: Meanwhile{Prompts: 1, Passes: 1, Tokens: n}})
	}
	for range 50 {
		n := 64 * (20 + random.IntN(80))
		o := Outcome{Uncached: 64, Output: 1, Alone: true, Loaded: true, FirstToken: noise(5 + perToken*64 + share*perToken*float64(n)), Before: Meanwhile{Prompts: 1, Passes: 1, Tokens: 64}}
		loads(&o, n)
		p.Learn(o)
	}
}

// TestWorkLeavesASlowTierWhereItIsSlower moves the true speed of loads across that of
// computing. The policy learns both from first tokens alone, with noise.
func TestWorkLeavesASlowTierWhereItIsSlower(t *testing.T) {
	const perToken = 0.02 // ms of computing
	for _, test := range []struct {
		name  string
		share float64 // of computing that a load takes
		want  int
	}{
		{"hardly anything", 0.01, 0}, {"half", 0.5, 0}, {"four fifths", 0.8, 0}, {"six fifths", 1.2, 1}, {"five times", 5, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			p, tiers := NewWork(), new(Tiers)
			learnLoads(p, perToken, test.share, func(o *Outcome, tokens int) { o.Loads, o.Tiers = kv.TierTokens{Host: tokens}, tiers })
			ms := p.loadTime(tiers, kv.Host, 1, 6400)
			if want := test.share * perToken * 6400; math.Abs(ms-want) > max(0.2*want, 2) {
				t.Errorf("a load of 6,400 tokens takes %.1f ms, want about %.1f", ms, want)
			}
			candidates := new(pool).add(0, Load{}).lower(kv.LowerBlocks{Host: 99}, tiers).add(0, Load{}).candidates
			if counts := draws(p, Query{Now: testNow, Tokens: 6400, BlockSize: 64}, candidates); counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
		})
	}
}

func TestCountersTellTheBandwidth(t *testing.T) {
	var tiers Tiers
	now := Transfers{HostBytes: 5e9, HostSeconds: 100, HostTokens: 1e6} // from before the router began
	tiers.Count(now)
	if _, _, known := tiers.counters(kv.Host); known {
		t.Error("totals from before the first reading count")
	}
	for range 50 {
		now.HostBytes, now.HostSeconds, now.HostTokens = now.HostBytes+20_000*640, now.HostSeconds+20_000*640/1e9, now.HostTokens+640
		now.DiskBytes, now.DiskSeconds = now.DiskBytes+20_000*320, now.DiskSeconds+20_000*320/2e8
		now.Lookups, now.LookupSeconds = now.Lookups+1, now.LookupSeconds+0.028
		tiers.Count(now)
		tiers.Count(now) // nothing happens between two readings
	}
	if b := tiers.BytesPerToken(); math.Abs(b-20_000) > 1 {
		t.Errorf("%.0f bytes a token, want 20,000", b)
	}
	if host, disk := tiers.Bandwidth(kv.Host), tiers.Bandwidth(kv.Disk); math.Abs(host-1e9) > 1e7 || math.Abs(disk-2e8) > 2e6 {
		t.Errorf("%.3g and %.3g bytes a second, want 1e9 and 2e8", host, disk)
	}
	p := NewWork()
	for tier, want := range map[kv.Tier]float64{kv.Host: 20, kv.Disk: 28 + 100 + 20, kv.External: 28 + 100 + 20} {
		if ms := p.loadTime(&tiers, tier, 1, 1000); math.Abs(ms-want) > 0.01*want {
			t.Errorf("1,000 tokens from %s take %.1f ms, want %.1f", tier, ms, want)
		}
	}
	for range 60 { // the link is shared by now
		now.HostBytes, now.HostSeconds, now.HostTokens = now.HostBytes+20_000*640, now.HostSeconds+20_000*640/1e8, now.HostTokens+640
		tiers.Count(now)
	}
	if host := tiers.Bandwidth(kv.Host); math.Abs(host-1e8) > 2e6 {
		t.Errorf("%.3g bytes a second after a change to 1e8", host)
	}
	tiers.Count(Transfers{HostBytes: 1}) // the engine has restarted
	if host := tiers.Bandwidth(kv.Host); math.Abs(host-1e8) > 2e6 {
		t.Errorf("%.3g bytes a second after a restart, want those of before", host)
	}
}

func TestMissingBlocksAreOfTheTierWhereTheRunEnds(t *testing.T) {
	mixed := kv.LowerBlocks{Host: 4, Disk: 4, External: 4}
	for _, test := range []struct {
		name                 string
		found                int
		host, disk, external float64 // trust
	}{
		{"all came", 12, 1, 1, 1},
		{"more came", 99, 1, 1, 1},
		{"the store's are missing", 8, 1, 1, 0.8},
		{"half of the disk's are missing", 6, 1, 0.9, 1},
		{"nothing came", 0, 0.8, 1, 1},
		{"less than nothing", -3, 0.8, 1, 1},
	} {
		var tiers Tiers
		tiers.Came(mixed, test.found)
		if h, d, e := tiers.Trust(kv.Host), tiers.Trust(kv.Disk), tiers.Trust(kv.External); math.Abs(h-test.host)+math.Abs(d-test.disk)+math.Abs(e-test.external) > 1e-9 {
			t.Errorf("%s: trust %v, %v, %v; want %v, %v, %v", test.name, h, d, e, test.host, test.disk, test.external)
		}
	}
	var tiers Tiers
	tiers.CameFrom(mixed, kv.TierTokens{Device: 999, Host: 4 * 64, External: 2 * 64}, 64)
	if h, d, e := tiers.Trust(kv.Host), tiers.Trust(kv.Disk), tiers.Trust(kv.External); h != 1 || math.Abs(d-0.8) > 1e-9 || math.Abs(e-0.9) > 1e-9 {
		t.Errorf("reported by tier: trust %v, %v, %v", h, d, e)
	}
}

func TestABrokenTierIsUnlearnedAndComesBack(t *testing.T) {
	host := kv.LowerBlocks{Host: 10}
	tiers := broken(20, host)
	if trust := tiers.Trust(kv.Host); trust > 0.02 {
		t.Errorf("after 20 misses its share is %v", trust)
	}
	for range 20 {
		tiers.Came(host, 10)
	}
	if trust := tiers.Trust(kv.Host); trust < 0.98 {
		t.Errorf("after 20 hits its share is %v", trust)
	}
}

// TestLoadsDoNotTeachComputing: a first token that waited for a load says nothing about
// passes.
func TestLoadsDoNotTeachComputing(t *testing.T) {
	p := NewWork()
	before := *p.Timing
	for _, loaded := range []bool{true, false} {
		p.Learn(Outcome{Uncached: 64, Output: 1, Alone: true, Loads: kv.TierTokens{Host: 6400}, Loaded: loaded, FirstToken: time.Second, Before: Meanwhile{Prompts: 1, Passes: 1, Tokens: 64}})
	}
	if *p.Timing != before {
		t.Errorf("%+v, was %+v", *p.Timing, before)
	}
	if p.loads[0].n != 1 {
		t.Errorf("%v loads were learned from, want the one that came true", p.loads[0].n)
	}
}

// TestForeignNumbersOfTiers: whatever an engine counts or answers, a load takes a time that
// is a number and not below none, and trust is a share.
func TestForeignNumbersOfTiers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		number := func(name string) float64 {
			return rapid.OneOf(rapid.Float64(), rapid.Float64Range(0, 1e6), rapid.SampledFrom([]float64{0, -1, math.NaN(), math.Inf(1), 1 << 60})).Draw(t, name)
		}
		var tiers Tiers
		p := NewWork()
		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			lower := kv.LowerBlocks{Host: rapid.Int32Range(0, 9).Draw(t, "host"), Disk: rapid.Int32Range(0, 9).Draw(t, "disk"), External: rapid.Int32Range(0, 9).Draw(t, "external")}
			switch rapid.IntRange(0, 2).Draw(t, "step") {
			case 0:
				tiers.Count(Transfers{HostBytes: number("b"), HostSeconds: number("s"), HostTokens: number("t"), DiskBytes: number("db"), DiskSeconds: number("ds"), Lookups: number("l"), LookupSeconds: number("ls")})
			case 1:
				tiers.Came(lower, rapid.Int().Draw(t, "found"))
			case 2:
				p.learnLoad(&Outcome{Alone: true, Loaded: true, Loads: lower.Tokens(64), Tiers: &tiers, FirstToken: time.Duration(rapid.Int64Range(0, int64(time.Hour)).Draw(t, "first"))})
			}
			c := Candidate{Lower: lower, Doubtful: rapid.Bool().Draw(t, "doubtful"), Load: &Load{Tiers: &tiers}}
			l := p.loading(&Query{Now: testNow, BlockSize: 64}, &c, false)
			if !(l.own >= 0) || !(l.delay() >= l.own) || l.tokens < 0 || l.tokens > lower.Total()*64 {
				t.Fatalf("%+v are %+v", lower, l)
			}
			for _, tier := range kv.LowerTiers {
				if trust := tiers.Trust(tier); !(trust >= 0 && trust <= 1) {
					t.Fatalf("trust %v", trust)
				}
			}
		}
	})
}
