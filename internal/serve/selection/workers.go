package selection

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/fleet/workers"
)

// Lifecycles of a worker on the router port.
const (
	LifecycleSchedulable   = "schedulable"
	lifecycleIncomplete    = "incomplete"    // registered with required fields missing
	LifecycleUnschedulable = "unschedulable" // down, cordoned or removed
)

// Limits on what clients register.
const (
	maxRegistered = 10_000 // workers, including incomplete ones
	// maxRanks is the maximum number of data-parallel ranks of one worker.
	maxRanks = kv.MaxRanks
	// maxRanksTogether is the maximum for all registered workers with several ranks:
	// each rank has a connection for its KV events.
	maxRanksTogether = 4096
	// sparedRanks is the number of ranks that kv_events_endpoints may name although the
	// worker has fewer.
	sparedRanks = 64
	maxName     = 256  // of a model, a group, a host or the endpoint of a rank, bytes
	maxKey      = 4096 // of a worker, bytes
)

// workerSpec is a client's description of a worker; omitted fields are nil.
type workerSpec struct {
	ModelName         *string           `json:"model_name,omitempty"`
	RoutingGroup      *string           `json:"routing_group,omitempty"`
	Endpoint          *string           `json:"endpoint,omitempty"`
	KVEventsEndpoint  *string           `json:"kv_events_endpoint,omitempty"` // of the first rank; further ranks have the next ports
	KVEventsEndpoints map[uint32]string `json:"kv_events_endpoints,omitempty"`
	ReplayEndpoint    *string           `json:"replay_endpoint,omitempty"` // likewise
	BlockSize         *int              `json:"block_size,omitempty"`
	StartRank         *uint32           `json:"data_parallel_start_rank,omitempty"`
	RankCount         *uint32           `json:"data_parallel_size,omitempty"`
	MaxBatchedTokens  *int              `json:"max_num_batched_tokens,omitempty"`
	TotalBlocks       *int              `json:"total_kv_blocks,omitempty"`
	Role              *kv.Role          `json:"role,omitempty"`
	Kind              *kv.Kind          `json:"kind,omitempty"`
	BootstrapHost     *string           `json:"bootstrap_host,omitempty"`
	BootstrapPort     *uint16           `json:"bootstrap_port,omitempty"`
	P2PHost           *string           `json:"p2p_host,omitempty"`
	P2PPort           *uint16           `json:"p2p_port,omitempty"` // of the first rank; further ranks have the next ports
	APIKey            *kv.Secret        `json:"api_key,omitempty"`  // never shown
}

// shown returns the spec without its secret.
func (s workerSpec) shown() workerSpec {
	s.APIKey = nil
	return s
}

// check rejects values of the spec that are out of range.
func (s workerSpec) check() error {
	for _, text := range []struct {
		field, value string
		most         int
	}{
		{"model_name", Given(s.ModelName, ""), maxName}, {"routing_group", Given(s.RoutingGroup, ""), maxName},
		{"bootstrap_host", Given(s.BootstrapHost, ""), maxName}, {"p2p_host", Given(s.P2PHost, ""), maxName},
		{"api_key", string(Given(s.APIKey, "")), maxKey},
	} {
		if len(text.value) > text.most || strings.ContainsFunc(text.value, unicode.IsControl) {
			return fmt.Errorf("%s: give at most %d bytes without control characters", text.field, text.most)
		}
	}
	for _, number := range []struct {
		field string
		value int
		most  int
	}{
		{"max_num_batched_tokens", Given(s.MaxBatchedTokens, 0), kv.MaxTokens}, {"total_kv_blocks", Given(s.TotalBlocks, 0), kv.MaxTokens},
		{"block_size", Given(s.BlockSize, 0), kv.MaxBlock},
	} {
		if number.value < 0 || number.value > number.most {
			return fmt.Errorf("%s: give 0 to %d", number.field, number.most)
		}
	}
	if start, count := Given(s.StartRank, 0), Given(s.RankCount, 1); count > maxRanks || start > 1<<31 {
		return fmt.Errorf("data_parallel_size %d from rank %d: a worker has at most %d ranks", count, start, maxRanks)
	}
	if n, most := len(s.KVEventsEndpoints), max(sparedRanks, int(Given(s.RankCount, 1))); n > most {
		return fmt.Errorf("kv_events_endpoints has %d ranks: the maximum is %d or data_parallel_size", n, most)
	}
	if Given(s.Kind, kv.KindNone) == kv.KindRouter {
		return errors.New("kind router cannot be registered: attach that router by --worker url=URL,kind=router or discovery")
	}
	for rank, endpoint := range s.KVEventsEndpoints {
		if len(endpoint) > maxName {
			return fmt.Errorf("kv_events_endpoints[%d] has %d bytes: the maximum is %d", rank, len(endpoint), maxName)
		}
	}
	return nil
}

