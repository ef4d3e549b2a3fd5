package thompson

import (
	"compress/gzip"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// splitmix is the chance of testdata/sequence.py.
type splitmix struct{ state uint64 }

func (s *splitmix) Float64() float64 {
	s.state += 0x9E3779B97F4A7C15
	z := s.state
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return float64((z^z>>31)>>11) / (1 << 53)
}

func (s *splitmix) NormFloat64() float64    { return (s.Float64() - 0.5) * math.Sqrt(12) }
func (s *splitmix) mean(betaBandit) float64 { return s.Float64() }

// sequenceStep is a line of testdata/sequence.json.gz: a decision, or a feedback
// if Of is set.
type sequenceStep struct {
	T        int64
	ID       string
	OSL, IAT string
	Tokens   int
	Total    int
	Budget   *int
	Workers  [][]any // worker, fresh, usage, waiting, cached blocks
	Scores   []float64
	Chosen   uint64
	X        banditVector
	Timeouts uint64
	Beliefs  []struct {
		Alpha, Beta float64
		B           banditVector
		A           [banditDim]banditVector
	}

	Of               uint64
	End              string
	MS               float64
	Out              int
	Known            bool
	Worker           uint64
	Reward, Baseline float64
	Alpha, Beta      float64
}

func readSequence(t *testing.T) (steps []sequenceStep) {
	file, err := os.Open("testdata/sequence.json.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	unzipped, err := gzip.NewReader(file)
	if err == nil {
		err = json.NewDecoder(unzipped).Decode(&steps)
	}
	if err != nil {
		t.Fatal(err)
	}
	return steps
}

// TestThompsonSequenceIsTheOriginals sends a whole life of requests and feedback
// through the policy and compares all that it decides and learns with a
// computation apart from it.
func TestSequenceIsTheOriginals(t *testing.T) {
	p := mustPolicy(t, "none")
	chance := &splitmix{15}
	decisions, feedbacks := 0, 0
	for i, s := range readSequence(t) {
		now := epoch.Add(time.Duration(s.T) * time.Millisecond)
		c := sequenceCheck{t, p, chance, fmt.Sprintf("step %d: ", i)}
		if s.Of > 0 {
			c.feedback(&s, now)
			feedbacks++
		} else {
			decisions++
			c.decision(&s, now, uint64(decisions))
		}
		if t.Failed() {
			t.FailNow()
		}
	}
	if decisions < 1000 || feedbacks < 1000 {
		t.Errorf("%d decisions, %d feedbacks", decisions, feedbacks)
	}
}

type sequenceCheck struct {
	t      *testing.T
	policy *Policy
	chance draws
	step   string
}

func (c sequenceCheck) same(what string, got, want float64) {
	c.t.Helper()
	if !(math.Abs(got-want) <= 1e-9*max(1, math.Abs(want))) {
		c.t.Errorf("%s%s %v, want %v", c.step, what, got, want)
	}
}

func (c sequenceCheck) sameVector(what string, got, want []float64) {
	c.t.Helper()
	if len(got) != len(want) {
		c.t.Fatalf("%s%d of %s, want %d", c.step, len(got), what, len(want))
	}
	for i := range got {
		c.same(fmt.Sprintf("%s[%d]", what, i), got[i], want[i])
	}
}

func (c sequenceCheck) decision(s *sequenceStep, now time.Time, number uint64) {
	candidates := make([]policy.Candidate, len(s.Workers))
	for i, w := range s.Workers {
		candidate := &candidates[i]
		candidate.Load = &policy.Load{}
		candidate.Target = &kv.Target{Key: kv.WorkerKey{Worker: uint64(w[0].(float64))}, Generation: 1}
		candidate.Load.Fresh, candidate.Load.KVUsage, candidate.Load.Waiting = w[1].(bool), w[2].(float64), int(w[3].(float64))
		candidate.Overlap = int(w[4].(float64))
	}
	c.policy.sweep(now)
	chosen := c.policy.decide(policy.Query{
		Now: now, Tokens: s.Tokens, BlockSize: 64, Decision: number,
		Prefix: hints.Prefix{ID: s.ID, Total: s.Total, Budget: s.Budget, OSL: levelOf(s.OSL), IAT: levelOf(s.IAT)},
	}, candidates, c.chance)
	c.sameVector("scores", c.policy.scores, s.Scores)
	if got := candidates[chosen].Target.Key.Worker; got != s.Chosen {
		c.t.Fatalf("%schosen %d, want %d", c.step, got, s.Chosen)
	}
	x := c.policy.pending.get(number).x
	c.sameVector("x", x[:], s.X[:])
	if c.policy.timeouts != s.Timeouts {
		c.t.Errorf("%s%d timeouts, want %d", c.step, c.policy.timeouts, s.Timeouts)
	}
	for i, want := range s.Beliefs {
		w := c.policy.workers.get(kv.WorkerKey{Worker: uint64(i)})
		c.same("alpha", w.mean.alpha, want.Alpha)
		c.same("beta", w.mean.beta, want.Beta)
		c.sameVector("b", w.linear.b[:], want.B[:])
		for row := range want.A {
			c.sameVector("A", w.linear.a[row*banditDim+row:(row+1)*banditDim], want.A[row][row:])
		}
	}
}

func (c sequenceCheck) feedback(s *sequenceStep, now time.Time) {
	endings := []string{policy.Abandoned: "left", policy.Failed: "failed", policy.Finished: "finished"}
	verdict, known := c.policy.Judge(policy.Feedback{
		Decision: s.Of, Now: now, Ending: policy.Ending(slices.Index(endings, s.End)), TokensOut: s.Out,
		Latency: time.Duration(math.Round(s.MS*1000)) * time.Microsecond,
	})
	if s.End == "left" {
		return // the original is not told
	}
	if known != s.Known {
		c.t.Fatalf("%sdecision %d is known: %v, want %v", c.step, s.Of, known, s.Known)
	}
	if !known {
		return
	}
	if verdict.Worker.Worker != s.Worker {
		c.t.Errorf("%sworker %d, want %d", c.step, verdict.Worker.Worker, s.Worker)
	}
	c.same("reward", verdict.Reward, s.Reward)
	c.same("baseline", verdict.Baseline, s.Baseline)
	w := c.policy.workers.get(verdict.Worker)
	c.same("alpha", w.mean.alpha, s.Alpha)
	c.same("beta", w.mean.beta, s.Beta)
}
