package thompson

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// goldenState is one state of testdata/golden.json, which golden.py
// makes up and computes.
type goldenState struct {
	Fixes     []string
	BlockSize int `json:"block_size"`
	Tokens    int
	OSL, IAT  string
	Budget    int
	Draw      float64
	Workers   []struct {
		Fresh          bool
		Usage          float64
		Waiting, Waits int
		Overlap        int
		Z              banditVector
		E              float64
	}
	Pins []struct {
		Worker, Reuse        int
		Decode, Prefill, IAT float64
	}
	Updates []struct {
		Worker int
		X      banditVector
		Reward float64
	}
	Feedback []struct {
		Worker                            int
		OK                                bool
		Latency, First                    float64
		Out, Tokens                       int
		OSL                               string
		Prefill, Baseline, Reward, Metric float64
	}
	Want struct {
		Workers []struct {
			X                         banditVector
			Linear, Load, Score, Prob float64
		}
		Chosen      int
		Alpha, Beta []float64
		A           []float64
		B           []banditVector
	}
}

func levelOf(name string) hints.Level {
	return map[string]hints.Level{"LOW": hints.LevelLow, "MEDIUM": hints.LevelMedium, "HIGH": hints.LevelHigh}[name]
}

func TestGoldenVectors(t *testing.T) {
	data, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var states []goldenState
	if err := json.Unmarshal(data, &states); err != nil {
		t.Fatal(err)
	}
	none := 0
	for i, s := range states {
		fixes := strings.Join(s.Fixes, ",")
		if fixes == "" {
			fixes = "none"
			none++
		}
		t.Run(fmt.Sprintf("%d %s", i, fixes), func(t *testing.T) { s.check(t, mustPolicy(t, fixes)) })
	}
	if len(states) < 50 || none < 30 || none == len(states) {
		t.Errorf("%d states, %d of them without fixes", len(states), none)
	}
}

func (s *goldenState) check(t *testing.T, p *Policy) {
	same := func(what string, got, want float64) {
		t.Helper()
		if !(math.Abs(got-want) <= 1e-9*max(1, math.Abs(want))) {
			t.Errorf("%s %v, want %v", what, got, want)
		}
	}
	sameVector := func(what string, got, want banditVector) {
		t.Helper()
		for i := range got {
			same(fmt.Sprintf("%s[%d]", what, i), got[i], want[i])
		}
	}
	candidates := make([]policy.Candidate, len(s.Workers))
	workers := make([]*arm, len(s.Workers))
	for i, w := range s.Workers {
		c := &candidates[i]
		c.Load = &policy.Load{}
		c.Target = &kv.Target{Key: kv.WorkerKey{Worker: uint64(i)}, Generation: 1}
		c.Overlap, c.Load.Fresh, c.Load.KVUsage, c.Load.Waiting = w.Overlap, w.Fresh, w.Usage, w.Waiting
		workers[i] = p.worker(c.Target)
		workers[i].waits = w.Waits
	}
	for _, u := range s.Updates {
		p.learn(&pendingDecision{worker: workers[u.Worker].key, x: u.X}, u.Reward)
	}
	for i, pin := range s.Pins {
		series := &requestSeries{id: fmt.Sprint(i), pin: seriesPin{worker: workers[pin.Worker].key, reuse: pin.Reuse, decode: pin.Decode, prefill: pin.Prefill, iat: pin.IAT}}
		p.series.put(series.id, series)
		p.pin(series, workers[pin.Worker])
	}

	q := policy.Query{Now: epoch, Tokens: s.Tokens, BlockSize: s.BlockSize, Prefix: hints.Prefix{ID: "0", Budget: &s.Budget, OSL: levelOf(s.OSL), IAT: levelOf(s.IAT)}}
	for _, w := range workers {
		p.choices = append(p.choices, candidate{worker: w})
	}
	query := p.query(q)
	var scores []float64
	for i := range p.choices {
		c, in, want := &p.choices[i], &s.Workers[i], &s.Want.Workers[i]
		p.describe(&query, &candidates[i], c)
		p.fade(c.worker)
		linear := c.worker.linear.sample(&c.x, &in.Z, p.v)
		scores = append(scores, p.score(&query, c, linear, in.E))
		what := fmt.Sprintf("worker %d: ", i)
		sameVector(what+"x", c.x, want.X)
		same(what+"linear sample", linear, want.Linear)
		same(what+"load factor", c.loadFactor, want.Load)
		same(what+"score", scores[i], want.Score)
		same(what+"alpha", c.worker.mean.alpha, s.Want.Alpha[i])
		same(what+"beta", c.worker.mean.beta, s.Want.Beta[i])
		sameVector(what+"b", c.worker.linear.b, s.Want.B[i])
	}
	for i, k := 0, 0; i < banditDim; i++ {
		for j := i; j < banditDim; j++ {
			same(fmt.Sprintf("a[%d,%d]", i, j), workers[0].linear.a[i*banditDim+j], s.Want.A[k])
			k++
		}
	}
	chances := softmaxOf(nil, scores, query.temp)
	for i, chance := range chances {
		same(fmt.Sprintf("chance %d", i), chance, s.Want.Workers[i].Prob)
	}
	if got := drawFrom(chances, s.Draw); got != s.Want.Chosen {
		t.Errorf("chosen %d, want %d", got, s.Want.Chosen)
	}

	ms := func(v float64) time.Duration { return time.Duration(math.Round(v * 1e6)) }
	for i, f := range s.Feedback {
		d := &pendingDecision{worker: workers[f.Worker].key, tokens: f.Tokens, osl: levelOf(f.OSL), bin: prefillBin(f.Prefill)}
		feedback := policy.Feedback{Ending: policy.Failed, Latency: ms(f.Latency), FirstToken: ms(f.First), TokensOut: f.Out}
		if f.OK {
			feedback.Ending = policy.Finished
		}
		j := p.judge(d, feedback)
		same(fmt.Sprintf("feedback %d: reward", i), j.reward, f.Reward)
		same(fmt.Sprintf("feedback %d: baseline", i), j.baseline, f.Baseline)
		same(fmt.Sprintf("feedback %d: metric", i), j.metric, f.Metric)
	}
}