// patched returns the spec with the fields of the patch, except for the partition, which
// does not change.
func (s workerSpec) patched(patch workerSpec) workerSpec {
	if Given(patch.Endpoint, "") != Given(s.Endpoint, "") && patch.Endpoint != nil {
		s.APIKey = nil // it belongs to the old address
	}
	s.APIKey = cmp.Or(patch.APIKey, s.APIKey)
	s.Endpoint = cmp.Or(patch.Endpoint, s.Endpoint)
	s.KVEventsEndpoint = cmp.Or(patch.KVEventsEndpoint, s.KVEventsEndpoint)
	if patch.KVEventsEndpoints != nil {
		s.KVEventsEndpoints = patch.KVEventsEndpoints
	}
	s.ReplayEndpoint = cmp.Or(patch.ReplayEndpoint, s.ReplayEndpoint)
	s.BlockSize = cmp.Or(patch.BlockSize, s.BlockSize)
	s.StartRank = cmp.Or(patch.StartRank, s.StartRank)
	s.RankCount = cmp.Or(patch.RankCount, s.RankCount)
	s.MaxBatchedTokens = cmp.Or(patch.MaxBatchedTokens, s.MaxBatchedTokens)
	s.TotalBlocks = cmp.Or(patch.TotalBlocks, s.TotalBlocks)
	s.Role = cmp.Or(patch.Role, s.Role)
	s.Kind = cmp.Or(patch.Kind, s.Kind)
	s.BootstrapHost = cmp.Or(patch.BootstrapHost, s.BootstrapHost)
	s.BootstrapPort = cmp.Or(patch.BootstrapPort, s.BootstrapPort)
	s.P2PHost = cmp.Or(patch.P2PHost, s.P2PHost)
	s.P2PPort = cmp.Or(patch.P2PPort, s.P2PPort)
	return s
}

// Given returns *p, or otherwise if p is nil.
func Given[T any](p *T, otherwise T) T {
	if p == nil {
		return otherwise
	}
	return *p
}

// WorkerRecord is a worker on the router port; loads and blocks are sums over its ranks.
type WorkerRecord struct {
	WorkerID uint64 `json:"worker_id"`
	Name     string `json:"name,omitempty"` // of a discovered worker
	workerSpec
	Lifecycle     string   `json:"lifecycle"`
	Reasons       []string `json:"not_schedulable_reasons,omitempty"`
	State         string   `json:"state"`
	PID           int      `json:"pid,omitempty"`
	Restarts      int      `json:"restarts"`
	Generation    int      `json:"generation"`
	InFlight      int      `json:"in_flight"`
	PrefillTokens int      `json:"prefill_tokens"`
	RunningReqs   int      `json:"num_running_reqs"`
	WaitingReqs   int      `json:"num_waiting_reqs"`
	KVCacheUsage  float64  `json:"kv_cache_usage"`
	Blocks        int      `json:"blocks"`
	// Pulls counts the requests for which it was to pull blocks from another worker, by
	// result; nil: none.
	Pulls map[string]int64 `json:"kv_pulls,omitempty"`

	Engine      kv.Engine          `json:"engine"`                // as detected so far
	Cache       workers.CacheState `json:"kv_cache,omitzero"`     // how it is known; zero: it is not attached yet
	Predictions string             `json:"predictions,omitempty"` // why they are not exact, as detected so far
	Speculation string             `json:"speculation,omitempty"` // algorithm of its speculative decoding, likewise
	// TakesTokens are the routes on which it gets the tokens of long prompts; nil: it has not been asked.
	TakesTokens []string `json:"takes_tokens,omitzero"`
	workers.Exactness

	Cell     *workers.Cell  `json:"cell,omitempty"`     // of a router below this one
	Failures *failureRecord `json:"failures,omitempty"` // nil: it is not up
}

