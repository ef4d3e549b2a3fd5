package policy

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
)

// waiting is a load of prompts of so many uncached tokens that were sent at once,
// ago before testNow.
func waiting(ago time.Duration, tokens ...int) Load {
	l := Load{InFlight: len(tokens)}
	for _, n := range tokens {
		l.PrefillTokens += n
		l.Prefills = append(l.Prefills, Prefill{Tokens: n, Sent: testNow.Add(-ago)})
	}
	return l
}

// loadingPrompt is a load of a prompt that was sent ago before testNow, of which so many
// tokens are loaded, at 0.02 ms each, and the others computed.
func loadingPrompt(ago time.Duration, loads, tokens int) Load {
	l := waiting(ago, tokens)
	l.Prefills[0].Loads, l.Fetching = kv.TierTokens{Host: loads}, 1
	l.Tiers = transferring(5e7, 0)
	return l
}

var testNow = time.Unix(1_000_000, 0)

func TestWorkWeighsWaitsAgainstEachOther(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64}
	tests := []struct {
		name string
		pool *pool
		want int // -1: a tie of all
	}{
		{"equal workers tie", new(pool).add(0, Load{}).add(0, Load{}), -1},
		{"the longer prefix wins among idle workers", new(pool).add(10, Load{}).add(50, Load{}), 1},
		{"a prefix outweighs a queue that is nearly done", new(pool).add(50, waiting(60*time.Millisecond, 3200)).add(0, Load{}), 0},
		{"nobody else's wait outweighs an equal one of one's own", new(pool).add(50, waiting(0, 3200)).add(0, Load{}), 1},
		{"a queue of several prompts outweighs a prefix", new(pool).add(50, waiting(0, 9000, 9000, 9000, 9000)).add(0, Load{}), 1},
		{"the shorter queue wins without a prefix", new(pool).add(0, waiting(0, 640)).add(0, Load{}), 1},
		{"the queue that is nearly done wins", new(pool).add(0, waiting(0, 6400)).add(0, waiting(100*time.Millisecond, 6400)), 1},
		{"less context to decode wins", new(pool).add(0, Load{ContextTokens: 90000}).add(0, Load{ContextTokens: 80000}), 1},
		{"a queue that others have sent outweighs a prefix", new(pool).add(50, Load{Published: Published{Running: 2, Waiting: 6}, Foreign: 8}).add(0, Load{}), 1},
		{"a queue that others have sent outweighs requests in flight", new(pool).add(0, Load{Published: Published{Running: 2, Waiting: 6}, Foreign: 8}).add(0, waiting(0, 6400, 6400)), 1},
		{"others' requests that run weigh little beside a prefix", new(pool).add(50, Load{Published: Published{Running: 2}, Foreign: 2}).add(0, Load{}), 0},
		{"others' requests that run decide between equal workers", new(pool).add(0, Load{Published: Published{Running: 2}, Foreign: 2}).add(0, Load{}), 1},
		{"fewer requests to delay win", new(pool).add(0, Load{ContextTokens: 9000, InFlight: 9}).add(0, Load{ContextTokens: 9000, InFlight: 2}), 1},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			counts := draws(NewWork(), query, test.pool.candidates)
			if test.want >= 0 && counts[test.want] != 1000 {
				t.Errorf("chosen %v times, want always candidate %d", counts, test.want)
			}
			if test.want < 0 && (counts[0] < 400 || counts[0] > 600) {
				t.Errorf("chosen %v times, want a tie", counts)
			}
		})
	}
}

// TestWorkKeepsPrefixesWhereTheyAreWhileManyWait: what is computed twice delays all that wait in
// the router.
func TestWorkKeepsPrefixesWhereTheyAreWhileManyWait(t *testing.T) {
	for backlog, want := range map[float64]int{0: 1, 5000: 0} {
		p := NewWork()
		candidates := new(pool).add(50, waiting(0, 3200)).add(0, Load{}).candidates
		query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Backlog: backlog}
		for i := range 100 { // every 100 ms a request comes, and finds one of two workers busy
			query.Now = testNow.Add(time.Duration(i-100) * 100 * time.Millisecond)
			p.arrive(query, p.survey(&query, candidates))
		}
		query.Now, query.DryRun = testNow, true
		if got := p.Choose(query, candidates, rand.New(rand.NewPCG(1, 1))); got != want {
			t.Errorf("with %v ms of work waiting: worker %d", backlog, got)
		}
	}
}

