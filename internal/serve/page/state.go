package page

import (
	"cmp"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/fleet/workers"
)

const (
	// maxModels bounds the models that are named.
	maxModels = 64
	// maxWhy bounds the text on a worker's trouble, bytes.
	maxWhy = 400
	// recently is the time that a worker that is back is said to have been away.
	recently = time.Minute
)

// state is the content of the page, but for the trends.
func (p *Page) state(now time.Time) State {
	totals, model := p.deps.Totals(), p.deps.Models.Default().Router
	queued, _ := p.deps.Models.QueueDepth()
	s := State{
		At: unix(now), Version: p.settings.Version, Uptime: seconds(now.Sub(p.began)), Policy: p.settings.Policy, BlockSize: model.Unit(),
		ShowText: p.settings.PageShowText, TryAsks: p.tryAsks(), Demo: p.settings.Demo, Fair: p.settings.Fair, Models: []string{},
		Rates: p.trends.lately(totals, now), Requests: p.requests.list(),
		Cache: p.prompts.hottest(model.Unit(), now, model.Index().Match),
		Totals: Totals{
			Requests: totals.Requests, Errors: totals.Errors, Queued: queued, PromptTokens: totals.PromptTokens, CachedTokens: totals.CachedTokens,
			ComparedTokens:  totals.ComparedTokens,
			PredictedTokens: totals.PredictedTokens, Exact: totals.Exact, Compared: totals.Compared,
		},
	}
	s.Ready, s.Draining = p.deps.Ready()
	s.Tenants, s.MoreTenants = p.tenants()
	if p.deps.Cluster != nil {
		cluster := p.deps.Cluster()
		s.Cluster = &cluster
	}
	s.Workers = p.fleet(totals, now)
	for i := range s.Workers {
		s.Totals.InFlight += s.Workers[i].InFlight
	}
	for _, w := range p.deps.Fleet.Workers() {
		for _, model := range w.Models {
			if len(s.Models) < maxModels && !slices.Contains(s.Models, model) {
				s.Models = append(s.Models, model)
			}
		}
	}
	return s
}

// fleet returns every rank of every worker, by name, worker and rank.
func (p *Page) fleet(totals metrics.Totals, now time.Time) []Worker {
	statuses := map[uint64]workers.Status{}
	for _, status := range p.deps.Fleet.Workers() {
		statuses[status.ID] = status
	}
	records, _ := p.deps.Models.Outliers()
	failing := map[kv.WorkerKey]health.Record{}
	for _, record := range records {
		failing[record.Worker] = record
	}
	cordoned := p.deps.Models.Cordoned()
	list, names := []Worker{}, p.deps.Models.Names().Now()
	for sample := range p.deps.Fleet.Samples(p.deps.Models) {
		status, there := statuses[sample.Worker.Worker]
		if !there {
			continue // it has come since
		}
		w := worker(*sample, status, now)
		w.Name = names.Name(w.Worker)
		part := totals.Workers[names.Label(w.Worker)]
		if w.Requests = part.Requests; part.ComparedTokens > 0 {
			rate := min(float64(part.CachedTokens)/float64(part.ComparedTokens), 1)
			w.HitRate = &rate
		}
		since, isCordoned := cordoned[w.Worker]
		w.Cordoned = isCordoned
		record := failing[sample.Worker]
		switch { // users' actions and alarms come first
		case w.State == StateReady && isCordoned:
			w.State, w.Since, w.Why = StateCordoned, unix(since), "gets no new requests until it is readmitted"
		case w.State == StateReady && record.State == health.StateOut:
			w.State, w.Since, w.Why = StateEjected, unix(record.Since), limited(record.Why, maxWhy)
		case w.State == StateReady && sample.Load.State.Rests():
			w.State, w.Why = StatePaused, "its engine is "+sample.Load.State.String()+": requests go to others, or wait"
		case w.State == StateReady && record.State == health.StateHeld:
			w.Why = "requested a pause, or may be failing"
		case w.State == StateReady && record.State == health.StateSilent:
			w.Why = "shows no sign of life"
		}
		list = append(list, w)
	}
	slices.SortFunc(list, func(a, b Worker) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), kv.WorkerKey{Worker: a.Worker,
			Rank: a.Rank}.Compare(kv.WorkerKey{Worker: b.Worker, Rank: b.Rank}))
	})
	return list
}

// worker is a rank as the fleet knows it.
func worker(s workers.Sample, status workers.Status, now time.Time) Worker {
	w := Worker{
		Worker: s.Worker.Worker, Rank: s.Worker.Rank, URL: status.URL, Engine: status.Engine.String(), State: stateOf(status),
		Since:    unix(status.Since),
		Restarts: s.Restarts, InFlight: s.Load.InFlight, LoadKnown: s.Load.Fresh, Blocks: s.Blocks, ActiveBlocks: s.Load.ActiveBlocks,
		PrefillTokens: s.Load.PrefillTokens, Version: kv.MetricLabel(s.Version),
	}
	if cache := status.Cache; cache.BlockSize > 0 {
		w.BlockSize, w.Known, w.KnownWhy = cache.BlockSize, cache.Known.String(), limited(cache.Reason, maxWhy)
		if cache.Remedy != "" {
			w.KnownWhy += ": " + limited(cache.Remedy, maxWhy)
		}
	}
	if status.Disagg.Role != kv.RoleBoth {
		w.Role = status.Disagg.Role.String()
	}
	if len(status.Models) > 0 {
		w.Model = status.Models[0]
	}
	if s.Load.Fresh {
		usage := s.Load.KVUsage
		w.Waiting, w.Running, w.KVUsage = s.Load.Waiting, s.Load.Running, &usage
	}
	if s.Lag >= 0 {
		lag := seconds(s.Lag)
		w.EventLag = &lag
	}
	switch {
	case w.State == StateDraining:
		w.Since = unix(status.CordonedSince)
		w.Why = "draining: finishes its in-flight requests and gets no new ones"
		if status.State != workers.StateReady && status.LastError != "" {
			w.Why += "; " + limited(status.LastError, maxWhy)
		}
	case w.State == StateNotReady:
		w.Since = unix(status.CordonedSince)
		w.Why = "gets no new requests: discovery reports it as not ready"
	case w.State != StateReady:
		w.Why = limited(status.LastError, maxWhy)
	case status.Restarts > 0 && now.Sub(status.Since) < recently: // between two states nobody saw it down
		w.Why = "ended and was restarted"
	}
	return w
}

// stateOf is a worker's state in the words of the page.
func stateOf(status workers.Status) string {
	switch {
	case status.Cordon == kv.CordonDraining: // also where it answers no more: that is how it ends
		return StateDraining
	case status.State == workers.StateReady && status.Cordon != "":
		return StateNotReady
	case status.State == workers.StateReady:
		return StateReady
	case status.State == workers.StateStarting, status.State == workers.StateConnecting && len(status.Models) == 0:
		return StateStarting
	case status.State == workers.StateDown:
		return StateUnhealthy
	}
	return StateDown
}
