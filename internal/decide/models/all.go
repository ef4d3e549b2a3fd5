package models

import (
	"maps"
	"slices"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/tokens"
)

// Up adds t to the workers of its model that requests may be routed to.
func (s *Set) Up(t kv.Target) {
	m := s.For(t.Key.Worker)
	if len(t.Models) > 0 {
		m.names.Store(&t.Models)
	}
	m.Tokens.Met(t.Engine == kv.EngineSGLang)
	m.Router.Up(t)
	s.releaseWaiting()
}

// Down removes t from the workers that requests may be routed to. The reason is for
// other listeners.
func (s *Set) Down(t kv.Target, _ string) { s.For(t.Key.Worker).Router.Down(t.Key) }

// Load stores the load that w has published.
func (s *Set) Load(w kv.WorkerKey, p policy.Published) { s.For(w.Worker).Router.Publish(w, p) }

// Transferred stores the counters of w's loads from lower tiers.
func (s *Set) Transferred(w kv.WorkerKey, t policy.Transfers) {
	s.For(w.Worker).Router.Transferred(w, t)
}

// ShowAdapters stores what w's engine shows of its LoRA adapters.
func (s *Set) ShowAdapters(w kv.WorkerKey, report policy.AdapterReport) {
	s.For(w.Worker).Router.ShowAdapters(w, report)
}

// ShowCell stores the report and the summary of a router below this one.
func (s *Set) ShowCell(w kv.WorkerKey, report policy.CellReport, holds *summary.View) {
	s.For(w.Worker).Router.ShowCell(w, report, holds)
}

// CordonDiscovered stops new requests to a worker while on is true, for every model that
// it serves now or later.
func (s *Set) CordonDiscovered(worker uint64, on bool) {
	s.mu.Lock() // no model comes meanwhile, with the cordons of before
	for _, m := range s.All() {
		m.Router.Health.CordonDiscovered(worker, on)
	}
	s.mu.Unlock()
	s.releaseWaiting()
}

// Busy reports whether a worker has in-flight requests of any model.
func (s *Set) Busy(worker uint64) bool {
	return slices.ContainsFunc(s.All(), func(m *Model) bool { return m.Router.Working(worker) })
}

// Lives is Health.Lives.
func (s *Set) Lives(worker uint64, generation int) {
	s.For(worker).Router.Health.Lives(worker, generation)
}

// Missed is Health.Missed.
func (s *Set) Missed(worker uint64, generation int, sent time.Time) (lived, busy time.Time) {
	return s.For(worker).Router.Health.Missed(worker, generation, sent)
}

// Answers is Health.Answers.
func (s *Set) Answers(worker uint64, generation int) {
	s.For(worker).Router.Health.Answers(worker, generation)
}

// EngineReports is Health.EngineReports.
func (s *Set) EngineReports(worker uint64, generation int, asked time.Time, report kv.EngineReport) {
	s.For(worker).Router.Health.EngineReports(worker, generation, asked, report)
}

// Control is Health.Control.
func (s *Set) Control(worker uint64, change kv.EngineChange) (ended func(ok bool)) {
	return s.For(worker).Router.Health.Control(worker, change)
}

// Cleared is Health.Cleared.
func (s *Set) Cleared(w kv.WorkerKey) { s.For(w.Worker).Router.Health.Cleared(w) }

// Engine is Router.Engine.
func (s *Set) Engine(w kv.WorkerKey) (state kv.EngineState, version string) {
	return s.For(w.Worker).Router.Engine(w)
}

// IsUp is Router.IsUp.
func (s *Set) IsUp(t kv.Target) bool { return s.For(t.Key.Worker).Router.IsUp(t) }

// LoadOf is Router.Load.
func (s *Set) LoadOf(w kv.WorkerKey) policy.Load { return s.For(w.Worker).Router.Load(w) }

// Blocks returns the number of blocks of w in the index of its model.
func (s *Set) Blocks(w kv.WorkerKey) int { return s.For(w.Worker).Router.Index().Blocks(w) }

