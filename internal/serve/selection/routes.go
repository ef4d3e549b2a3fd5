package selection

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
)

// selectQuery is a request for a worker.
type selectQuery struct {
	promptQuery
	SelectionID    string         `json:"selection_id"`
	Override       *overrideQuery `json:"router_config_override"`
	ExpectedOutput uint32         `json:"expected_output_tokens"`
	PriorityJump   float64        `json:"priority_jump"` // seconds
	StrictPriority uint32         `json:"strict_priority"`
	Pinned         *workerQuery   `json:"pinned_worker"`
	Allowed        []uint64       `json:"allowed_worker_ids"`
}

// workerQuery names one worker rank.
type workerQuery struct {
	WorkerID uint64 `json:"worker_id"`
	DPRank   uint32 `json:"dp_rank"`
}

// overrideQuery is the JSON form of policy.Override.
type overrideQuery struct {
	OverlapScoreWeight *float64 `json:"overlap_score_weight"`
	OverlapScoreCredit *float64 `json:"overlap_score_credit"`
	PrefillLoadScale   *float64 `json:"prefill_load_scale"`
	RouterTemperature  *float64 `json:"router_temperature"`
	AssumeKVReuse      *bool    `json:"assume_kv_reuse"`
	TrackPrefillTokens *bool    `json:"track_prefill_tokens"`
}

// errOverride names a setting with an invalid value.
type errOverride struct{ name string }

func (e errOverride) Error() string {
	return fmt.Sprintf("router_config_override: %s must be finite and non-negative", e.name)
}

func (o *overrideQuery) override() (*policy.Override, error) {
	if o == nil {
		return nil, nil
	}
	for _, setting := range []struct {
		name  string
		value *float64
	}{
		{"overlap_score_weight", o.OverlapScoreWeight}, {"overlap_score_credit", o.OverlapScoreCredit},
		{"prefill_load_scale", o.PrefillLoadScale}, {"router_temperature", o.RouterTemperature},
	} {
		if v := setting.value; v != nil && (!(*v >= 0) || math.IsInf(*v, 1)) {
			return nil, errOverride{setting.name}
		}
	}
	converted := policy.Override(*o)
	return &converted, nil
}

// request validates the query and converts it to a router.Request.
func (q selectQuery) request() (router.Request, error) {
	request, err := q.promptQuery.request()
	if err == nil {
		err = tokensWithin("expected_output_tokens", int(q.ExpectedOutput))
	}
	if err != nil {
		return request, err
	}
	if request.Override, err = q.Override.override(); err != nil {
		return request, err
	}
	if q.Pinned != nil {
		if q.Allowed != nil && !slices.Contains(q.Allowed, q.Pinned.WorkerID) {
			return request, fmt.Errorf("pinned worker %d is not in allowed worker set", q.Pinned.WorkerID)
		}
		request.Pinned = &kv.WorkerKey{Worker: q.Pinned.WorkerID, Rank: q.Pinned.DPRank}
	}
	request.ExpectedOutput, request.PriorityJump, request.StrictPriority = int(q.ExpectedOutput), max(0, q.PriorityJump), q.StrictPriority
	request.Allowed = q.Allowed
	return request, nil
}

// selectAnswer is a selected worker; the fields before ModelName are only in some
// responses.
type selectAnswer struct {
	SelectionID    string   `json:"selection_id,omitempty"`
	SequenceHashes *[]int64 `json:"sequence_hashes,omitempty"` // of a booked prompt
	ISLTokens      *int     `json:"isl_tokens,omitempty"`
	TrackPrefill   *bool    `json:"track_prefill_tokens,omitempty"`

	ModelName              string        `json:"model_name"`
	RoutingGroup           string        `json:"routing_group"`
	WorkerID               uint64        `json:"worker_id"`
	DPRank                 uint32        `json:"dp_rank"`
	Endpoint               string        `json:"endpoint"`
	BlockSize              int           `json:"block_size"`
	Overlap                overlapAnswer `json:"overlap"`
	EffectivePrefillTokens int           `json:"effective_prefill_tokens"`
	PotentialDecodeBlocks  int           `json:"potential_decode_blocks"`
}

// overlapAnswer has the cached prompt tokens of the selected worker: DP of all its ranks on
// the device, the others of its best rank. CPU includes the device's, Disk both.
type overlapAnswer struct {
	LongestMatched int            `json:"longest_matched"`
	GPU            int            `json:"gpu"`
	DP             map[uint32]int `json:"dp"`
	CPU            int            `json:"cpu"`
	Disk           int            `json:"disk"`
}

