package policy

import (
	"math"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
)

const (
	// adapterGuess is the assumed time to load an adapter before any was observed, ms: some
	// 100 MB out of the page cache into a GPU.
	adapterGuess = 100
	// adapterTie is the share of the loading time that the placement of an adapter counts
	// where nothing else decides.
	adapterTie = 1.0 / 8
	// adapterShare bounds the adapters of a worker to that many times the mean, as
	// consistent hashing with bounded loads does (Mirrokni, Thorup, Zadimoghaddam 2018).
	adapterShare = 1.25
	// adapterLife is the time, by a factor of e, over which uses of an adapter are counted:
	// as many are expected to come while a copy of it stays loaded.
	adapterLife = time.Minute
	// maxAdapters bounds the adapters that are remembered of a worker, maxUses those of which
	// uses are counted.
	maxAdapters, maxUses = 256, 4096
)

// AdapterReport is what an engine shows of its LoRA adapters.
type AdapterReport struct {
	Slots  int      // adapters that can be in a batch at a time; 0: unknown
	Active []string // of requests that run or wait
	Stamp  float64  // grows with each change of Active, by the engine's clock; 0: Active is unknown
}

// Adapters is what is known of the LoRA adapters on a worker: an engine keeps those that it
// used last, as many as it has slots for. The zero value knows nothing.
type Adapters struct {
	slots int
	used  []usedAdapter // the last used first
	stamp float64       // of the last report

	counts [len(AdapterStates)]int64 // requests by their state when they were sent
}

// usedAdapter is an adapter that a worker has used.
type usedAdapter struct {
	name     string
	inFlight int  // requests in flight that routers know of
	active   bool // by the engine's last report
	last     time.Time
}

// busy reports whether requests use the adapter now.
func (a *usedAdapter) busy() bool { return a.inFlight > 0 || a.active }

// find returns the adapter of a name; nil: it was not used of late.
func (a *Adapters) find(name string) *usedAdapter {
	if a == nil {
		return nil
	}
	if at := slices.IndexFunc(a.used, func(u usedAdapter) bool { return u.name == name }); at >= 0 {
		return &a.used[at]
	}
	return nil
}

// touch puts an adapter first.
func (a *Adapters) touch(name string, now time.Time) *usedAdapter {
	at := slices.IndexFunc(a.used, func(u usedAdapter) bool { return u.name == name })
	if at < 0 {
		if len(a.used) == maxAdapters {
			a.used = a.used[:maxAdapters-1]
		}
		at = len(a.used)
		a.used = append(a.used, usedAdapter{name: name})
	}
	u := a.used[at]
	u.last = now
	copy(a.used[1:at+1], a.used[:at])
	a.used[0] = u
	return &a.used[0]
}

// AdapterState is what the adapter of a request is expected to need at its worker.
type AdapterState uint8

// Values of AdapterState.
const (
	AdapterReady AdapterState = iota // nothing, or the request has no adapter
	AdapterLoads                     // the engine loads it
	AdapterWaits                     // it waits until another adapter has no requests any more
)

// AdapterStates are the names of the states, as in metrics.
var AdapterStates = [...]string{AdapterReady: "ready", AdapterLoads: "load", AdapterWaits: "wait"}

// Begin notes that a request with the adapter is sent to the worker.
func (a *Adapters) Begin(name string, now time.Time) (state AdapterState) {
	switch {
	case a.slotWait(name) > 0:
		state = AdapterWaits
	case !a.Resident(name):
		state = AdapterLoads
	}
	a.touch(name, now).inFlight++
	a.counts[state]++
	return state
}

// Counts returns how many requests with an adapter were sent to the worker, by their state
// then.
func (a *Adapters) Counts() [len(AdapterStates)]int64 {
	if a == nil {
		return [len(AdapterStates)]int64{}
	}
	return a.counts
}

// Clone returns a copy that does not change with a.
func (a *Adapters) Clone() *Adapters {
	if a == nil {
		return nil
	}
	clone := *a
	clone.used = slices.Clone(a.used)
	return &clone
}

// End notes that such a request has ended.
func (a *Adapters) End(name string, now time.Time) {
	if u := a.find(name); u != nil && u.inFlight > 0 {
		u = a.touch(name, now)
		u.inFlight--
	}
}

// Show stores what the engine shows.
func (a *Adapters) Show(report AdapterReport, now time.Time) {
	a.slots = max(0, report.Slots)
	if report.Stamp <= a.stamp {
		return // the engine has done nothing since, or does not say
	}
	a.stamp = report.Stamp
	for i := range a.used {
		a.used[i].active = false
	}
	for _, name := range report.Active[:min(len(report.Active), maxAdapters)] {
		a.touch(name, now).active = true
	}
}

// Slots returns the number of adapters that can be in a batch at a time; 0: unknown.
func (a *Adapters) Slots() int {
	if a == nil {
		return 0
	}
	return a.slots
}

// Resident reports whether the engine has an adapter loaded, or will have before another
// request that is sent now needs it. Without known slots it has all that it used.
func (a *Adapters) Resident(name string) bool {
	u := a.find(name)
	if u == nil {
		return false
	}
	if a.slots == 0 || u.busy() {
		return true
	}
	others := 0 // that are used later than this one
	for i := range a.used {
		if other := &a.used[i]; other.busy() || other.last.After(u.last) {
			others++
		}
	}
	return others < a.slots
}

