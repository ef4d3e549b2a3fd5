package openai

import (
	"cmp"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/fair"
)

// setTenant sets whose share of a fair queue the request uses, its class, by when its first token
// should come, and in which time each further one. A trusted client speaks for the tenant that its
// header names; else the tenant is the key's name.
func (r *inference) setTenant() {
	terms, q := r.caller.Terms, &r.request
	q.Tenant = fair.Tenant{Name: r.caller.Name, Weight: terms.Weight}
	if r.hints.Tenant != "" {
		q.Tenant.Name = r.hints.Tenant
	}
	q.Class, q.Sheddable = r.class(), terms.Sheddable
	if objective := cmp.Or(r.hints.TTFT, terms.TTFT, r.api.settings.ClassTTFT[q.Class]); objective > 0 {
		q.Deadline = r.exchange.Arrived.Add(objective)
	}
	q.TPOT = cmp.Or(r.hints.TPOT, terms.TPOT, r.api.settings.ClassTPOT[q.Class])
}

// class returns the class of the request: its key's, unless service_tier, then priority of
// the body, then hints.HeaderClass, then the gateway's objective say otherwise. A client that
// is not trusted can only lower it.
func (r *inference) class() fair.Class {
	class := r.caller.Class
	say := func(to fair.Class) {
		if r.caller.Trusted || to > class {
			class = to
		}
	}
	switch r.body.Get("service_tier").Str {
	case "flex", "batch":
		say(fair.Batch)
	case "priority":
		say(fair.Interactive)
	}
	sayPriority := func(above float64) {
		switch {
		case above > 0:
			say(fair.Interactive)
		case above < 0:
			say(fair.Batch)
		}
	}
	if priority := r.body.Get("priority"); priority.Type == gjson.Number {
		sayPriority(-priority.Num) // of vLLM, where the lower go first
	}
	if r.hints.Class != nil {
		say(*r.hints.Class)
	}
	sayPriority(float64(r.gateway.ObjectivePriority()))
	return class
}