// failureRecord is the recent health of a worker, of its worst rank.
type failureRecord struct {
	State       string     `json:"state"`                   // in, slow_start, silent, held or ejected
	Reason      string     `json:"reason,omitempty"`        // of ejected
	Until       *time.Time `json:"ejected_until,omitempty"` // ejected: time of the trial request
	HeldUntil   *time.Time `json:"held_until,omitempty"`
	Ejections   uint64     `json:"ejections"`
	Row         int        `json:"consecutive_failures"`
	SuccessRate float64    `json:"success_rate"` // of the last 10 s, 0 to 1
}

// failuresOf combines the records of each worker's ranks, by worker.
func failuresOf(records []health.Record) map[uint64]*failureRecord {
	states := []string{health.StateIn, health.StateBack, health.StateSilent, health.StateHeld, health.StateOut}
	all := make(map[uint64]*failureRecord, len(records))
	for i := range records {
		r := &records[i]
		one := failureRecord{State: r.State, Row: r.Row, SuccessRate: r.SuccessRate}
		switch r.State {
		case health.StateOut:
			one.Reason, one.Until = r.Reason.String(), &r.Until
		case health.StateHeld:
			one.HeldUntil = &r.Until
		}
		for _, n := range r.Ejections {
			one.Ejections += n
		}
		sum := all[r.Worker.Worker]
		if sum != nil {
			one.Ejections += sum.Ejections
		}
		if sum == nil || slices.Index(states, one.State) >= slices.Index(states, sum.State) {
			all[r.Worker.Worker] = &one
		} else {
			sum.Ejections = one.Ejections
		}
	}
	return all
}

// partition returns the partition of the worker.
func (r WorkerRecord) partition() events.Partition {
	return events.Partition{Model: *r.ModelName, Group: *r.RoutingGroup}
}

// records returns the workers of the partitions that want accepts (nil: all), sorted by
// partition and id.
func (s *Service) records(want func(events.Partition) bool) []WorkerRecord {
	up := map[uint64]bool{}
	for _, t := range s.models.Targets() {
		up[t.Key.Worker] = !t.Cordoned
	}
	waiting := s.partitions.list() // below without those that the fleet knows
	outliers, _ := s.models.Outliers()
	failures := failuresOf(outliers)
	records := []WorkerRecord{}
	add := func(r WorkerRecord) {
		if want == nil || want(r.partition()) {
			records = append(records, r)
		}
	}
	for _, status := range s.fleet.Workers() {
		w, registered := waiting[status.ID]
		delete(waiting, status.ID)
		record := s.record(status, w, registered, up[status.ID])
		record.Failures = failures[status.ID]
		add(record)
	}
	for _, w := range waiting {
		add(w.incomplete())
	}
	slices.SortFunc(records, func(a, b WorkerRecord) int {
		return cmp.Or(cmp.Compare(*a.ModelName, *b.ModelName), cmp.Compare(*a.RoutingGroup, *b.RoutingGroup), cmp.Compare(a.WorkerID, b.WorkerID))
	})
	return records
}

// specOf describes a worker that the router started or attached as a client would.
func (s *Service) specOf(status workers.Status) workerSpec {
	model, group, size := s.partitions.modelAmong(status.Models), events.DefaultGroup, status.Cache.BlockSize
	spec := workerSpec{ModelName: &model, RoutingGroup: &group, Endpoint: &status.URL, BlockSize: &size}
	if status.KVEvents != "" {
		spec.KVEventsEndpoint = &status.KVEvents
	}
	if status.Replay != "" {
		spec.ReplayEndpoint = &status.Replay
	}
	if n := uint32(len(status.Ranks)); n > 1 {
		spec.RankCount = &n
	}
	if d := status.Disagg; d != (kv.Disagg{}) {
		spec.Role, spec.Kind = &d.Role, &d.Kind
		if d.Bootstrap.Known() {
			spec.BootstrapHost, spec.BootstrapPort = &d.Bootstrap.Host, &d.Bootstrap.Port
		}
		if d.P2P.Known() {
			spec.P2PHost, spec.P2PPort = &d.P2P.Host, &d.P2P.Port
		}
	}
	return spec
}

