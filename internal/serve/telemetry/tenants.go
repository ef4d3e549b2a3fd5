package telemetry

import (
	"cmp"
	"container/list"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
)

const (
	// CommonTenant is the name of the requests without a key or a named tenant.
	CommonTenant = "(common)"
	// OtherTenants is the name of the tenants that were dropped for more recent ones.
	OtherTenants = "(others)"
	// maxTenants is how many tenants have accounts of their own.
	maxTenants = 1000
)

// Account is what a tenant has received.
type Account struct {
	Requests         uint64  `json:"requests"`        // that were routed
	PromptTokens     uint64  `json:"prompt_tokens"`   // of answered requests
	CachedTokens     uint64  `json:"cached_tokens"`   // those of them that were cached, as predicted where the worker does not report it
	ComputedTokens   uint64  `json:"computed_tokens"` // the others of them
	AnsweredTokens   uint64  `json:"answered_tokens"`
	WaitSeconds      float64 `json:"wait_seconds"`            // in the queue, of requests that left it for a worker
	Shed             uint64  `json:"shed"`                    // requests refused because they would miss their objective
	ObjectivesKept   uint64  `json:"objectives_kept"`         // of the time to first token
	ObjectivesMissed uint64  `json:"objectives_missed"`       // likewise
	TokensKept       uint64  `json:"token_objectives_kept"`   // of the time per further token
	TokensMissed     uint64  `json:"token_objectives_missed"` // likewise
}

// add adds another account.
func (a *Account) add(b Account) {
	a.Requests, a.PromptTokens, a.CachedTokens, a.ComputedTokens = a.Requests+b.Requests, a.PromptTokens+b.PromptTokens,
		a.CachedTokens+b.CachedTokens, a.ComputedTokens+b.ComputedTokens
	a.AnsweredTokens, a.WaitSeconds, a.Shed = a.AnsweredTokens+b.AnsweredTokens, a.WaitSeconds+b.WaitSeconds, a.Shed+b.Shed
	a.ObjectivesKept, a.ObjectivesMissed = a.ObjectivesKept+b.ObjectivesKept, a.ObjectivesMissed+b.ObjectivesMissed
	a.TokensKept, a.TokensMissed = a.TokensKept+b.TokensKept, a.TokensMissed+b.TokensMissed
}

// TenantRecord is the account of a tenant, and its requests that wait or run in a fair
// queue, of all models.
type TenantRecord struct {
	Tenant            string         `json:"tenant"`
	Weight            float64        `json:"weight,omitempty"` // of the last request that waits or runs
	Waiting           map[string]int `json:"waiting"`          // by class
	Running           int            `json:"running"`
	OldestWaitSeconds float64        `json:"oldest_wait_seconds"`
	ElsewhereMS       float64        `json:"elsewhere_ms"` // that its requests at other routers are predicted to cost, divided by the weight
	// most service received, divided by the weight, beyond the least of the tenants of a class that wait
	BehindMS float64 `json:"behind_ms"`
	Account
}

// Tenants keeps the accounts of tenants. It observes requests, and is safe for concurrent
// use.
type Tenants struct {
	states func() []fair.State
	now    func() time.Time

	mu     sync.Mutex // guards the rest
	byName map[string]*list.Element
	used   *list.List // of *tenantAccount, the one used last at the back
	others Account
}

type tenantAccount struct {
	name string
	Account
}

// NewTenants returns accounts. states lists the tenants that wait or run.
func NewTenants(states func() []fair.State) *Tenants {
	return &Tenants{states: states, now: time.Now, byName: map[string]*list.Element{}, used: list.New()}
}

// tenantName is the name of a tenant in accounts.
func tenantName(name string) string {
	if name == "" {
		return CommonTenant
	}
	return kv.MetricLabel(name)
}

