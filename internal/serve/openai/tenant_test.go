package openai

import (
	"testing"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/proxy"
)

// TestClassOfARequest: a client that is not trusted can lower its class, never raise it.
func TestClassOfARequest(t *testing.T) {
	for name, test := range map[string]struct {
		body               string
		key                fair.Class
		gateway            *proxy.Gateway
		named              string // by hints.HeaderClass
		trusted, untrusted fair.Class
	}{
		"nothing said":                          {`{}`, fair.Standard, nil, "", fair.Standard, fair.Standard},
		"the key's":                             {`{}`, fair.Batch, nil, "", fair.Batch, fair.Batch},
		"service_tier flex":                     {`{"service_tier":"flex"}`, fair.Interactive, nil, "", fair.Batch, fair.Batch},
		"service_tier batch":                    {`{"service_tier":"batch"}`, fair.Standard, nil, "", fair.Batch, fair.Batch},
		"service_tier priority":                 {`{"service_tier":"priority"}`, fair.Standard, nil, "", fair.Interactive, fair.Standard},
		"service_tier default":                  {`{"service_tier":"default"}`, fair.Batch, nil, "", fair.Batch, fair.Batch},
		"a priority of vLLM below 0":            {`{"priority":-3}`, fair.Batch, nil, "", fair.Interactive, fair.Batch},
		"a priority of vLLM above 0":            {`{"priority":3}`, fair.Standard, nil, "", fair.Batch, fair.Batch},
		"a priority of 0":                       {`{"priority":0}`, fair.Interactive, nil, "", fair.Interactive, fair.Interactive},
		"a priority that is none":               {`{"priority":"-1"}`, fair.Standard, nil, "", fair.Standard, fair.Standard},
		"an objective above 0":                  {`{}`, fair.Standard, &proxy.Gateway{Priority: 5}, "", fair.Interactive, fair.Standard},
		"an objective below 0":                  {`{}`, fair.Interactive, &proxy.Gateway{Priority: -5}, "", fair.Batch, fair.Batch},
		"the objective counts before the body":  {`{"priority":1}`, fair.Standard, &proxy.Gateway{Priority: 5}, "", fair.Interactive, fair.Batch},
		"the priority counts before the tier":   {`{"priority":-1,"service_tier":"flex"}`, fair.Standard, nil, "", fair.Interactive, fair.Batch},
		"an untrusted client lowers a high key": {`{"priority":1}`, fair.Interactive, nil, "", fair.Batch, fair.Batch},
		"a name above":                          {`{}`, fair.Standard, nil, "interactive", fair.Interactive, fair.Standard},
		"a name below":                          {`{}`, fair.Interactive, nil, "batch", fair.Batch, fair.Batch},
		"a name between":                        {`{}`, fair.Interactive, nil, "standard", fair.Standard, fair.Standard},
		"the name counts before the body":       {`{"priority":1,"service_tier":"flex"}`, fair.Batch, nil, "standard", fair.Standard, fair.Batch},
		"the objective counts before the name":  {`{}`, fair.Standard, &proxy.Gateway{Priority: -5}, "interactive", fair.Batch, fair.Batch},
	} {
		t.Run(name, func(t *testing.T) {
			body, _ := jsonbody.Parse([]byte(test.body))
			for trusted, want := range map[bool]fair.Class{true: test.trusted, false: test.untrusted} {
				r := &inference{caller: &keys.Caller{Trusted: trusted, Terms: keys.Terms{Class: test.key}}, body: body, gateway: test.gateway}
				if class, ok := fair.ClassOf(test.named); ok {
					r.hints.Class = &class
				}
				if got := r.class(); got != want {
					t.Errorf("trusted %v: %v, want %v", trusted, got, want)
				}
			}
		})
	}
}

func TestTenantOfARequest(t *testing.T) {
	arrived := time.Unix(1_000_000, 0)
	api := &API{settings: Settings{ClassTTFT: map[fair.Class]time.Duration{fair.Batch: time.Hour}, ClassTPOT: map[fair.Class]time.Duration{fair.Batch: time.Minute}}}
	for name, test := range map[string]struct {
		caller keys.Caller
		hints  hints.Hints
		tenant fair.Tenant
		within time.Duration // of the arrival; 0: it has no deadline
		tpot   time.Duration
	}{
		"nobody":                     {keys.Caller{}, hints.Hints{}, fair.Tenant{}, 0, 0},
		"a key":                      {keys.Caller{Name: "a", Terms: keys.Terms{Weight: 2, TTFT: time.Second, TPOT: time.Millisecond}}, hints.Hints{}, fair.Tenant{Name: "a", Weight: 2}, time.Second, time.Millisecond},
		"a key that speaks for one":  {keys.Caller{Name: "gateway", Terms: keys.Terms{TPOT: time.Second}}, hints.Hints{Tenant: "b", TTFT: time.Minute, TPOT: time.Hour}, fair.Tenant{Name: "b"}, time.Minute, time.Hour},
		"the objective of its class": {keys.Caller{Terms: keys.Terms{Class: fair.Batch}}, hints.Hints{}, fair.Tenant{}, time.Hour, time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			body, _ := jsonbody.Parse([]byte(`{}`))
			test.caller.Sheddable = true
			r := &inference{api: api, caller: &test.caller, hints: test.hints, body: body, exchange: &proxy.Exchange{Arrived: arrived}}
			r.setTenant()
			want := time.Time{}
			if test.within > 0 {
				want = arrived.Add(test.within)
			}
			if got := r.request; got.Tenant != test.tenant || !got.Deadline.Equal(want) || got.TPOT != test.tpot || !got.Sheddable {
				t.Errorf("%+v until %v, then %v a token", got.Tenant, got.Deadline, got.TPOT)
			}
		})
	}
}