func TestWorkPlaysComingPassesThrough(t *testing.T) {
	p := NewWork()
	p.Timing.Pass, p.Timing.Token, p.Timing.decode, p.Timing.context = 10, 0.01, 5, 0.0001
	heard := func(l Load, ago time.Duration) Load { l.FirstToken = testNow.Add(-ago); return l }
	silent := waiting(time.Second, 1000, 1000)
	for i := range silent.Prefills {
		silent.Prefills[i].AnsweredWhole = true
	}
	for _, test := range []struct {
		name          string
		load          Load
		uncached      int
		ready         float64
		first, pushed float64 // ms
		begun         int
	}{
		{"an idle worker begins at once", Load{}, 1000, 0, 20, 0, 1},
		{"a cached prompt still takes a pass", Load{}, 1, 0, 10.01, 0, 1},
		{"a long prompt takes several passes", Load{}, 8192 + 1000, 0, 91.92 + 20, 0, 2},
		{"a decoding worker ends its pass first, and decodes on", Load{ContextTokens: 10000}, 1000, 0, 3 + 20 + 6, 0, 1},
		{"prompts sent at one time share a pass, and end with it", waiting(0, 1000), 1000, 0, 30, 10, 0},
		{"a pass that runs is not joined", waiting(5*time.Millisecond, 1000), 1000, 0, 15 + 20, 0, 1},
		{"the rest of a pass is filled up", waiting(0, 8000), 1000, 0, 91.92 + 10 + 8.08, 1.92, 1},
		{"a pass began with the last first token", heard(waiting(time.Second, 1000), 5*time.Millisecond), 1000, 0, 15 + 20, 0, 1},
		{"a late first token is expected any moment", waiting(time.Second, 1000), 1000, 0, 20, 0, 1},
		{"a first token that is not reported delays no other", silent, 1000, 0, 20, 0, 1},
		{"a load puts the prompt off", Load{}, 1000, 200, 200 + 20, 0, 1},
		{"it is computed after those that came meanwhile", waiting(0, 1000), 1000, 200, 200 + 20, 0, 1},
		{"or with those that are not yet", waiting(0, 20_000), 1000, 150, 91.92 + 91.92 + 46.16 + 10, 10, 0},
		{"a prompt that loads is passed", loadingPrompt(0, 5000, 20_000), 1000, 0, 20, 0, 1},
		{"a prompt that has loaded is not", loadingPrompt(time.Second, 5000, 1000), 1000, 0, 20, 0, 1},
		{"a prompt that will have loaded is not", loadingPrompt(0, 5000, 8000), 1000, 100, 100 + 91.92 + 10 + 8.08, 1.92, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			first, pushed, begun, _ := p.coming(testNow, &test.load, test.uncached, test.ready)
			if math.Abs(first-test.first) > 1e-3 || math.Abs(pushed-test.pushed) > 1e-3 || begun != test.begun {
				t.Errorf("first token in %.3f ms, %.3f ms pushed, %d passes begun; want %.3f, %.3f and %d", first, pushed, begun, test.first, test.pushed, test.begun)
			}
		})
	}
}

func TestWorkRoutesUnknownPromptsByLoad(t *testing.T) {
	for _, leg := range []kv.Leg{kv.LegWhole, kv.LegDecode} {
		for name, busier := range map[string]Load{"a prompt waits": waiting(0, 900), "more are in flight": {InFlight: 2}} {
			p := new(pool).add(0, busier).add(0, Load{InFlight: 1})
			if counts := draws(NewWork(), Query{Now: testNow, BlockSize: 64, Leg: leg}, p.candidates); counts[1] != 1000 {
				t.Errorf("%v, where %s: chosen %v times, want always the idler one", leg, name, counts)
			}
		}
	}
}

// TestWorkSpreadsWhatManyShare: a cold copy is dear for one request and cheap for many.
func TestWorkSpreadsWhatManyShare(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Sequence: sequenceOf(0, 100, 100)}
	workers := new(pool).add(50, Load{InFlight: 3}).add(0, Load{})
	for _, test := range []struct {
		uses, want int
	}{{0, 0}, {100, 1}} {
		p := NewWork()
		for range test.uses {
			p.reuse.look(query.Sequence, 2, true)
		}
		if chosen := p.Choose(query, workers.candidates, rand.New(rand.NewPCG(1, 1))); chosen != test.want {
			t.Errorf("after %d uses of the prompt: candidate %d, want %d", test.uses, chosen, test.want)
		}
	}
}