// Targets returns the workers of all models that are up, sorted by key.
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

// Count returns the number of ranks that are up and not Unanswered.
func (s *Set) Count() (n int) {
	for _, m := range s.All() {
		n += m.Router.Count()
	}
	return n
}

// Schedulable returns the number of ranks that are up, and neither cordoned nor
// Unanswered.
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

// Loads returns the load of every worker that is up or has reservations, sorted by key.
// A worker that has changed its model has the load of the new one.
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
	// a worker may have changed its model meanwhile
	return slices.CompactFunc(loads, func(a, b router.WorkerLoad) bool { return a.Key == b.Key })
}

// Ready reports whether a new request would be served, at once or after waiting for
// a worker.
func (s *Set) Ready() bool {
	return s.settings.Routing.HoldWhenEmpty > 0 || s.Has(func(t *kv.Target) bool {
		return t.Role != kv.RolePrefill && !t.Cordoned && !t.Unanswered
	})
}

// Sessions returns the number of sessions in memory, and the routing results of requests
// with a session, including those of removed models.
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

// EndSession forgets a session at all models: see router.Router.EndSession.
func (s *Set) EndSession(owner, name string) (known bool) {
	for _, m := range s.All() {
		known = m.Router.EndSession(m.Router.SessionOf(owner, name)) || known
	}
	return known
}

// QueueDepth returns the queued requests of all models and their prompt tokens.
func (s *Set) QueueDepth() (requests, tokens int) {
	for _, m := range s.All() {
		r, t := m.Router.Admission.QueueDepth()
		requests, tokens = requests+r, tokens+t
	}
	return requests, tokens
}

// Tenants returns the tenants that have requests in the fair queue or in flight, for each
// model and class.
func (s *Set) Tenants() (states []fair.State) {
	for _, m := range s.All() {
		states = append(states, m.Router.Admission.Tenants()...)
	}
	return states
}

// Discredited returns the number of clients whose failures count against no worker of a
// model now, for all models together.
func (s *Set) Discredited() (n int) {
	for _, m := range s.All() {
		n += m.Router.Health.Discredited()
	}
	return n
}

// Outliers returns the health of each worker that is up, and whether a model is in panic
// mode: more of its workers fail than may be ejected.
func (s *Set) Outliers() (list []health.Record, panicking bool) {
	for _, m := range s.All() {
		records, all := m.Router.Health.Records()
		list, panicking = append(list, records...), panicking || all
	}
	slices.SortFunc(list, func(a, b health.Record) int { return a.Worker.Compare(b.Worker) })
	return slices.CompactFunc(list, func(a, b health.Record) bool { return a.Worker == b.Worker }), panicking
}

// Outlier returns the health of a worker; not ok: it is not up.
func (s *Set) Outlier(w kv.WorkerKey) (record health.Record, ok bool) {
	return s.For(w.Worker).Router.Health.Record(w)
}

// Panicking reports whether a model is in panic mode.
func (s *Set) Panicking() bool {
	return slices.ContainsFunc(s.All(), func(m *Model) bool { return m.Router.Health.Panicking() })
}

// Decisions is Receipts.Last for all models together.
func (s *Set) Decisions(last int) (list []*router.Receipt, explained bool) {
	all := s.All()
	for _, m := range all {
		receipts, were := m.Router.Receipts.Last(last)
		list, explained = append(list, receipts...), explained || were
	}
	if len(all) > 1 {
		slices.SortStableFunc(list, func(a, b *router.Receipt) int { return b.At.Compare(a.At) })
		list = list[:min(len(list), max(0, last))]
	}
	return list, explained
}

// Cordon is Health.Cordon.
func (s *Set) Cordon(worker uint64) error { return s.For(worker).Router.Health.Cordon(worker) }