// add adds what a rank has.
func (a *overlapAnswer) add(o router.Overlap, blockSize int) {
	device := o.Blocks * blockSize
	host := device + int(o.Staged.Host)*blockSize
	disk := host + int(o.Staged.Disk+o.Staged.External)*blockSize
	a.DP[o.Worker.Rank] = device
	a.GPU, a.CPU, a.Disk = max(a.GPU, device), max(a.CPU, host), max(a.Disk, disk)
	a.LongestMatched = a.Disk
}

func (s *Service) selectAnswer(of events.Partition, id string, request router.Request, d router.Decision) selectAnswer {
	size := d.BlockSize
	overlap := overlapAnswer{DP: map[uint32]int{}}
	selected := router.Overlap{Worker: d.Target.Key, Blocks: d.MatchedBlocks}
	if d.Target.Ranks > 1 || d.MatchedLower != (kv.LowerBlocks{}) {
		overlaps, unit, _ := s.router(of).Overlaps(request)
		for _, o := range overlaps {
			if o.Worker == d.Target.Key {
				selected.Staged = o.Staged
			} else if o.Worker.Worker == d.Target.Key.Worker {
				overlap.add(o, unit)
			}
		}
	}
	overlap.add(selected, size)
	partial := 0 // the last block, if it is not full, is in use as well
	if d.Tokens%size != 0 {
		partial = 1
	}
	return selectAnswer{
		SelectionID: id, ModelName: s.modelOf(of, d.Target), RoutingGroup: of.Group,
		WorkerID: d.Target.Key.Worker, DPRank: d.Target.Key.Rank, Endpoint: d.Target.URL, BlockSize: size,
		Overlap:                overlap,
		EffectivePrefillTokens: d.EffectivePrefillTokens, PotentialDecodeBlocks: d.PotentialDecodeBlocks + partial,
	}
}

// modelOf returns the model that serves a request of the partition on a target.
func (s *Service) modelOf(of events.Partition, t kv.Target) string {
	if of.Model == "" && len(t.Models) > 0 {
		return t.Models[0]
	}
	if of.Model == "" {
		return s.partitions.model
	}
	return of.Model
}

// queryError responds to an invalid query.
func queryError(c *gin.Context, err error) {
	status := http.StatusBadRequest
	if errors.As(err, &errOverride{}) {
		status = http.StatusUnprocessableEntity
	}
	plainError(c, status, err.Error())
}

// withSelection returns a handler of requests for a worker. id is that of the selection;
// empty: it has none.
func (s *Service) withSelection(handle func(c *gin.Context, of events.Partition, id string, request router.Request)) gin.HandlerFunc {
	return withBody(func(c *gin.Context, query selectQuery) {
		request, err := query.request()
		if err != nil {
			queryError(c, err)
			return
		}
		of := query.partition()
		handle(c, of, query.SelectionID, s.within(request, of))
	})
}

// selectWorker selects a worker and reserves nothing. A selection with an id can be
// reserved later without repeating the prompt.
func (s *Service) selectWorker(c *gin.Context, of events.Partition, id string, request router.Request) {
	if len(id) > maxReservationID {
		plainError(c, http.StatusBadRequest, errLongID.Error())
		return
	}
	request.QueryOnly = true
	decision, err := s.router(of).Route(c.Request.Context(), request)
	if err != nil {
		s.routingError(c, of, err)
		return
	}
	sized := request.Media == nil || int(decision.Target.BlockSize) == decision.BlockSize
	if id != "" && request.Tokens != nil && sized { // hashes are smaller than tokens
		request.BlockSize = int(decision.Target.BlockSize)
		request.Local = request.Hashes(nil, request.BlockSize)
		request.NumTokens, request.Tokens, request.Media = len(request.Tokens), nil, nil
	}
	if id != "" {
		request.QueryOnly, request.Pinned, request.Allowed = false, nil, nil
		cached := decision.Tokens - decision.EffectivePrefillTokens
		request.Cached = &cached
		s.pending.put(pendingSelection{key: pendingKey{of, id}, request: request, worker: decision.Target.Key})
	}
	c.JSON(http.StatusOK, s.selectAnswer(of, id, request, decision))
}

// selectAndReserve selects a worker and books the request on it in one step.
func (s *Service) selectAndReserve(c *gin.Context, of events.Partition, id string, request router.Request) {
	if id == "" {
		id = rand.Text()
	}
	decision, ok := s.routeReserved(c, of, id, request)
	if !ok {
		return
	}
	answer := s.selectAnswer(of, id, request, decision)
	sequence := make([]int64, len(decision.Sequence))
	for i, h := range decision.Sequence {
		sequence[i] = int64(h)
	}
	track := s.settings.TrackPrefillTokens
	if request.Override != nil {
		track = Given(request.Override.TrackPrefillTokens, track)
	}
	answer.SequenceHashes, answer.ISLTokens, answer.TrackPrefill = &sequence, &decision.Tokens, &track
	c.JSON(http.StatusOK, answer)
}