// incomplete returns the record of a worker that the fleet does not know.
func (w registeredWorker) incomplete() WorkerRecord {
	return WorkerRecord{WorkerID: w.id, workerSpec: w.spec.shown(), Lifecycle: lifecycleIncomplete, Reasons: w.missing,
		State: workers.StateConnecting}
}

// record returns the record of a worker of the fleet, without its failures. by is its
// registration, if it is registered; up means that it may get requests.
func (s *Service) record(w workers.Status, by registeredWorker, registered, up bool) WorkerRecord {
	spec := by.spec.shown()
	if !registered {
		spec = s.specOf(w)
	}
	r := WorkerRecord{
		WorkerID: w.ID, Name: w.Name, workerSpec: spec, Lifecycle: LifecycleSchedulable,
		State: w.State, Engine: w.Engine, Cache: w.Cache, Predictions: w.Predictions, Speculation: w.Speculation,
		Exactness: w.Exactness, Cell: w.Cell,
		PID: w.PID, Restarts: w.Restarts, Generation: w.Generation,
	}
	for _, key := range w.Keys() {
		r.add(s.models.LoadOf(key))
		r.Blocks += s.models.Blocks(key)
	}
	r.TakesTokens = s.models.TakesTokens(w.ID, w.Generation)
	if !up {
		r.Lifecycle = LifecycleUnschedulable
		r.Reasons = []string{w.State}
		switch {
		case w.Cordon != "":
			r.Reasons = []string{string(w.Cordon)}
		case w.State == workers.StateReady:
			r.Reasons = []string{"cordoned"}
		}
		if w.LastError != "" {
			r.Reasons = append(r.Reasons, w.LastError)
		}
	}
	return r
}

// add adds the load of one rank.
func (r *WorkerRecord) add(load policy.Load) {
	r.InFlight += load.InFlight
	r.PrefillTokens += load.PrefillTokens
	if counts := load.Tiers.PullCounts(); counts != (policy.PullCounts{}) {
		if r.Pulls == nil {
			r.Pulls = map[string]int64{}
		}
		for result := policy.PullUnreported; int(result) < len(policy.PullResults); result++ {
			r.Pulls[policy.PullResults[result]] += counts.Results[result]
		}
	}
	r.RunningReqs += load.Running
	r.WaitingReqs += load.Waiting
	if usage := load.KVUsage; usage > r.KVCacheUsage && !math.IsInf(usage, 1) { // JSON has numbers only
		r.KVCacheUsage = usage
	}
}

// recordOf returns the record of one worker, without a look at all others.
func (s *Service) recordOf(id uint64) WorkerRecord {
	w, registered := s.partitions.get(id)
	status, known := s.fleet.Worker(id)
	if !known {
		if registered {
			return w.incomplete()
		}
		return WorkerRecord{WorkerID: id, Lifecycle: LifecycleUnschedulable}
	}
	up := false
	router := s.models.For(id).Router
	var failures []health.Record
	for _, t := range router.Ranks(id) {
		up = !t.Cordoned
		if record, ok := router.Health.Record(t.Key); ok {
			failures = append(failures, record)
		}
	}
	record := s.record(status, w, registered, up)
	record.Failures = failuresOf(failures)[id]
	return record
}

// inQuery reports whether a partition matches the query parameters model_name and
// routing_group.
func inQuery(c *gin.Context, of events.Partition) bool {
	model, byModel := c.GetQuery("model_name")
	group, byGroup := c.GetQuery("routing_group")
	return (!byModel || model == of.Model) && (!byGroup || group == of.Group)
}

func (s *Service) listWorkers(c *gin.Context) {
	c.JSON(http.StatusOK, s.records(func(of events.Partition) bool { return inQuery(c, of) }))
}

// addQuery is a worker to register.
type addQuery struct {
	ID *uint64 `json:"worker_id"`
	workerSpec
}

