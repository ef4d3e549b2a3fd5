package policy_test

import (
	"fmt"
	"math/rand/v2"

	"kvrouter/policy"
)

// fewest takes the worker with the fewest requests in flight, and explains its choices.
type fewest struct{}

func (fewest) Traits() policy.Traits { return policy.Traits{} }

func (fewest) Choose(q policy.Query, workers []policy.Candidate, random *rand.Rand) int {
	score := func(w *policy.Candidate) float64 { return -float64(w.Load.InFlight) }
	if q.Explain != nil {
		q.Explain.Rank("fewest", workers, func(w *policy.Candidate) policy.Score { return policy.OneTerm("in_flight", score(w)) })
	}
	return policy.Best(workers, random, score)
}

func Example() {
	policy.Register("fewest", func() policy.Policy { return fewest{} }) // in an init function of package main

	workers := []policy.Candidate{{Load: &policy.Load{InFlight: 3}}, {Load: &policy.Load{InFlight: 1}}}
	why := &policy.Explanation{}
	fmt.Println(fewest{}.Choose(policy.Query{Explain: why}, workers, rand.New(rand.NewPCG(1, 2))), why.Scores[1].Terms)
	// Output: 1 [{in_flight -1}]
}