// routeReserved routes a request and stores its booking under the id. Not ok: an error
// response was sent.
func (s *Service) routeReserved(c *gin.Context, of events.Partition, id string, request router.Request) (router.Decision, bool) {
	if !s.claimed(c, of, id, &request) {
		return router.Decision{}, false
	}
	request.ID = id
	decision, err := s.router(of).Route(c.Request.Context(), request)
	if err == nil && c.Request.Context().Err() != nil { // the client that would release it is gone
		decision.Booking.End()
		err = c.Request.Context().Err()
	}
	if err != nil {
		s.reserved.release(id)
		s.routingError(c, of, err)
		return router.Decision{}, false
	}
	s.reserved.install(id, decision.Booking)
	return decision, true
}

// claimed claims an id for a request. Not ok: it is taken, and an error response was sent.
func (s *Service) claimed(c *gin.Context, of events.Partition, id string, request *router.Request) bool {
	blocks := max(len(request.Local), len(request.Tokens)/s.router(of).Unit())
	err := s.reserved.claim(id, web.Address(c), blocks)
	switch {
	case err == nil:
		return true
	case errors.Is(err, errLongID):
		plainError(c, http.StatusBadRequest, err.Error())
	case errors.Is(err, errTooMany), errors.Is(err, errTooManyBlocks):
		plainError(c, http.StatusServiceUnavailable, err.Error())
	default:
		plainError(c, http.StatusConflict, err.Error())
	}
	return false
}

// reserveQuery requests a booking: of the selection with that id, or, with worker_id, of
// a prompt on that worker.
type reserveQuery struct {
	promptQuery
	SelectionID     string         `json:"selection_id"`
	WorkerID        *uint64        `json:"worker_id"`
	DPRank          uint32         `json:"dp_rank"`
	Override        *overrideQuery `json:"router_config_override"`
	ExpectedOutput  uint32         `json:"expected_output_tokens"`
	EffectiveTokens *int           `json:"effective_prefill_tokens"`
	TrackPrefill    *bool          `json:"track_prefill_tokens"`
}

// request validates the query and converts it to a router.Request. The client gives the
// number of prompt tokens to compute; by default none count.
func (q reserveQuery) request() (router.Request, error) {
	request, err := selectQuery{promptQuery: q.promptQuery, Override: q.Override, ExpectedOutput: q.ExpectedOutput}.request()
	if err != nil {
		return request, err
	}
	if request.Override == nil {
		request.Override = &policy.Override{}
	}
	tokens := max(request.NumTokens, len(request.Tokens))
	effective := Given(q.EffectiveTokens, 0)
	if effective < 0 || effective > tokens {
		return request, fmt.Errorf("effective_prefill_tokens (%d) must not exceed isl_tokens (%d)", effective, tokens)
	}
	cached := tokens - effective
	request.Cached = &cached
	track := q.EffectiveTokens != nil && Given(q.TrackPrefill, true)
	request.Override.TrackPrefillTokens = &track
	return request, nil
}

// reserve books a request without a selection.
func (s *Service) reserve(c *gin.Context, query reserveQuery) {
	if query.SelectionID == "" {
		plainError(c, http.StatusUnprocessableEntity, "bad body: selection_id is missing")
		return
	}
	of := query.partition()
	pending := pendingKey{of, query.SelectionID}
	var request router.Request
	var worker kv.WorkerKey
	if query.WorkerID != nil {
		s.pending.drop(pending)
		var err error
		if request, err = query.request(); err != nil {
			queryError(c, err)
			return
		}
		request, worker = s.within(request, of), kv.WorkerKey{Worker: *query.WorkerID, Rank: query.DPRank}
		request.Allowed = nil
	} else {
		selection, ok := s.pending.get(pending)
		if !ok {
			plainError(c, http.StatusNotFound, errNoPending(pending).Error())
			return
		}
		request, worker = selection.request, selection.worker
	}
	targets := s.targets(of)
	at := slices.IndexFunc(targets, func(t kv.Target) bool { return t.Key == worker })
	switch {
	case len(targets) == 0:
		plainError(c, http.StatusServiceUnavailable, noSchedulable(of))
		return
	case at < 0 && !slices.ContainsFunc(targets, func(t kv.Target) bool { return t.Key.Worker == worker.Worker }):
		plainError(c, http.StatusNotFound, fmt.Sprintf("schedulable worker %d not found for %s", worker.Worker, of))
		return
	case at < 0:
		plainError(c, http.StatusNotFound, fmt.Sprintf("schedulable worker %d (dp_rank %d) not found for %s", worker.Worker, worker.Rank, of))
		return
	}
	if !s.claimed(c, of, query.SelectionID, &request) {
		return
	}
	request.ID = query.SelectionID
	booking, err := s.router(of).Book(request, worker)
	if err != nil {
		s.reserved.release(query.SelectionID)
		s.routingError(c, of, err)
		return
	}
	s.reserved.install(query.SelectionID, booking)
	s.pending.drop(pending)
	c.JSON(http.StatusCreated, gin.H{
		"selection_id": query.SelectionID, "model_name": s.modelOf(of, targets[at]), "routing_group": of.Group,
		"worker_id": worker.Worker, "dp_rank": worker.Rank, "endpoint": targets[at].URL,
	})
}