// addWorker registers a worker, or replaces its registration.
func (s *Service) addWorker(c *gin.Context, query addQuery) {
	if query.ID == nil {
		plainError(c, http.StatusUnprocessableEntity, "bad body: worker_id is missing")
		return
	}
	if Given(query.ModelName, "") == "" {
		own := s.partitions.model
		query.ModelName = &own
	}
	if Given(query.RoutingGroup, "") == "" {
		group := events.DefaultGroup
		query.RoutingGroup = &group
	}
	if !s.leadsElsewhere(c, query.Endpoint) {
		return
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	s.setWorker(c, http.StatusCreated, registeredWorker{id: *query.ID, spec: query.workerSpec})
}

// leadsElsewhere rejects an endpoint (nil: none) that leads back to this router, as far as
// a short probe shows. Not ok: an error response was sent.
func (s *Service) leadsElsewhere(c *gin.Context, endpoint *string) bool {
	if endpoint == nil {
		return true
	}
	url, err := kv.ParseURL(*endpoint)
	if err != nil || !s.fleet.LeadsBack(c.Request.Context(), url) {
		return true // setWorker reports a parse error
	}
	plainError(c, http.StatusBadRequest, "endpoint: "+url+
		" is an address of this router itself or leads back to it: give the address of the worker")
	return false
}

// patchWorker changes the given fields of a registered worker.
func (s *Service) patchWorker(c *gin.Context) {
	var patch workerSpec
	id, ok := workerID(c)
	if !ok || !body(c, &patch) || !s.leadsElsewhere(c, patch.Endpoint) {
		return
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	if w, ok := s.registeredAt(c, id); ok {
		w.spec = w.spec.patched(patch)
		s.setWorker(c, http.StatusOK, w)
	}
}

// deleteWorker removes a registered worker.
func (s *Service) deleteWorker(c *gin.Context) {
	id, ok := workerID(c)
	if !ok {
		return
	}
	s.changing.Lock()
	defer s.changing.Unlock()
	w, ok := s.registeredAt(c, id)
	if !ok {
		return
	}
	record := s.recordOf(id)
	s.unregister(id)
	record.workerSpec, record.Lifecycle, record.Reasons, record.State = w.spec.shown(), LifecycleUnschedulable, nil, workers.StateStopped
	c.JSON(http.StatusOK, record)
}

func workerID(c *gin.Context) (id uint64, ok bool) {
	id, err := strconv.ParseUint(c.Param("id"), 10, 64)
	if err != nil {
		plainError(c, http.StatusBadRequest, fmt.Sprintf("invalid worker id %q: give a whole number", c.Param("id")))
	}
	return id, err == nil
}

// registeredAt returns a registered worker. Not ok: an error response was sent.
func (s *Service) registeredAt(c *gin.Context, id uint64) (w registeredWorker, ok bool) {
	if w, ok = s.partitions.get(id); ok {
		return w, true
	}
	if _, known := s.fleet.Worker(id); known {
		plainError(c, http.StatusConflict, fmt.Sprintf("worker %d: %v", id, workers.ErrWorkerTaken))
	} else {
		plainError(c, http.StatusNotFound, fmt.Sprintf("worker %d not found", id))
	}
	return w, false
}

// setWorker registers a worker with the fleet if its spec is complete, and responds with
// its record; s.changing is held.
func (s *Service) setWorker(c *gin.Context, status int, w registeredWorker) {
	registration, missing, err := w.registration(s.settings)
	if err != nil {
		plainError(c, http.StatusBadRequest, err.Error())
		return
	}
	w.missing = missing
	if others := s.partitions.ranks(w.id); len(registration.Ranks) > 1 && others+len(registration.Ranks) > maxRanksTogether {
		plainError(c, http.StatusServiceUnavailable,
			fmt.Sprintf("data_parallel_size: other workers have %d ranks; the maximum for all workers with several ranks is %d", others,
				maxRanksTogether))
		return
	}
	if len(missing) > 0 {
		s.fleet.Unregister(w.id)
	} else {
		err = s.fleet.Register(c.Request.Context(), registration)
	}
	switch {
	case errors.Is(err, workers.ErrWorkerTaken):
		plainError(c, http.StatusConflict, err.Error())
		return
	case err != nil:
		plainError(c, http.StatusServiceUnavailable, err.Error())
		return
	}
	if !s.partitions.put(w) {
		s.fleet.Unregister(w.id)
		plainError(c, http.StatusServiceUnavailable, fmt.Sprintf("%d workers are registered, which is the maximum", maxRegistered))
		return
	}
	c.JSON(status, s.recordOf(w.id))
}