// Readmit is Health.Readmit, for all models that the worker has served.
func (s *Set) Readmit(worker uint64) error {
	err := router.ErrUnknownWorker
	for _, m := range s.All() {
		if m.Router.Health.Readmit(worker) == nil {
			err = nil
		}
	}
	s.releaseWaiting()
	return err
}

// Cordoned returns the cordoned workers, each with the time at which it was cordoned.
func (s *Set) Cordoned() map[uint64]time.Time {
	all := map[uint64]time.Time{}
	for _, m := range s.All() {
		maps.Copy(all, m.Router.Health.Cordoned())
	}
	return all
}

// Index returns the index of the default model.
func (s *Set) Index() radix.Reader { return s.Default().Index }

// BusyThresholds returns the busy thresholds, which all models share.
func (s *Set) BusyThresholds() router.BusyThresholds {
	return s.Default().Router.Admission.BusyThresholds()
}

// SetBusyThresholds is Admission.SetBusyThresholds for every model.
func (s *Set) SetBusyThresholds(t router.BusyThresholds) {
	s.joining.Lock() // no model is being created with the old ones
	defer s.joining.Unlock()
	for _, m := range s.All() {
		m.Router.Admission.SetBusyThresholds(t)
	}
}

// ChangeBusyThresholds is Admission.ChangeBusyThresholds for every model.
func (s *Set) ChangeBusyThresholds(change router.BusyThresholds) (now router.BusyThresholds) {
	s.joining.Lock()
	defer s.joining.Unlock()
	for _, m := range s.All() {
		now = m.Router.Admission.ChangeBusyThresholds(change)
	}
	return now
}

// Prompts counts the prompts of all models by the source of their tokens, including
// those of removed models.
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

// add adds the counts of one model to sum.
func add(sum *tokens.Stats, one tokens.Stats) {
	sum.Local += one.Local
	sum.WorkerRender += one.WorkerRender
	sum.WorkerTokenize += one.WorkerTokenize
	sum.None += one.None
	for reason, n := range one.Reasons {
		sum.Reasons[reason] += n
	}
}

// Sample is the current state of a model, as the metrics page shows it.
type Sample struct {
	Name              string
	BlockSize         int     // tokens
	Local             bool    // the router has its tokenizer
	FilesRefused      bool    // its tokenizer or chat template could not be used
	Ranks             int     // that are up
	InFlight          int     // requests
	Queued            int     // requests that wait for capacity
	Waiting           int     // requests that wait until a worker is up
	Saturation        float64 // Admission.Saturation; 1 without workers while requests wait for one
	Prefill, Decode   float64 // Admission.SaturationOf; 1 without such workers while requests wait for one
	Paired            bool    // a worker has one of these roles
	Blocks            int     // in its index
	Requests, Refused uint64
}

// Samples returns the state of every model, the default one first.
func (s *Set) Samples() (samples []Sample) {
	s.mu.Lock()
	claimed := s.claimed
	s.mu.Unlock()
	waiting := s.waitingByModel()
	for i, m := range s.All() {
		one := Sample{
			Name: m.Name, BlockSize: m.Router.Unit(), Local: m.Tokens.Local(), FilesRefused: m.refused, Ranks: m.Router.Count(),
			Requests: m.Requests.Load(), Refused: m.Refused.Load(), Waiting: waiting[m], Saturation: m.saturation(waiting[m]),
		}
		if one.Paired = m.Router.Paired(); one.Paired {
			one.Prefill, one.Decode = m.saturationOf(kv.RolePrefill, waiting[m]), m.saturationOf(kv.RoleDecode, waiting[m])
		}
		if i == 0 && m.Name == "" {
			one.Name = claimed
		}
		for _, load := range m.Router.Loads() {
			one.InFlight += load.ActiveRequests
		}
		one.Queued, _ = m.Router.Admission.QueueDepth()
		for _, key := range m.Index.Workers() {
			one.Blocks += m.Index.Blocks(key)
		}
		samples = append(samples, one)
	}
	return samples
}