// booking returns the booking of a request. Nil: there is none, and a response was sent:
// a booking of a peer router is changed there if kind, the kind of the change, is not
// empty.
func (s *Service) booking(c *gin.Context, find func(id string) *router.Booking, kind string) *router.Booking {
	id := c.Param("id")
	booking := find(id)
	switch {
	case booking != nil:
	case kind != "" && s.mesh != nil && s.mesh.Pass(kind, id):
		statusOK(c)
	default:
		plainError(c, http.StatusNotFound, fmt.Sprintf("reservation %s not found", id))
	}
	return booking
}

func (s *Service) prefillComplete(c *gin.Context) {
	if booking := s.booking(c, s.reserved.get, router.ChangePrefill); booking != nil {
		booking.FirstToken()
		statusOK(c)
	}
}

// outputQuery is a block of an answer.
type outputQuery struct {
	DecayFraction *float64 `json:"decay_fraction"`
}

func (s *Service) outputBlock(c *gin.Context, query outputQuery) {
	if f := query.DecayFraction; f != nil && !(*f >= 0 && *f <= 1) {
		plainError(c, http.StatusBadRequest, "decay_fraction must be between 0.0 and 1.0")
		return
	}
	if booking := s.booking(c, s.reserved.get, ""); booking != nil {
		booking.OutputBlock(query.DecayFraction)
		statusOK(c)
	}
}

func (s *Service) free(c *gin.Context) {
	if booking := s.booking(c, s.reserved.take, router.ChangeFree); booking != nil {
		booking.Free()
		statusOK(c)
	}
}

// workerLoads is the load of a worker rank.
type workerLoads struct {
	WorkerID               uint64 `json:"worker_id"`
	DPRank                 uint32 `json:"dp_rank"`
	PotentialPrefillTokens int    `json:"potential_prefill_tokens"`
	PotentialDecodeBlocks  int    `json:"potential_decode_blocks"`
	ActiveRequests         int    `json:"active_requests"`
}

func loadAnswer(l router.WorkerLoad) workerLoads {
	return workerLoads{l.Key.Worker, l.Key.Rank, l.PotentialPrefillTokens, l.PotentialDecodeBlocks, l.ActiveRequests}
}

// loads returns the load of every worker by partition. All partitions of a model share
// its queue; each shows the whole queue.
func (s *Service) loads(c *gin.Context) {
	of := map[uint64]events.Partition{}
	order := []events.Partition{}
	for _, r := range s.records(func(of events.Partition) bool { return inQuery(c, of) }) {
		if r.Lifecycle == lifecycleIncomplete {
			continue
		}
		of[r.WorkerID] = r.partition()
		if !slices.Contains(order, r.partition()) {
			order = append(order, r.partition())
		}
	}
	byPartition := map[events.Partition][]workerLoads{}
	for _, load := range s.models.Loads() {
		if p, ok := of[load.Key.Worker]; ok {
			byPartition[p] = append(byPartition[p], loadAnswer(load))
		}
	}
	answer := []gin.H{}
	for _, p := range order {
		loads := byPartition[p]
		if loads == nil {
			loads = []workerLoads{}
		}
		requests, tokens := s.router(p).Admission.QueueDepth()
		answer = append(answer, gin.H{"model_name": p.Model, "routing_group": p.Group, "loads": loads, "pending_count": requests,
			"pending_isl_tokens": tokens})
	}
	c.JSON(http.StatusOK, answer)
}

