package models

import (
	"maps"
	"slices"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/outlier"
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/tokens"
)

// Up makes t a worker of its model that requests may go to.
func (s *Set) Up(t kv.Target) {
	m := s.For(t.Key.Worker)
	if len(t.Models) > 0 {
		m.names.Store(&t.Models)
	}
	m.Tokens.Met(t.Engine == kv.EngineSGLang)
	m.Router.Up(t)
	s.letHeldGo()
}

// Down takes w out of the choice.
func (s *Set) Down(w kv.WorkerKey) { s.For(w.Worker).Router.Down(w) }

// Publish stores the load that w reports.
func (s *Set) Publish(w kv.WorkerKey, p policy.Published) { s.For(w.Worker).Router.Publish(w, p) }

// Hold is Router.Hold: it holds for whichever model the worker serves, now or later.
func (s *Set) Hold(worker uint64, hold bool) {
	s.keep(worker, hold)
	s.letHeldGo()
}

func (s *Set) keep(worker uint64, hold bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if delete(s.held, worker); hold {
		s.held[worker] = true
	}
	for _, m := range s.All() {
		m.Router.Hold(worker, hold)
	}
}

// Working is Router.Working, for all models that the worker has served.
func (s *Set) Working(worker uint64) bool {
	return slices.ContainsFunc(s.All(), func(m *Model) bool { return m.Router.Working(worker) })
}

// IsUp is Router.IsUp.
func (s *Set) IsUp(t kv.Target) bool { return s.For(t.Key.Worker).Router.IsUp(t) }

// Load is Router.Load.
func (s *Set) Load(w kv.WorkerKey) policy.Load { return s.For(w.Worker).Router.Load(w) }

// Blocks returns how many blocks the index of its model knows w to hold.
func (s *Set) Blocks(w kv.WorkerKey) int { return s.For(w.Worker).Router.Blocks(w) }

// Targets returns the workers of all models that are up, by key.
func (s *Set) Targets() (targets []kv.Target) {
	all := s.All()
	if len(all) == 1 {
		return all[0].Router.Targets()
	}
	for _, m := range all {
		targets = append(targets, m.Router.Targets()...)
	}
	slices.SortFunc(targets, func(a, b kv.Target) int { return a.Key.Compare(b.Key) })
	return targets
}

// Count returns how many workers are up.
func (s *Set) Count() (n int) {
	for _, m := range s.All() {
		n += m.Router.Count()
	}
	return n
}

// Schedulable returns how many ranks are up and do not rest.
func (s *Set) Schedulable() (n int) {
	for _, m := range s.All() {
		n += m.Router.Schedulable()
	}
	return n
}

// Has is Router.Has for the workers of all models.
func (s *Set) Has(is func(*kv.Target) bool) bool {
	return slices.ContainsFunc(s.All(), func(m *Model) bool { return m.Router.Has(is) })
}

// Loads returns the load of every worker that is up or has bookings, by key. One that
// has changed its model has those of the new one.
func (s *Set) Loads() (loads []router.WorkerLoad) {
	all := s.All()
	if len(all) == 1 {
		return all[0].Router.Loads()
	}
	for _, m := range all {
		for _, load := range m.Router.Loads() {
			if s.For(load.Key.Worker) == m {
				loads = append(loads, load)
			}
		}
	}
	slices.SortFunc(loads, func(a, b router.WorkerLoad) int { return a.Key.Compare(b.Key) })
	return slices.CompactFunc(loads, func(a, b router.WorkerLoad) bool { return a.Key == b.Key }) // one may have moved meanwhile
}

// Ready tells whether a request that comes now would be served, or held until it can
// be.
func (s *Set) Ready() bool {
	return s.settings.Routing.HoldWhenEmpty > 0 || s.Has(func(t *kv.Target) bool { return t.Role != kv.RolePrefill && !t.Resting })
}

// Sessions returns how many sessions are remembered, and what became of the requests
// that had one; those of models that were forgotten are included.
func (s *Set) Sessions() (known int, sum router.SessionCounts) {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum = s.goneSessions
	for _, m := range s.All() {
		n, counts := m.Router.Sessions()
		known += n
		sum.Add(counts)
	}
	return known, sum
}

// QueueDepth returns the requests that wait, of all models, and their prompt tokens.
func (s *Set) QueueDepth() (requests, tokens int) {
	for _, m := range s.All() {
		r, t := m.Router.QueueDepth()
		requests, tokens = requests+r, tokens+t
	}
	return requests, tokens
}

// Outliers returns how each worker that is up does, and whether so many workers of a
// model are out that all are used.
func (s *Set) Outliers() (list []outlier.Record, desperate bool) {
	for _, m := range s.All() {
		records, all := m.Router.Outliers()
		list, desperate = append(list, records...), desperate || all
	}
	slices.SortFunc(list, func(a, b outlier.Record) int { return a.Worker.Compare(b.Worker) })
	return slices.CompactFunc(list, func(a, b outlier.Record) bool { return a.Worker == b.Worker }), desperate
}

