// Package policytest has policies for the tests of several packages; only tests import
// it.
package policytest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/testkit"
)

// Clerk is a policy that takes the first candidate and records the queries and the
// feedback that it gets.
type Clerk struct {
	mu        sync.Mutex // guards all below
	queries   []policy.Query
	chosen    []kv.WorkerKey
	feedbacks []policy.Feedback
}

// Traits returns none.
func (p *Clerk) Traits() policy.Traits { return policy.Traits{} }

// Choose takes the first candidate.
func (p *Clerk) Choose(q policy.Query, candidates []policy.Candidate, _ *rand.Rand) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.queries = append(p.queries, q)
	p.chosen = append(p.chosen, candidates[0].Target.Key)
	return 0
}

// Judge keeps the feedback.
func (p *Clerk) Judge(f policy.Feedback) (verdict policy.Verdict, known bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.feedbacks = append(p.feedbacks, f)
	return policy.Verdict{Worker: f.Worker}, true
}

// Queries returns the queries so far.
func (p *Clerk) Queries() []policy.Query {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.queries)
}

// Told returns the feedback so far.
func (p *Clerk) Told() []policy.Feedback {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.feedbacks)
}

// ToldEnding is the part of a Feedback that does not depend on the clock.
type ToldEnding struct {
	Ending    policy.Ending
	TokensOut int
}

// Endings returns the endings of the requests with feedback.
func (p *Clerk) Endings() (list []ToldEnding) {
	for _, f := range p.Told() {
		list = append(list, ToldEnding{f.Ending, f.TokensOut})
	}
	return list
}

// OncePerDecision checks that every decision with a number was judged once.
func (p *Clerk) OncePerDecision(t *testing.T) {
	t.Helper()
	judged := map[uint64]int{}
	for _, f := range p.Told() {
		judged[f.Decision]++
		if f.Decision == 0 || f.Now.IsZero() || f.Latency < 0 {
			t.Errorf("feedback %+v", f)
		}
	}
	for _, q := range p.Queries() {
		want := 1
		if q.Decision == 0 {
			want = 0
		}
		if judged[q.Decision] != want {
			t.Errorf("decision %d was judged %d times, want %d", q.Decision, judged[q.Decision], want)
		}
	}
}

// MustPolicy returns the policy of that name with the default settings.
func MustPolicy(t interface {
	Helper()
	Fatal(args ...any)
}, name string) policy.Policy {
	t.Helper()
	p, err := policies.New(name, testkit.Defaults[policies.Settings]())
	if err != nil {
		t.Fatal(fmt.Errorf("policy %s: %w", name, err))
	}
	return p
}