// potentialLoads returns the load that every worker would have with a prompt.
func (s *Service) potentialLoads(c *gin.Context, of events.Partition, _ string, request router.Request) {
	loads := s.potential(of, request)
	if len(loads) == 0 && !s.schedulable(of) {
		plainError(c, http.StatusServiceUnavailable, noSchedulable(of))
		return
	}
	c.JSON(http.StatusOK, loads)
}

func (s *Service) potential(of events.Partition, request router.Request) []workerLoads {
	loads := []workerLoads{}
	for _, load := range s.router(of).PotentialLoads(request) {
		loads = append(loads, loadAnswer(load))
	}
	return loads
}

// routeQuery is a request to /route, KvRouter's own contract.
type routeQuery struct {
	selectQuery
	Method    string   `json:"method"`
	RequestID string   `json:"request_id"`
	Tokens    []uint32 `json:"tokens"`
}

// route serves KvRouter's contract: new selects and books a worker, mark_prefill and
// mark_free report the progress of the request. Its id is request_id, else the header
// X-Request-Id, else a random one for a new request.
func (s *Service) route(c *gin.Context, query routeQuery) {
	id := cmp.Or(query.RequestID, c.GetHeader("X-Request-Id"))
	switch query.Method {
	case "new", "potential_loads":
		query.TokenIDs = query.Tokens
		request, err := query.request()
		if query.Tokens == nil {
			err = fmt.Errorf("method %s needs tokens, a list of token ids", query.Method)
		}
		if err != nil {
			queryError(c, err)
			return
		}
		of := query.partition()
		request = s.within(request, of)
		if query.Method == "new" {
			s.routeNew(c, of, id, request)
			return
		}
		requests, tokens := s.router(of).Admission.QueueDepth()
		c.JSON(http.StatusOK, gin.H{"method": "potential_loads", "loads": s.potential(of, request), "pending_count": requests,
			"pending_isl_tokens": tokens})
	case "mark_prefill":
		booking := s.reserved.get(id)
		if booking != nil {
			booking.FirstToken()
		}
		c.JSON(http.StatusOK, gin.H{"method": "prefill_marked", "success": booking != nil})
	case "mark_free": // succeeds for a request that is already free
		if booking := s.reserved.take(id); booking != nil {
			booking.Free()
		}
		c.JSON(http.StatusOK, gin.H{"method": "free_marked", "success": true})
	default:
		plainError(c, http.StatusBadRequest, fmt.Sprintf("unknown method %q: use new, mark_prefill, mark_free or potential_loads", query.Method))
	}
}

func (s *Service) routeNew(c *gin.Context, of events.Partition, id string, request router.Request) {
	if id == "" {
		id = rand.Text()
	}
	if decision, ok := s.routeReserved(c, of, id, request); ok {
		c.JSON(http.StatusOK, gin.H{
			"method": "new", "request_id": id, "worker_id": decision.Target.Key.Worker, "dp_rank": decision.Target.Key.Rank,
			"overlap_blocks": decision.MatchedBlocks,
		})
	}
}

// events returns KV events of a worker to a peer router that has missed them.
func (s *Service) events(c *gin.Context) {
	var worker, rank, start, end, check *uint64
	for _, parameter := range []struct {
		name string
		bits int
		into **uint64
	}{{"worker_id", 64, &worker}, {"dp_rank", 32, &rank}, {"start", 64, &start}, {"end", 64, &end}, {"check", 64, &check}} {
		text, given := c.GetQuery(parameter.name)
		if !given {
			continue
		}
		n, err := strconv.ParseUint(text, 10, parameter.bits)
		if err != nil {
			plainError(c, http.StatusBadRequest, fmt.Sprintf("%s=%.40s: it must be a whole number of at most %d bits", parameter.name, text,
				parameter.bits))
			return
		}
		*parameter.into = &n
	}
	var key kv.WorkerKey
	switch {
	case worker == nil:
		plainError(c, http.StatusBadRequest, "worker_id is missing")
		return
	case start != nil && end != nil && *end < *start:
		plainError(c, http.StatusBadRequest, fmt.Sprintf("invalid range: end %d is before start %d", *end, *start))
		return
	case rank != nil:
		key.Rank = uint32(*rank)
	}
	key.Worker = *worker
	log := s.history(key)
	if log == nil {
		plainError(c, http.StatusNotFound, fmt.Sprintf("this router does not follow KV events of worker %d rank %d", key.Worker, key.Rank))
		return
	}
	s.writeDump(c, func(to io.Writer) error { // the response may have all blocks
		answer := log.Query(start, end, check)
		return answer.Write(to)
	})
}