// Decisions is Router.Decisions of all models together.
func (s *Set) Decisions(last int) (list []*router.Receipt, explained bool) {
	all := s.All()
	for _, m := range all {
		receipts, were := m.Router.Decisions(last)
		list, explained = append(list, receipts...), explained || were
	}
	if len(all) > 1 {
		slices.SortStableFunc(list, func(a, b *router.Receipt) int { return b.At.Compare(a.At) })
		list = list[:min(len(list), max(0, last))]
	}
	return list, explained
}

// Rest is Router.Rest.
func (s *Set) Rest(worker uint64) error { return s.For(worker).Router.Cordon(worker) }

// Readmit is Router.Readmit, for all models that the worker has served.
func (s *Set) Readmit(worker uint64) error {
	err := router.ErrUnknownWorker
	for _, m := range s.All() {
		if m.Router.Readmit(worker) == nil {
			err = nil
		}
	}
	s.letHeldGo()
	return err
}

// Resting returns since when each worker rests that does.
func (s *Set) Resting() map[uint64]time.Time {
	all := map[uint64]time.Time{}
	for _, m := range s.All() {
		maps.Copy(all, m.Router.Cordoned())
	}
	return all
}

// Index returns the index of the default model.
func (s *Set) Index() radix.Index { return s.Default().Router.Index() }

// BusyThresholds returns the thresholds, which are the same for every model.
func (s *Set) BusyThresholds() router.BusyThresholds { return s.Default().Router.BusyThresholds() }

// SetBusyThresholds is Router.SetBusyThresholds for every model.
func (s *Set) SetBusyThresholds(t router.BusyThresholds) {
	s.joining.Lock() // a model that is being made has the old ones or the new ones, and then these
	defer s.joining.Unlock()
	for _, m := range s.All() {
		m.Router.SetBusyThresholds(t)
	}
}

// ChangeBusyThresholds is Router.ChangeBusyThresholds for every model.
func (s *Set) ChangeBusyThresholds(change router.BusyThresholds) (now router.BusyThresholds) {
	s.joining.Lock()
	defer s.joining.Unlock()
	for _, m := range s.All() {
		now = m.Router.ChangeBusyThresholds(change)
	}
	return now
}

// BlockSize returns the tokens in a block of the base model of that name, as a worker
// that joins it must have them; 0: any, as it has no worker yet.
func (s *Set) BlockSize(name string) int {
	s.joining.Lock()
	defer s.joining.Unlock()
	if s.isDefault(kv.Served{Names: []string{name}}) {
		return s.Default().Router.BlockSize()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.named(name); m != nil && m.members > 0 {
		return m.Router.BlockSize()
	}
	return 0
}

// Prompts returns where the prompt tokens of all models came from, those included that
// are forgotten.
func (s *Set) Prompts() tokens.Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	sum := s.gone
	sum.Reasons = maps.Clone(sum.Reasons)
	for _, m := range s.All() {
		add(&sum, m.Tokens.Stats())
	}
	return sum
}

// add adds one model's counts to those of others.
func add(sum *tokens.Stats, one tokens.Stats) {
	sum.Local, sum.WorkerRender, sum.WorkerTokenize, sum.None = sum.Local+one.Local, sum.WorkerRender+one.WorkerRender, sum.WorkerTokenize+one.WorkerTokenize, sum.None+one.None
	for reason, n := range one.Reasons {
		sum.Reasons[reason] += n
	}
}

// Sample is the state of a model now, as the metrics page shows it.
type Sample struct {
	Name              string
	BlockSize         int     // tokens
	Local             bool    // its tokenizer is here
	Ranks             int     // of its workers, that are up
	InFlight          int     // requests
	Queued            int     // requests that wait for room
	Held              int     // requests that wait for a worker to come
	Saturation        float64 // Router.Saturation; 1 without workers while requests wait for them
	Blocks            int     // in its index
	Requests, Refused uint64
}

// Samples returns the state of every model, the default one first.
func (s *Set) Samples() (samples []Sample) {
	s.mu.Lock()
	claimed := s.claimed
	s.mu.Unlock()
	awaited := s.awaited()
	for i, m := range s.All() {
		one := Sample{Name: m.Name, BlockSize: m.Router.BlockSize(), Local: m.Tokens.Local(), Ranks: m.Router.Count(), Requests: m.Requests.Load(), Refused: m.Refused.Load(), Held: awaited[m], Saturation: m.saturation(awaited[m])}
		if i == 0 && m.Name == "" {
			one.Name = claimed
		}
		for _, load := range m.Router.Loads() {
			one.InFlight += load.ActiveRequests
		}
		one.Queued, _ = m.Router.QueueDepth()
		for _, key := range m.Router.Index().Workers() {
			one.Blocks += m.Router.Index().Blocks(key)
		}
		samples = append(samples, one)
	}
	return samples
}