// TestWorkStaysWithAnIdleWorker: however often a prefix is used, and whatever part of a pass the
// tokens take, no copy is worth as much as having one.
func TestWorkStaysWithAnIdleWorker(t *testing.T) {
	query := Query{Now: testNow, Tokens: 2217, BlockSize: 64, Sequence: sequenceOf(0, 34, 34)}
	workers := new(pool).add(34, Load{}).add(0, Load{})
	for _, token := range []float64{1e-9, 1e-4, 0.018} {
		for _, uses := range []int{1, 1000} {
			p := NewWork()
			p.Timing.Token = token
			for range uses {
				p.reuse.look(query.Sequence, 2, true)
			}
			p.gap.add(100)
			if counts := draws(p, query, workers.candidates); counts[0] != 1000 {
				t.Errorf("%v ms a token, %d uses: chosen %v times, want always the one that has the prefix", token, uses, counts)
			}
		}
	}
}

func TestWorkLearnsOnlyFromWhatIsSentForTheFirstTime(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Sequence: sequenceOf(0, 100, 100)}
	workers := new(pool).add(0, waiting(0, 100)).add(0, Load{})
	for name, change := range map[string]func(*Query){
		"dry run":             func(q *Query) { q.DryRun = true },
		"retry":               func(q *Query) { q.Retry = true },
		"prompt of elsewhere": func(q *Query) { q.Leg = kv.LegDecode },
	} {
		p, q := NewWork(), query
		change(&q)
		for range 3 {
			q.Now = q.Now.Add(time.Second)
			p.Choose(q, workers.candidates, random)
		}
		p.reuse.look(query.Sequence, 2, false)
		if p.reuse.others(0) != 0 || p.reuse.clock != 0 || p.gap.count != 0 || p.busy.count != 0 {
			t.Errorf("%s: %v blocks were used, %v turnovers passed, gaps %v, busy %v", name, p.reuse.others(0), p.reuse.clock, p.gap, p.busy)
		}
	}
}

// TestWorkKnowsItsShare: of three requests in flight that this router did not send, and
// one that it did, it concludes to four times as many arrivals, uses and tokens.
func TestWorkKnowsItsShare(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Sequence: sequenceOf(0, 100, 100)}
	for name, load := range map[string]Load{
		"seen in the engines": {InFlight: 1, Foreign: 3},
		"told by routers":     {InFlight: 4, Remote: 3},
	} {
		alone, shared := NewWork(), NewWork()
		for at := range 2 {
			query.Now = testNow.Add(time.Duration(at) * time.Second)
			alone.Choose(query, unnamed(Candidate{}, Candidate{}), rand.New(rand.NewPCG(1, 1)))
			shared.Choose(query, unnamed(Candidate{Load: &load}, Candidate{}), rand.New(rand.NewPCG(1, 1)))
		}
		if got, want := shared.reuse.clock, 4*alone.reuse.clock; math.Abs(got-want) > 1e-9 {
			t.Errorf("%s: %v turnovers, want %v", name, got, want)
		}
		candidates := unnamed(Candidate{Load: &load}, Candidate{})
		u := shared.usual(query, candidates, shared.survey(&query, candidates))
		if want := 4.0 / 1000 / 2; math.Abs(u.delayed-want) > 1e-9 {
			t.Errorf("%s: %v requests a ms come to a worker, want %v", name, u.delayed, want)
		}
		uses := shared.reuse.others(0)                           // of one use before this one
		if want := 96 * 4.0 / (4 + 2); math.Abs(uses-want) > 1 { // 96 is the deepest that is counted
			t.Errorf("%s: others pay for %v blocks, want about %v", name, uses, want)
		}
	}
}