// residents returns the number of adapters that are loaded, without one of a name.
func (a *Adapters) residents(without string) int {
	if a == nil {
		return 0
	}
	n := len(a.used)
	if a.find(without) != nil {
		n--
	}
	if a.slots > 0 {
		n = min(n, a.slots)
	}
	return n
}

// victim returns the adapter whose place another one takes that is loaded; empty: a slot is
// free, or all are in use.
func (a *Adapters) victim() (name string) {
	if a == nil || len(a.used) < a.slots {
		return ""
	}
	idle := a.slots // that are loaded
	for i := range a.used {
		if a.used[i].busy() {
			idle--
		}
	}
	for i := range a.used {
		if u := &a.used[i]; !u.busy() {
			if idle--; idle == 0 { // of the idle ones the one that was used first
				return u.name
			}
		}
	}
	return ""
}

// slotWait returns for how many answers a request with the adapter waits until the engine
// has a slot for it: an engine has at most as many adapters in a batch as it has slots. The k
// requests of an adapter end after 1 + 1/2 + … + 1/k answers of random (exponential)
// length. The first adapter to end frees a slot, and those that wait already go before.
func (a *Adapters) slotWait(name string) (answers float64) {
	if a == nil || a.slots == 0 {
		return 0
	}
	busy, least := 0, 0
	for i := range a.used {
		u := &a.used[i]
		if !u.busy() {
			continue
		}
		if u.name == name {
			return 0
		}
		busy++
		if n := max(1, u.inFlight); least == 0 || n < least {
			least = n
		}
	}
	if busy < a.slots {
		return 0
	}
	for k := 1; k <= least; k++ {
		answers += 1 / float64(k)
	}
	return answers * float64(busy-a.slots+1)
}

// placement is the cost of a worker as the place of an adapter, 0 to 1, where nothing else
// distinguishes workers. Each adapter has its own order of the workers (rendezvous hashing), so
// that all routers prefer the same ones. A worker that has its share of adapters comes
// last.
func placement(adapter string, key kv.WorkerKey, full bool) float64 {
	if full {
		return 1
	}
	hash := xxh3.HashStringSeed(adapter, key.Worker*0x9E3779B97F4A7C15+uint64(key.Rank))
	return float64(hash>>11) / (1 << 53)
}

// adapterMost returns how many adapters a worker may have, one that is to be placed
// included.
func adapterMost(adapter string, candidates []Candidate) int {
	all := 1
	for i := range candidates {
		all += candidates[i].Load.Adapters.residents(adapter)
	}
	return int(adapterShare*float64(all)/float64(len(candidates))) + 1
}

// adapterTime is how long an engine takes to load an adapter, ms.
func (p *Work) adapterTime() float64 {
	if p.adapterLoad.count == 0 {
		return adapterGuess
	}
	return p.adapterLoad.Value
}

// adapterUses counts the uses of adapters, each by a factor of e less after adapterLife.
type adapterUses map[string]adapterUse

type adapterUse struct {
	count float64
	at    time.Time
}

// of returns the uses of an adapter as of now.
func (u adapterUses) of(name string, now time.Time) float64 {
	use, known := u[name]
	if !known {
		return 0
	}
	return use.count * math.Exp(-max(0, now.Sub(use.at).Seconds())/adapterLife.Seconds())
}

// share returns u/(u + N) of an adapter that was used u times, with N workers.
func (u adapterUses) share(name string, now time.Time, workers float64) float64 {
	n := u.of(name, now)
	return n / (n + workers)
}

// add counts a use. At most maxUses adapters are counted: one that is new takes the place
// of any other.
func (u adapterUses) add(name string, now time.Time) {
	if _, known := u[name]; !known && len(u) == maxUses {
		for other := range u {
			delete(u, other)
			break
		}
	}
	u[name] = adapterUse{u.of(name, now) + 1, now}
}

// adapter returns what a request's adapter costs at the candidate, ms. Loading it stops the
// passes of the engine, also for the n requests in flight. As a copy of a prefix it is an
// investment: of an adapter that was used u times of late, u/(u + N) of it are for later
// requests, with N workers. The same share of a load is lost with the adapter that is
// evicted for it.
func (p *Work) adapter(q *Query, c *Candidate, u *workUsual) (ms float64) {
	a, load := c.Load.Adapters, p.adapterTime()
	if !a.Resident(q.Adapter) {
		ms += (u.f + float64(c.Load.requests())) * load * u.once
		if victim := a.victim(); victim != "" {
			ms += u.f * load * p.adapterUses.share(victim, q.Now, u.workers)
		}
	}
	full := a.residents(q.Adapter) >= u.adapters
	return ms + u.f*(u.decoding*a.slotWait(q.Adapter)+adapterTie*load*u.once*placement(q.Adapter, c.Target.Key, full))
}

// learnAdapter learns from the first token of a request for which its worker was to load the
// adapter, if nothing else delayed it: what it took longer than its passes.
func (p *Work) learnAdapter(o *Outcome) {
	if o.Adapter == AdapterLoads && o.Alone && o.Leg != kv.LegDecode && o.Loads == (kv.TierTokens{}) && o.Pulled == 0 {
		p.adapterLoad.add(max(0, milliseconds(o.FirstToken)-p.Timing.firstToken(o)))
	}
}
