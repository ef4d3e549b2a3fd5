// Package policy is for policies of your own. A Go file that calls Register is compiled into
// kvrouter, which then knows the policy by its name, like those it has:
// docs/routing.md#a-policy-of-your-own.
//
// Its types are those of kvrouter's own policies. They may gain fields and change with the router.
package policy

import (
	"math/rand/v2"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/policy"
)

type (
	// Policy chooses one of at least one candidate and returns its index. It is called under the
	// router's lock, one call at a time: its state needs no lock, and it must not block.
	Policy = policy.Policy
	// Traits are the counts that a policy needs.
	Traits = policy.Traits
	// Query is a request as policies see it.
	Query = policy.Query
	// Candidate is a worker that may serve the request.
	Candidate = policy.Candidate
	// Load is the load of a worker: what it publishes, and what this router has sent there.
	Load = policy.Load
	// Target is a worker: its key, models, engine.
	Target = kv.Target
	// WorkerKey is a worker's id and its data-parallel rank.
	WorkerKey = kv.WorkerKey

	// Explanation is the explanation of a choice. A policy that fills in that of its Query is
	// explained by GET /decisions and the dashboard.
	Explanation = policy.Explanation
	// Score is a candidate's value to the policy, in an explanation.
	Score = policy.Score
	// Term is a part of a Score.
	Term = policy.Term

	// Learner is a policy that also learns from finished requests.
	Learner = policy.Learner
	// Outcome is the result of a request with a complete answer.
	Outcome = policy.Outcome
	// Judged is a policy that also learns from the outcome of each of its decisions.
	Judged = policy.Judged
	// Feedback is the outcome of a decision.
	Feedback = policy.Feedback
	// Verdict is the policy's evaluation of a feedback.
	Verdict = policy.Verdict
)

// Values of Query.Leg: what a worker is wanted for.
const (
	LegWhole   = kv.LegWhole   // prompt and answer
	LegPrefill = kv.LegPrefill // the prompt
	LegDecode  = kv.LegDecode  // the answer, with a prompt computed elsewhere
)

// Values of Feedback.Ending.
const (
	Abandoned = policy.Abandoned // the client disconnected, or the cause is unknown
	Failed    = policy.Failed    // the worker failed
	Finished  = policy.Finished  // with a complete answer
)

// Register adds a policy by the name that --policy takes: lower-case letters, digits and hyphens.
// make is called once for each base model, and for each run of the simulator. Register is to be
// called from an init function. It panics if the name is taken or has another form.
func Register(name string, make func() Policy) { policies.Register(name, make) }

// Best returns the index of the candidate with the highest score; of several one at random.
func Best(candidates []Candidate, random *rand.Rand, score func(*Candidate) float64) int {
	return policy.Best(candidates, random, score)
}

// OneTerm returns a score of one term.
func OneTerm(name string, value float64) Score { return policy.OneTerm(name, value) }
