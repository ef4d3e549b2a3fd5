package simulate

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/decide/router"
)

// maxTenants bounds the tenants of a run.
const maxTenants = 1000

// chargings are the values of --tenant-cost.
var chargings = map[string]router.Charging{"work": router.ByWork, "prompt": router.ByPrompt, "request": router.ByRequest}

// tenantGroup is one entry of --tenants: tenants that are alike.
type tenantGroup struct {
	name   string
	share  float64 // of the conversations, of all its tenants; relative to the other groups'
	class  fair.Class
	absent bool // its conversations are left out
	all    []*tenant

	objective time.Duration // of the time to first token; 0: none
	sheddable bool          // requests predicted to miss it may be refused
	limit     int           // most requests of one tenant in flight, as of an API key; 0: none
}

// tenant is whose a conversation is.
type tenant struct {
	fair.Tenant
	group *tenantGroup
}

// parseTenants reads --tenants.
func parseTenants(texts []string) (groups []*tenantGroup, err error) {
	total := 0
	for _, text := range texts {
		g, err := parseTenantGroup(text)
		if err != nil {
			return nil, fmt.Errorf("--tenants %q: %w", text, err)
		}
		if slices.ContainsFunc(groups, func(other *tenantGroup) bool { return other.name == g.name }) {
			return nil, fmt.Errorf("--tenants %q: %s stands there twice", text, g.name)
		}
		if total += len(g.all); total > maxTenants {
			return nil, fmt.Errorf("--tenants: more than %d tenants", maxTenants)
		}
		groups = append(groups, g)
	}
	if total > 0 && !slices.ContainsFunc(groups, func(g *tenantGroup) bool { return !g.absent }) {
		return nil, errors.New("--tenants: all are absent")
	}
	return groups, nil
}

// parseTenantGroup reads NAME[*COUNT]:SHARE, followed by options.
func parseTenantGroup(text string) (*tenantGroup, error) {
	parts := strings.Split(strings.TrimSpace(text), ":")
	if len(parts) < 2 {
		return nil, errors.New("give NAME[*COUNT]:SHARE[:weight=W][:class=CLASS][:ttft=TIME[:sheddable]][:limit=N][:absent], such as " +
			"light*8:0.16:weight=2")
	}
	name, number, several := strings.Cut(parts[0], "*")
	count := 1
	if several {
		count, _ = strconv.Atoi(number)
	}
	g := &tenantGroup{name: name}
	var err error
	g.share, err = strconv.ParseFloat(parts[1], 64)
	switch {
	case name == "":
		return nil, errors.New("the name is missing")
	case count < 1 || count > maxTenants:
		return nil, fmt.Errorf("*%s: give a number of tenants from 1 to %d", number, maxTenants)
	case err != nil || !(g.share > 0 && g.share <= 1e6):
		return nil, fmt.Errorf("%s: give a share of the conversations above 0, relative to those of the others", parts[1])
	}
	weight := 1.0
	for _, option := range parts[2:] {
		key, value, _ := strings.Cut(option, "=")
		ok := false
		switch key {
		case "weight":
			weight, err = strconv.ParseFloat(value, 64)
			ok = err == nil && weight >= fair.LeastWeight && weight <= fair.MostWeight
		case "class":
			g.class, ok = fair.ClassOf(value)
		case "ttft":
			g.objective, err = time.ParseDuration(value)
			ok = err == nil && g.objective > 0 && g.objective <= time.Hour
		case "sheddable":
			g.sheddable, ok = true, option == key
		case "limit":
			g.limit, err = strconv.Atoi(value)
			ok = err == nil && g.limit > 0
		case "absent":
			g.absent, ok = true, option == key
		}
		if !ok {
			return nil, fmt.Errorf("%s: give weight=%v to %v, class=interactive, standard or batch, ttft=TIME up to an hour, sheddable, limit=N, "+
				"or absent", option, fair.LeastWeight, fair.MostWeight)
		}
	}
	if g.sheddable && g.objective == 0 {
		return nil, errors.New("sheddable needs an objective: add ttft=TIME, such as ttft=2s")
	}
	for i := range count {
		t := &tenant{Tenant: fair.Tenant{Name: name, Weight: weight}, group: g}
		if count > 1 {
			t.Name = fmt.Sprintf("%s-%d", name, i)
		}
		g.all = append(g.all, t)
	}
	return g, nil
}

// assignTenants draws whose each conversation is, for all of its turns, and returns those of
// tenants that are not absent. A seed always gives the same tenants, absent or not.
func assignTenants(requests []TraceRequest, groups []*tenantGroup, seed uint64) []TraceRequest {
	random := rand.New(rand.NewPCG(seed, 6))
	sum := 0.0
	for _, g := range groups {
		sum += g.share
	}
	draw := func() *tenant {
		at := random.Float64() * sum
		g := groups[len(groups)-1]
		for _, other := range groups {
			if at -= other.share; at < 0 {
				g = other
				break
			}
		}
		return g.all[random.IntN(len(g.all))]
	}
	begun := conversationsOf(requests)
	tenants := make([]*tenant, len(requests))
	kept := make([]TraceRequest, 0, len(requests))
	for i, first := range requests {
		if tenants[i] = tenants[begun[i]]; begun[i] == i {
			tenants[i] = draw()
		}
		if first.tenant = tenants[i]; first.tenant.group.absent {
			continue
		}
		for at := &first.Next; *at != nil; at = &(*at).Next { // other runs have the turns too
			turn := **at
			turn.tenant = first.tenant
			*at = &turn
		}
		kept = append(kept, first)
	}
	return kept
}

