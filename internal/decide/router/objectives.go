package router

import (
	"fmt"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// ObjectiveSettings are the objectives of requests without some of their own.
type ObjectiveSettings struct {
	ClassTTFT map[string]time.Duration `group:"Routing" name:"class-ttft" mapsep:"," placeholder:"CLASS=TIME" help:"Objective of the time to first token for requests without one of their own, by class: interactive, standard, batch. Comma-separated, such as interactive=1s,batch=10m. Workers that are predicted to keep it are preferred, and with --router-queue-policy fair it orders the requests of a tenant. Default: none."`
	ClassTPOT map[string]time.Duration `group:"Routing" name:"class-tpot" mapsep:"," placeholder:"CLASS=TIME" help:"Objective of the time per output token after the first one for requests without one of their own, by class, such as interactive=40ms. Workers that are predicted to keep it are preferred. Default: none."`
}

// Objectives returns the objectives of the time to first token, and of that per further token, by
// class.
func (k ObjectiveSettings) Objectives() (ttft, tpot map[fair.Class]time.Duration) {
	return byClass(k.ClassTTFT), byClass(k.ClassTPOT)
}

// shortestTPOT returns the shortest objective of the time per further token of any class; 0: there
// is none.
func (k ObjectiveSettings) shortestTPOT() (shortest time.Duration) {
	for _, objective := range k.ClassTPOT {
		if shortest == 0 || objective < shortest {
			shortest = objective
		}
	}
	return shortest
}

// byClass returns objectives by class instead of its name.
func byClass(named map[string]time.Duration) map[fair.Class]time.Duration {
	all := make(map[fair.Class]time.Duration, len(named))
	for name, objective := range named {
		if class, ok := fair.ClassOf(name); ok {
			all[class] = objective
		}
	}
	return all
}

// validate checks the settings; its errors name the flag.
func (k ObjectiveSettings) validate() error {
	for _, flag := range []struct {
		name, such string
		objectives map[string]time.Duration
	}{{"--class-ttft", "interactive=1s", k.ClassTTFT}, {"--class-tpot", "interactive=40ms", k.ClassTPOT}} {
		for name, objective := range flag.objectives {
			if _, ok := fair.ClassOf(name); !ok || objective <= 0 {
				return fmt.Errorf("%s %s=%s: give interactive, standard or batch, and more than 0, such as %s", flag.name, name, objective, flag.such)
			}
		}
	}
	return nil
}

// preferKeeping keeps the candidates that are predicted to keep the objectives of p, or all if there
// are none. An objective of the first token that has passed no longer counts. A prefill worker keeps
// the time to the first token, a decode worker that of the further ones.
func (d *decider) preferKeeping(p *prompt, q *policy.Query) {
	first, further := time.Duration(0), time.Duration(0)
	if p.Leg != kv.LegDecode && !p.Deadline.IsZero() {
		first = p.Deadline.Sub(q.Now)
	}
	if p.Leg != kv.LegPrefill {
		further = p.TPOT
	}
	if p.keeps = false; first <= 0 && further <= 0 || len(d.candidates) == 1 {
		return
	}
	p.keeps = d.prefer(func(c *policy.Candidate) bool {
		return (first <= 0 || d.forecast.FirstToken(q, c) <= first) && (further <= 0 || d.forecast.TokenTime(q, c) <= further)
	})
}

// lateBy returns by how much the first token of a sheddable p is predicted to miss its deadline on
// the best candidate with a free seat; 0: p is to be served. An idle worker takes any request.
func (a *Admission) lateBy(p *prompt, now time.Time) time.Duration {
	r := a.router
	if !p.sheds() || a.anyIdle(p) {
		return 0
	}
	late := mostRetryAfter
	q := policy.Query{Now: now, Tokens: p.tokens, BlockSize: p.unit, Leg: p.Leg, Adapter: p.LoRA, Class: p.Class}
	for i := range r.decider.candidates {
		if c := &r.decider.candidates[i]; hasSeat(c.Load) || r.settings.RouterQueueThreshold != nil {
			late = min(late, r.decider.forecast.FirstToken(&q, c)-p.Deadline.Sub(now))
		}
	}
	return max(0, late)
}