// TestWorkIsNotMisledByOneWorkersAccount: whatever a worker says of its queue, what is
// known of uses stays.
func TestWorkIsNotMisledByOneWorkersAccount(t *testing.T) {
	p, random := NewWork(), rand.New(rand.NewPCG(1, 1))
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Sequence: sequenceOf(0, 100, 100)}
	liar := unnamed(Candidate{Load: &Load{Foreign: 1 << 31}}, Candidate{})
	liar[0].Target.TotalBlocks = 1
	for range 3 {
		before := p.reuse.clock
		query.Now = query.Now.Add(time.Second)
		p.Choose(query, liar, random)
		if passed := p.reuse.clock - before; !(passed > 0 && passed <= 1) {
			t.Errorf("%v turnovers passed with one request", passed)
		}
	}
	if u := p.usual(query, liar, p.survey(&query, liar)); u.delayed > 1 {
		t.Errorf("%v requests a ms come to a worker", u.delayed)
	}
}

// TestWorkCountsAPinnedRequestAsOneOfTheFleets: of eight workers.
func TestWorkCountsAPinnedRequestAsOneOfTheFleets(t *testing.T) {
	query := Query{Now: testNow, Tokens: 6400, BlockSize: 64, Workers: 8}
	free, pinned := NewWork(), NewWork()
	for range 3 {
		query.Now = query.Now.Add(time.Second)
		free.Choose(query, unnamed(make([]Candidate, 8)...), rand.New(rand.NewPCG(1, 1)))
		pinned.Choose(query, unnamed(make([]Candidate, 1)...), rand.New(rand.NewPCG(1, 1)))
	}
	if math.Abs(free.reuse.clock-pinned.reuse.clock) > 1e-9 {
		t.Errorf("%v turnovers passed, %v where all are pinned", free.reuse.clock, pinned.reuse.clock)
	}
	if pinned.busy.count != 0 {
		t.Error("one worker tells how many are busy")
	}
	query.Sequence = nil
	if a, b := free.usual(query, nil, survey{candidates: 8}).delayed, pinned.usual(query, nil, survey{candidates: 1}).delayed; math.Abs(a-b) > 1e-12 {
		t.Errorf("%v requests a ms come to a worker, %v where all are pinned", a, b)
	}
}

// comingPassByPass is Work.coming without its jumps over whole passes.
func comingPassByPass(p *Work, now time.Time, load *Load, uncached int) (first, pushed float64, begun int) {
	decode := p.Timing.Decoding(load.ContextTokens)
	at := decode / 2
	if len(load.Prefills) > 0 {
		at = milliseconds(load.Prefills[0].Sent.Sub(now))
		if !load.FirstToken.IsZero() {
			at = max(at, milliseconds(load.FirstToken.Sub(now)))
		}
	}
	queue := load.Prefills
	for rest := 0; ; {
		computed, ends, silent, joins := 0, 0, true, false
		if len(queue) > 0 {
			at = max(at, milliseconds(queue[0].Sent.Sub(now)))
		}
		for len(queue) > 0 && computed < workPass && milliseconds(queue[0].Sent.Sub(now)) <= at {
			step := min(queue[0].Tokens-rest, workPass-computed)
			computed += step
			if rest += step; rest < queue[0].Tokens {
				break
			}
			silent = silent && queue[0].AnsweredWhole
			queue, rest, ends = queue[1:], 0, ends+1
		}
		if len(queue) == 0 && computed == 0 && at < 0 {
			at = decode / 2
		}
		if len(queue) == 0 && at >= 0 {
			joins = computed < workPass
		}
		step := 0
		if joins {
			step = min(uncached, workPass-computed)
			uncached -= step
			if computed == 0 && step > 0 {
				begun++
			}
		}
		alone, took := p.passTime(computed)+decode, p.passTime(computed+step)+decode
		if computed == 0 {
			alone = 0
		}
		if joins {
			pushed += float64(ends) * (took - alone)
		}
		at += took
		if ends > 0 && !silent {
			at = max(at, 0)
		}
		if joins && uncached <= 0 {
			return at, pushed, begun
		}
	}
}

