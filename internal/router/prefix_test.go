package router

import (
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"math/rand/v2"
	"slices"
	"sync"
)

// clerk is a policy that takes the first candidate and writes down what it is
// asked and told.
type Clerk struct {
	mu        sync.Mutex // guards all below
	asked     []policy.Query
	chosen    []kv.WorkerKey
	feedbacks []policy.Feedback
}

func (p *Clerk) Traits() policy.Traits { return policy.Traits{} }

func (p *Clerk) Choose(q policy.Query, candidates []policy.Candidate, _ *rand.Rand) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, q)
	p.chosen = append(p.chosen, candidates[0].Target.Key)
	return 0
}

func (p *Clerk) Judge(f policy.Feedback) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.feedbacks = append(p.feedbacks, f)
}

// told returns what the policy was told so far.
func (p *Clerk) Told() []policy.Feedback {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.feedbacks)
}

// queries returns what the policy was asked so far.
func (p *Clerk) Queries() []policy.Query {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}