// conversationsOf returns for each request the place of that which begins its conversation, as
// far as the requests show it. Those of a trace name no turns that follow them, but have the
// turns before them in their prompts: of one conversation are those that share a part of the
// prompt that at most √n of all n requests have. What more have is a system prompt.
func conversationsOf(requests []TraceRequest) []int {
	have := map[uint64]int{}
	for _, r := range requests {
		for _, h := range r.Hashes {
			have[h]++
		}
	}
	most := int(math.Sqrt(float64(len(requests))))
	first := map[uint64]int{} // request that has a part first
	begun := make([]int, len(requests))
	for i, r := range requests {
		begun[i] = i
		at := slices.IndexFunc(r.Hashes, func(h uint64) bool { return have[h] <= most })
		if at < 0 || r.Next != nil {
			continue
		}
		if before, known := first[r.Hashes[at]]; known {
			begun[i] = before
		} else {
			first[r.Hashes[at]] = i
		}
	}
	return begun
}

// TenantReport is what the tenants of one group got.
type TenantReport struct {
	Tenant   string       `json:"tenant"`  // of the group
	Tenants  int          `json:"tenants"` // in it
	Class    string       `json:"class"`
	Weight   float64      `json:"weight"`
	Requests int          `json:"requests"` // that were answered
	Lost     int          `json:"lost"`
	Computed int          `json:"computed_tokens"` // of their prompts
	Answered int          `json:"answered_tokens"`
	TTFT     Distribution `json:"ttft_ms"`
	EndToEnd Distribution `json:"end_to_end_ms"`

	Objective *ObjectiveReport `json:"objective,omitempty"` // nil: the group has none
}

// ObjectiveReport is how the objective of a group was kept.
type ObjectiveReport struct {
	Kept     int `json:"kept"`      // requests
	Missed   int `json:"missed"`    // that were answered
	Shed     int `json:"shed"`      // by prediction
	ShedLate int `json:"shed_late"` // after the deadline

	// Spared requests were to be shed by prediction, but were served: a sample, by chance.
	Spared     int `json:"spared"`
	SparedKept int `json:"spared_kept"`
}

// Goodput is the share of all requests, refused ones too, that kept the objective.
func (o *ObjectiveReport) Goodput(lost int) float64 {
	return float64(o.Kept) / float64(max(1, o.Kept+o.Missed+lost))
}

// Wrong estimates the share of the shed requests that would have kept the objective: that of the
// spared ones. Those shed after their deadline would not.
func (o *ObjectiveReport) Wrong() float64 {
	all := float64(max(1, o.Shed+o.ShedLate))
	return float64(o.Shed) / all * float64(o.SparedKept) / float64(max(1, o.Spared))
}

// spareShare is the share of the requests to be shed by prediction that are served.
const spareShare = 0.05

// spares reports whether a request that a router sheds is served nevertheless, to see whether it
// keeps its objective.
func (s *simulator) spares(e *simRequest) bool {
	o := s.objectives[e.request.tenant.group]
	if s.now > e.asked+e.request.tenant.group.objective {
		o.ShedLate++
		return false
	}
	if e.spared = !e.spared && s.drawSpare.Float64() < spareShare; e.spared {
		o.Spared++
		return true
	}
	o.Shed++
	return false
}

// overLimit reports whether a tenant has as many requests in flight as it may, and counts this
// one if not.
func (s *simulator) overLimit(e *simRequest) bool {
	t := e.request.tenant
	if t == nil || t.group.limit == 0 {
		return false
	}
	if s.inFlight[t] >= t.group.limit {
		return true
	}
	s.inFlight[t]++
	e.counts = true
	return false
}

// tenantReports sums up the groups of tenants, in their order; none: there are no tenants.
func (s *simulator) tenantReports() (reports []TenantReport) {
	for _, g := range s.Tenants {
		if g.absent {
			continue
		}
		r := TenantReport{Tenant: g.name, Tenants: len(g.all), Class: g.class.String(), Weight: g.all[0].Weight, Lost: s.lostBy[g]}
		if g.objective > 0 {
			r.Objective = s.objectives[g]
		}
		var ttft, endToEnd []float64
		for _, f := range s.ledger {
			if t := f.simulated.request.tenant; t == nil || t.group != g {
				continue
			}
			r.Requests++
			r.Computed += f.computed()
			r.Answered += f.Output
			ttft = append(ttft, milliseconds(f.first-f.simulated.asked))
			endToEnd = append(endToEnd, milliseconds(f.end-f.simulated.asked))
			if g.objective == 0 {
				continue
			}
			kept := f.first-f.simulated.asked <= g.objective
			if kept {
				r.Objective.Kept++
			} else {
				r.Objective.Missed++
			}
			if kept && f.simulated.spared {
				r.Objective.SparedKept++
			}
		}
		r.TTFT, r.EndToEnd = distribution(ttft), distribution(endToEnd)
		reports = append(reports, r)
	}
	return reports
}

// computed returns the prompt tokens that a worker has computed for the answer of a flight.
func (f *flight) computed() int {
	if f.prefill != nil {
		return max(0, f.Prompt-f.prefill.Reused)
	}
	return max(0, f.Prompt-f.Reused)
}
