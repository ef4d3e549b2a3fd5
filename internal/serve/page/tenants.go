package page

import (
	"cmp"
	"slices"

	"kvrouter/internal/base/fair"
)

const (
	// maxTenants bounds the tenants that are shown.
	maxTenants = 100
	// maxTenant bounds the name of one, bytes.
	maxTenant = 200
)

// Tenant is one of those that share the workers. What waits and runs is that of a fair queue.
type Tenant struct {
	Tenant         string  `json:"tenant"`
	Weight         float64 `json:"weight"`      // 0: nothing of it waits or runs
	Waiting        Waiting `json:"waiting"`     // requests
	Running        int     `json:"running"`     // likewise
	OldestWait     float64 `json:"oldest_wait"` // s, of the requests that wait
	Behind         float64 `json:"behind"`      // s of service for its weight beyond that of others that wait
	Requests       uint64  `json:"requests"`
	PromptTokens   uint64  `json:"prompt_tokens"`
	CachedTokens   uint64  `json:"cached_tokens"` // of those
	AnsweredTokens uint64  `json:"answered_tokens"`
	Wait           float64 `json:"wait"` // s in the queue, of all requests that have left it
	Shed           uint64  `json:"shed"`
	Kept           uint64  `json:"objectives_kept"` // of the time to first token
	Missed         uint64  `json:"objectives_missed"`
	TokensKept     uint64  `json:"token_objectives_kept"` // of the time per further token
	TokensMissed   uint64  `json:"token_objectives_missed"`
}

// Waiting are the requests that wait in each class.
type Waiting struct {
	Interactive int `json:"interactive"`
	Standard    int `json:"standard"`
	Batch       int `json:"batch"`
}

// Add counts requests of a class.
func (w *Waiting) Add(class fair.Class, n int) {
	switch class {
	case fair.Interactive:
		w.Interactive += n
	case fair.Batch:
		w.Batch += n
	default:
		w.Standard += n
	}
}

// All returns the requests of all classes.
func (w *Waiting) All() int { return w.Interactive + w.Standard + w.Batch }

// tenants returns the first maxTenants, and how many there are beyond them: those with the most
// requests that wait or run at the front, then those with the most requests.
func (p *Page) tenants() (all []Tenant, more int) {
	all = []Tenant{}
	if p.deps.Tenants != nil {
		all = append(all, p.deps.Tenants()...)
	}
	slices.SortFunc(all, func(a, b Tenant) int {
		return cmp.Or(cmp.Compare(b.Waiting.All()+b.Running, a.Waiting.All()+a.Running), cmp.Compare(b.Requests, a.Requests),
			cmp.Compare(a.Tenant, b.Tenant))
	})
	shown := all[:min(len(all), maxTenants)]
	for i := range shown {
		shown[i].Tenant = limited(shown[i].Tenant, maxTenant)
	}
	return shown, len(all) - len(shown)
}