// of runs f with the account of a routed request's tenant.
func (t *Tenants) of(x *proxy.Exchange, f func(*Account)) {
	if x.Request == nil {
		return
	}
	name := tenantName(x.Request.Tenant.Name)
	t.mu.Lock()
	defer t.mu.Unlock()
	e := t.byName[name]
	if e == nil {
		if len(t.byName) >= maxTenants {
			oldest := t.used.Front()
			gone := t.used.Remove(oldest).(*tenantAccount)
			delete(t.byName, gone.name)
			t.others.add(gone.Account)
		}
		e = t.used.PushBack(&tenantAccount{name: name})
		t.byName[name] = e
	}
	t.used.MoveToBack(e)
	f(&e.Value.(*tenantAccount).Account)
}

// Began implements openai.Observer.
func (t *Tenants) Began(*http.Request, *proxy.Exchange) {}

// Accepted implements openai.Observer.
func (t *Tenants) Accepted(x *proxy.Exchange, _ *jsonbody.Body) {
	t.of(x, func(a *Account) { a.Requests++ })
}

// Decided implements openai.Observer.
func (t *Tenants) Decided(x *proxy.Exchange, pair *router.Pair) {
	if waited := pair.Took().QueueTime; waited > 0 {
		t.of(x, func(a *Account) { a.WaitSeconds += waited.Seconds() })
	}
}

// Finished implements openai.Observer.
func (t *Tenants) Finished(x *proxy.Exchange, now time.Time) {
	t.of(x, func(a *Account) {
		if errors.Is(x.Refused, router.ErrShed) {
			a.Shed++
		}
		if kept, known := objectiveKept(x, now); known && kept {
			a.ObjectivesKept++
		} else if known {
			a.ObjectivesMissed++
		}
		if kept, known := tokensKept(x, now); known && kept {
			a.TokensKept++
		} else if known {
			a.TokensMissed++
		}
		if !x.Usage.Known {
			return
		}
		cached := x.Decision.OverlapTokens
		if x.Usage.CachedKnown {
			cached = x.Usage.CachedTokens
		}
		cached = min(cached, x.Usage.PromptTokens)
		a.PromptTokens += uint64(x.Usage.PromptTokens)
		a.CachedTokens += uint64(cached)
		a.ComputedTokens += uint64(x.Usage.PromptTokens - cached)
		a.AnsweredTokens += uint64(x.Usage.OutputTokens)
	})
}

// objectiveKept reports whether the first token of an answered request came in time. Of an
// answer that came whole that is known only if it ended in time.
func objectiveKept(x *proxy.Exchange, now time.Time) (kept, known bool) {
	deadline := x.Request.Deadline
	switch {
	case deadline.IsZero() || x.Refused != nil:
		return false, false
	case !x.FirstChunk.IsZero():
		return !x.FirstChunk.After(deadline), true
	}
	kept = x.Status < http.StatusBadRequest && !now.After(deadline)
	return kept, kept
}

// tokensKept reports whether the tokens after the first one of a streamed answer that is complete
// came in time, on average.
func tokensKept(x *proxy.Exchange, now time.Time) (kept, known bool) {
	further := time.Duration(x.Usage.OutputTokens - 1)
	if x.Request.TPOT <= 0 || x.FirstChunk.IsZero() || x.Ending != policy.Finished || !x.Usage.Known || further < 1 {
		return false, false
	}
	return now.Sub(x.FirstChunk)/further <= x.Request.TPOT, true
}