func TestWorkJumpsOverWholePassesWithoutAnotherResult(t *testing.T) {
	near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-9*max(1, math.Abs(a), math.Abs(b)) }
	tokens := rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 3*workPass), rapid.SampledFrom([]int{workPass - 1, workPass, workPass + 1, 2 * workPass, 100*workPass + 7}))
	rapid.Check(t, func(t *rapid.T) {
		p := NewWork()
		load := Load{ContextTokens: rapid.SampledFrom([]int{0, 1, 100_000}).Draw(t, "context")}
		sent := testNow.Add(-time.Duration(rapid.IntRange(0, 3000).Draw(t, "ago")) * time.Millisecond)
		for range rapid.IntRange(0, 6).Draw(t, "queue") {
			load.Prefills = append(load.Prefills, Prefill{Tokens: tokens.Draw(t, "tokens"), Sent: sent, AnsweredWhole: rapid.Bool().Draw(t, "whole")})
			sent = sent.Add(time.Duration(rapid.IntRange(0, 500).Draw(t, "later")) * time.Millisecond)
		}
		if rapid.Bool().Draw(t, "heard") {
			load.FirstToken = testNow.Add(-time.Duration(rapid.IntRange(0, 1000).Draw(t, "first token ago")) * time.Millisecond)
		}
		uncached := tokens.Draw(t, "uncached")
		first, pushed, begun, _ := p.coming(testNow, &load, uncached, 0)
		if wantFirst, wantPushed, want := comingPassByPass(p, testNow, &load, uncached); !near(first, wantFirst) || !near(pushed, wantPushed) || begun != want {
			t.Fatalf("first token in %v ms, %v ms pushed, %d passes begun; want %v, %v and %d", first, pushed, begun, wantFirst, wantPushed, want)
		}
	})
}

// TestWorkTakesNoLongerForAPromptThatCannotBe: the number of passes must be no
// number of turns. An endless loop here stops every request, since the router's
// lock is held.
func TestWorkTakesNoLongerForAPromptThatCannotBe(t *testing.T) {
	p, random := NewWork(), rand.New(rand.NewPCG(1, 2))
	for _, tokens := range []int{kv.MaxTokens, 1 << 53, 1 << 62, math.MaxInt, math.MinInt} {
		load := waiting(time.Second, tokens, tokens)
		for _, uncached := range []int{0, tokens} {
			if first, _, _, _ := p.coming(testNow, &load, uncached, 0); tokens == kv.MaxTokens && !(first > 0 && first < math.Inf(1)) {
				t.Errorf("%d tokens: first token in %v ms", tokens, first)
			}
		}
		candidates := unnamed(Candidate{Load: &load}, Candidate{})
		if chosen := p.Choose(Query{Now: testNow, Tokens: tokens, BlockSize: 64}, candidates, random); tokens == kv.MaxTokens && chosen != 1 {
			t.Errorf("%d tokens: chosen %d", tokens, chosen)
		}
	}
	for _, broken := range []float64{math.NaN(), math.Inf(1), math.Inf(-1)} {
		p := NewWork()
		p.Timing.decode, p.Timing.Pass = broken, broken
		load := waiting(time.Second, 100_000, 1)
		load.ContextTokens = 5
		p.coming(testNow, &load, 100_000, 0)
		load.Prefills = nil
		p.coming(testNow, &load, 100_000, 0)
	}
}

// TestWorkCopiesWhereAnotherCopyIsFound: engines keep windows and states only where two
// prompts parted, so a second prompt of a prefix pays where the first one was computed.
func TestWorkCopiesWhereAnotherCopyIsFound(t *testing.T) {
	query := Query{Now: testNow, Tokens: 2000, BlockSize: 10, Sequence: sequenceOf(0, 200, 200)}
	busy := func(answers int) *Load { return &Load{InFlight: answers, ContextTokens: 100 * answers} }
	for _, c := range []struct {
		name       string
		candidates []Candidate
		want       int
	}{
		{"the first group of one has the prefix", unnamed(Candidate{}, Candidate{Held: 150}), 1},
		{"also if it has some more answers to give", unnamed(Candidate{}, Candidate{Held: 150, Load: busy(2)}), 1},
		{"with many more, another one begins", unnamed(Candidate{}, Candidate{Held: 150, Load: busy(60)}), 0},
		{"what all groups accept is worth more", unnamed(Candidate{Overlap: 140}, Candidate{Held: 100}), 0},
	} {
		p := NewWork()
		for range 20 {
			p.reuse.look(query.Sequence[:150], 2, true)
		}
		for seed := range uint64(20) {
			if got := p.Choose(query, c.candidates, rand.New(rand.NewPCG(seed, 1))); got != c.want {
				t.Errorf("%s: chose %d, want %d", c.name, got, c.want)
				break
			}
		}
	}
}