// List returns the records of all tenants by name.
func (t *Tenants) List() []TenantRecord {
	byName := map[string]*TenantRecord{}
	record := func(name string) *TenantRecord {
		r := byName[name]
		if r == nil {
			r = &TenantRecord{Tenant: name, Waiting: map[string]int{}}
			for _, c := range fair.Classes {
				r.Waiting[c.String()] = 0
			}
			byName[name] = r
		}
		return r
	}
	now := t.now()
	states := t.states()
	t.mu.Lock()
	for name, e := range t.byName {
		record(name).Account = e.Value.(*tenantAccount).Account
	}
	others := t.others
	t.mu.Unlock()
	if others.Requests > 0 {
		record(OtherTenants).Account = others
	}
	for _, s := range states {
		name := tenantName(s.Tenant)
		if byName[name] == nil && len(byName) > maxTenants {
			name = OtherTenants
		}
		r := record(name)
		r.Weight = s.Weight
		r.Waiting[s.Class.String()] += s.Waiting
		r.Running += s.Running
		r.ElsewhereMS += s.Elsewhere
		r.BehindMS = max(r.BehindMS, s.Behind)
		if !s.Oldest.IsZero() {
			r.OldestWaitSeconds = max(r.OldestWaitSeconds, now.Sub(s.Oldest).Seconds())
		}
	}
	all := make([]TenantRecord, 0, len(byName))
	for _, r := range byName {
		all = append(all, *r)
	}
	slices.SortFunc(all, func(a, b TenantRecord) int { return cmp.Compare(a.Tenant, b.Tenant) })
	return all
}

// ServeHTTP serves List as JSON.
func (t *Tenants) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	json.NewEncoder(w).Encode(map[string]any{"tenants": t.List()}) // an error is the client's leaving
}

// Collector returns the metrics of tenants.
func (t *Tenants) Collector() prometheus.Collector {
	var set metrics.Set
	requests := set.Counter("kvrouter_tenant_requests_total", "Routed requests of the tenant.", "tenant")
	tokens := set.Counter("kvrouter_tenant_tokens_total",
		"Tokens of the tenant's answered requests, by kind: prompt, cached and computed (of prompts), answered.", "tenant", "kind")
	waits := set.Counter("kvrouter_tenant_wait_seconds_total",
		"Time that the tenant's requests spent in the queue before they were sent to a worker.", "tenant")
	shed := set.Counter("kvrouter_tenant_shed_total", "Requests of the tenant that were refused because they would miss their objective.",
		"tenant")
	objectives := set.Counter("kvrouter_tenant_objectives_total",
		"Answered requests of the tenant with an objective of the time to first token, by result: kept, missed.", "tenant", "result")
	tokenObjectives := set.Counter("kvrouter_tenant_token_objectives_total",
		"Streamed answers of the tenant with an objective of the time per output token after the first one, by result: kept, missed.", "tenant",
		"result")
	waiting := set.Gauge("kvrouter_tenant_waiting_requests",
		"Requests of the tenant in the fair queue, by class: interactive, standard, batch.", "tenant", "class")
	oldest := set.Gauge("kvrouter_tenant_oldest_wait_seconds", "Time for which the oldest request of the tenant has been in the fair queue.",
		"tenant")
	return set.Collector(func(out metrics.Out) {
		for _, r := range t.List() {
			out.Show(requests, float64(r.Requests), r.Tenant)
			out.Show(tokens, float64(r.PromptTokens), r.Tenant, "prompt")
			out.Show(tokens, float64(r.CachedTokens), r.Tenant, "cached")
			out.Show(tokens, float64(r.ComputedTokens), r.Tenant, "computed")
			out.Show(tokens, float64(r.AnsweredTokens), r.Tenant, "answered")
			out.Show(waits, r.WaitSeconds, r.Tenant)
			out.Show(shed, float64(r.Shed), r.Tenant)
			out.Show(objectives, float64(r.ObjectivesKept), r.Tenant, "kept")
			out.Show(objectives, float64(r.ObjectivesMissed), r.Tenant, "missed")
			out.Show(tokenObjectives, float64(r.TokensKept), r.Tenant, "kept")
			out.Show(tokenObjectives, float64(r.TokensMissed), r.Tenant, "missed")
			for class, n := range r.Waiting {
				out.Show(waiting, float64(n), r.Tenant, class)
			}
			out.Show(oldest, r.OldestWaitSeconds, r.Tenant)
		}
	})
}
