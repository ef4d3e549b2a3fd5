// Package selection serves the router port. Clients of this port get the routing
// decision and forward the request themselves. The routes and names are those of
// Dynamo's standalone selection service.
package selection

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/models"
	"kvrouter/internal/replica"
	"kvrouter/internal/router"
	"kvrouter/internal/web"
	"kvrouter/internal/workers"
)

// SelectionBodyLimit bounds a request body on the router port, in bytes.
const SelectionBodyLimit = 8 << 20

// Bounds of dumps, each of which takes about 60 bytes a block.
const (
	dumpTime = 5 * time.Minute  // longest that a client may take for one
	maxDumps = 2                // that are written at a time
	dumpWait = 10 * time.Second // longest that a further one waits for its turn
)

// Service is the router port: the routing decision without the proxy, in the
// routes and names of Dynamo's standalone selection service.
type Service struct {
	settings Settings
	models   *models.Set
	fleet    *workers.Fleet
	log      *slog.Logger

	Mesh *replica.Mesh // with other routers; nil: none. Set it before Handler's first request

	history func(kv.WorkerKey) *events.Log // of a rank's KV events; nil: they are not followed

	reserved  *reservations
	pending   *pendingSelections
	decisions openDecisions
	dumps     chan struct{} // holds a token for each dump that is being written
	draining  atomic.Bool

	changing   sync.Mutex // held while a worker is changed
	mu         sync.Mutex // guards all below
	registered map[uint64]registeredWorker
	recovered  map[uint64]events.Partition // of workers in a peer's dump
}

// Settings are the settings of the router port.
type Settings struct {
	Host               string   // address that it listens on; empty: not known
	APIKey             []string // bearer keys that it asks for; none: no key
	ServedModelName    string   // empty: what the workers say
	BlockSize          int      // tokens
	KVEvents           bool     // KV events are followed
	TrackPrefillTokens bool     // --router-track-prefill-tokens
	CountsPasses       bool     // --router-queue-threshold is set, which counts in passes of a worker
	Hop                web.Hop  // this router, in the Via of what it sends
}

// New returns the router port over the given models and fleet.
func New(settings Settings, models *models.Set, fleet *workers.Fleet, log *slog.Logger) *Service {
	return &Service{
		settings: settings, models: models, fleet: fleet, log: log, history: fleet.History,
		reserved: NewReservations(), pending: newPendingSelections(),
		decisions: openDecisions{byID: map[string]*openDecision{}}, dumps: make(chan struct{}, maxDumps), registered: map[uint64]registeredWorker{},
	}
}

// Handler returns the routes of the router port.
func (s *Service) Handler() http.Handler {
	engine := web.NewEngine(s.log)
	engine.Use(s.settings.Hop.Refuse)
	engine.NoRoute(func(c *gin.Context) { plainError(c, http.StatusNotFound, "route not found") })
	engine.NoMethod(func(c *gin.Context) { plainError(c, http.StatusMethodNotAllowed, "method not allowed") })
	engine.GET("/health", statusOK)
	guarded := engine.Group("/", Guards(s.settings.Host, s.settings.APIKey, "missing or unknown API key", plainError)...)
	guarded.GET("/ready", s.ready)
	guarded.GET("/workers", s.listWorkers)
	guarded.POST("/workers", s.addWorker)
	guarded.PATCH("/workers/:id", s.patchWorker)
	guarded.DELETE("/workers/:id", s.deleteWorker)
	guarded.POST("/find_best_worker", s.findBestWorker)
	guarded.POST("/find_worker", s.findWorker)
	guarded.POST("/feedback", s.feedback)
	guarded.POST("/overlap_scores", s.overlapScores)
	guarded.POST("/select", s.selectWorker)
	guarded.POST("/select_and_reserve", s.selectAndReserve)
	guarded.POST("/reservations", s.reserve)
	guarded.POST("/reservations/:id/prefill_complete", s.prefillComplete)
	guarded.POST("/reservations/:id/output_block", s.outputBlock)
	guarded.DELETE("/reservations/:id", s.free)
	guarded.GET("/decisions", s.explainDecisions)
	guarded.GET("/loads", s.loads)
	guarded.POST("/potential_loads", s.potentialLoads)
	guarded.POST("/route", s.route)
	guarded.GET("/dump", s.dump)
	guarded.GET("/events", s.events)
	guarded.POST("/replica_sync/register_peer", s.registerPeer)
	guarded.POST("/replica_sync/deregister_peer", s.deregisterPeer)
	guarded.GET("/replica_sync/peers", s.listPeers)
	s.managed(engine, guarded)
	return engine
}

// Guards are what a request must pass that changes or tells how is routed: no page
// of another site sent it, it has one of the keys, if there are any, and its body
// says that it is JSON. host is the port's address, whose begins the refusal
// without a key; fail writes refusals.
func Guards(host string, keys []string, whose string, fail func(*gin.Context, int, string)) []gin.HandlerFunc {
	return []gin.HandlerFunc{web.OwnPages(host, len(keys) > 0, fail), web.RequireKey(keys, whose, fail), web.WantJSON(fail)}
}

// Drain makes /ready fail, so that balancers in front send no more requests.
func (s *Service) Drain() { s.draining.Store(true) }

// plainError answers with the error shape of the router port.
func plainError(c *gin.Context, status int, message string) {
	c.JSON(status, gin.H{"error": message})
}

func statusOK(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"status": "ok"}) }

// routingError answers a request that the Router has refused.
func (s *Service) routingError(c *gin.Context, of events.Partition, err error) {
	var reserved errReserved
	switch {
	case errors.As(err, &reserved), errors.Is(err, router.ErrDuplicate):
		plainError(c, http.StatusConflict, err.Error())
	case errors.Is(err, router.ErrUnknownWorker):
		plainError(c, http.StatusNotFound, err.Error())
	case errors.Is(err, router.ErrQueueFull):
		plainError(c, web.StatusOverloaded, err.Error())
	case errors.Is(err, router.ErrNoWorker) && !s.schedulable(of):
		plainError(c, http.StatusServiceUnavailable, noSchedulable(of))
	case errors.Is(err, router.ErrNoWorker):
		plainError(c, http.StatusServiceUnavailable, "no endpoints available to route work")
	default:
		plainError(c, http.StatusServiceUnavailable, err.Error())
	}
}

func noSchedulable(of events.Partition) string { return "no schedulable workers for " + of.String() }

// body reads a request's JSON into query. Not ok: it has been answered.
func body(c *gin.Context, query any) (ok bool) {
	text, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, SelectionBodyLimit))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		plainError(c, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
		return false
	}
	if err == nil {
		err = json.Unmarshal(text, query)
	}
	switch {
	case err == nil:
		return true
	case errors.As(err, new(*json.UnmarshalTypeError)):
		plainError(c, http.StatusUnprocessableEntity, "bad body: "+fieldError(err).Error())
	default:
		plainError(c, http.StatusBadRequest, "bad body: "+err.Error())
	}
	return false
}

// fieldError names the field of a body that has the wrong type, if that is err.
func fieldError(err error) error {
	var wrongType *json.UnmarshalTypeError
	if !errors.As(err, &wrongType) {
		return err
	}
	field := wrongType.Field[strings.LastIndexByte(wrongType.Field, '.')+1:]
	if field == "" {
		field = "it"
	}
	return fmt.Errorf("%s cannot be a JSON %s", field, wrongType.Value)
}

// promptQuery is a prompt in one of the forms that the routes take, and whose
// workers it is for.
type promptQuery struct {
	ModelName      string        `json:"model_name"`
	RoutingGroup   string        `json:"routing_group"`
	TokenIDs       []uint32      `json:"token_ids"`
	LocalHashes    []json.Number `json:"local_hashes"` // with num_tokens
	NumTokens      *int          `json:"num_tokens"`
	BlockHashes    []json.Number `json:"block_hashes"` // the same, with sequence_hashes and isl_tokens
	SequenceHashes []json.Number `json:"sequence_hashes"`
	ISLTokens      *int          `json:"isl_tokens"`
	LoRA           string        `json:"lora_name"`
	Salt           string        `json:"cache_salt"`
	MMInfos        []*mmInfo     `json:"block_mm_infos"` // of token_ids, block by block
}

// request checks the query and turns it into the router's form.
func (q promptQuery) request() (router.Request, error) {
	switch {
	case q.TokenIDs != nil:
		media, err := mediaWords(q.MMInfos)
		return router.Request{Tokens: q.TokenIDs, LoRA: q.LoRA, Salt: q.Salt, Media: media}, err
	case q.BlockHashes != nil:
		return q.hashedRequest()
	case q.LocalHashes == nil:
		return router.Request{}, errors.New("block_hashes is required without token_ids")
	case q.NumTokens == nil || *q.NumTokens <= 0:
		return router.Request{}, errors.New("num_tokens must be a positive number")
	}
	if err := tokensWithin("num_tokens", *q.NumTokens); err != nil {
		return router.Request{}, err
	}
	local, err := parseHashes("local_hashes", q.LocalHashes)
	return router.Request{Local: local, NumTokens: *q.NumTokens}, err
}

// tokensWithin refuses a number of tokens that no prompt and no answer has.
func tokensWithin(field string, n int) error {
	if n > kv.MaxTokens {
		return fmt.Errorf("%s is %d: it must be at most %d", field, n, kv.MaxTokens)
	}
	return nil
}

// hashedRequest is the form in which a client tells hashes in place of tokens.
func (q promptQuery) hashedRequest() (router.Request, error) {
	switch {
	case q.SequenceHashes == nil:
		return router.Request{}, errors.New("sequence_hashes is required without token_ids")
	case q.ISLTokens == nil:
		return router.Request{}, errors.New("isl_tokens is required without token_ids")
	case *q.ISLTokens <= 0:
		return router.Request{}, errors.New("isl_tokens must be greater than 0")
	case len(q.BlockHashes) != len(q.SequenceHashes):
		return router.Request{}, fmt.Errorf("block_hashes length %d must match sequence_hashes length %d", len(q.BlockHashes), len(q.SequenceHashes))
	}
	if err := tokensWithin("isl_tokens", *q.ISLTokens); err != nil {
		return router.Request{}, err
	}
	local, err := parseHashes("block_hashes", q.BlockHashes)
	if err != nil {
		return router.Request{}, err
	}
	sequence, err := parseHashes("sequence_hashes", q.SequenceHashes)
	return router.Request{Local: local, Sequence: sequence, NumTokens: *q.ISLTokens}, err
}

// partition is what the query is for.
func (q promptQuery) partition() events.Partition {
	if q.RoutingGroup == "" {
		return events.Partition{Model: q.ModelName, Group: events.DefaultGroup}
	}
	return events.Partition{Model: q.ModelName, Group: q.RoutingGroup}
}

// ownModel is the model of workers that name none.
func (s *Service) ownModel() string {
	if s.settings.ServedModelName == "" {
		return events.DefaultModel
	}
	return s.settings.ServedModelName
}

// router decides for the workers of a partition: those of its model, which without a name
// is the default one.
func (s *Service) router(of events.Partition) *router.Router {
	m, _ := s.models.Of(of.Model)
	return m.Router
}

// within restricts a request to the workers of a partition.
func (s *Service) within(request router.Request, of events.Partition) router.Request {
	request.Model = of.Model
	if request.LoRA == "" && of.Model != "" {
		request.LoRA, _ = s.router(of).Adapter(of.Model)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	groups := of.Group != events.DefaultGroup
	for _, w := range s.registered {
		groups = groups || w.partition().Group != events.DefaultGroup
	}
	if !groups {
		return request
	}
	allowed := []uint64{}
	for _, t := range s.router(of).Targets() {
		given := request.Allowed == nil
		for _, id := range request.Allowed {
			given = given || id == t.Key.Worker
		}
		if given && s.groupOf(t.Key.Worker) == of.Group {
			allowed = append(allowed, t.Key.Worker)
		}
	}
	request.Allowed = allowed
	return request
}

// groupOf returns a worker's routing group; s.mu is held.
func (s *Service) groupOf(worker uint64) string {
	if w, ok := s.registered[worker]; ok {
		return w.partition().Group
	}
	return events.DefaultGroup
}

// schedulable tells whether the partition has a worker that is up.
func (s *Service) schedulable(of events.Partition) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.router(of).Has(func(t *kv.Target) bool {
		return !t.Resting && t.Serves(of.Model) && s.groupOf(t.Key.Worker) == of.Group
	})
}

// targets returns the workers of a partition that are up, by key.
func (s *Service) targets(of events.Partition) (targets []kv.Target) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, t := range s.router(of).Targets() {
		if t.Serves(of.Model) && s.groupOf(t.Key.Worker) == of.Group {
			targets = append(targets, t)
		}
	}
	return targets
}

// prompt reads the prompt that a request is about, of any model and group; not
// ok: it has been answered.
func (s *Service) prompt(c *gin.Context) (query promptQuery, request router.Request, ok bool) {
	if !body(c, &query) {
		return query, router.Request{}, false
	}
	request, err := query.request()
	if err != nil {
		plainError(c, http.StatusBadRequest, err.Error())
		return query, router.Request{}, false
	}
	return query, request, true
}

// ready tells whether any worker may be routed to.
func (s *Service) ready(c *gin.Context) {
	records := s.records(nil)
	n := 0
	for _, r := range records {
		if r.Lifecycle == LifecycleSchedulable {
			n++
		}
	}
	status := http.StatusOK
	if n == 0 || s.draining.Load() {
		status = http.StatusServiceUnavailable
	}
	c.JSON(status, gin.H{"ready": status == http.StatusOK, "schedulable_workers": n, "workers": records})
}

// findBestWorker chooses a worker for a client that forwards its request
// itself. Since such a client does not tell when the request ends, nothing is
// booked; the worker counts as one request longer until it publishes its load.
func (s *Service) findBestWorker(c *gin.Context) {
	query, request, ok := s.prompt(c)
	if !ok {
		return
	}
	request.ChooseOnly = true
	decision, err := s.router(query.partition()).Route(c.Request.Context(), s.within(request, query.partition()))
	if err != nil {
		s.routingError(c, query.partition(), err)
		return
	}
	c.JSON(http.StatusOK, gin.H{"worker_id": decision.Target.Key.Worker, "dp_rank": decision.Target.Key.Rank, "overlap_tokens": decision.OverlapTokens})
}

// overlapScores tells what each worker holds of a prompt, choosing none.
func (s *Service) overlapScores(c *gin.Context) {
	query, request, ok := s.prompt(c)
	if !ok {
		return
	}
	of := query.partition()
	targets := s.targets(of)
	if len(targets) == 0 {
		plainError(c, http.StatusServiceUnavailable, noSchedulable(of))
		return
	}
	overlaps, blocks := s.router(of).Overlaps(request)
	held := map[kv.WorkerKey]int{}
	for _, o := range overlaps {
		held[o.Worker] = o.Blocks
	}
	workers := []gin.H{}
	for _, t := range targets {
		workers = append(workers, gin.H{"worker_id": t.Key.Worker, "dp_rank": t.Key.Rank, "device_blocks": held[t.Key]})
	}
	c.JSON(http.StatusOK, gin.H{"block_size": s.router(of).BlockSize(), "num_blocks": blocks, "workers": workers})
}

// dump streams the whole index of the default model as store events from which another
// router can fill its own.
func (s *Service) dump(c *gin.Context) {
	s.writeDump(c, func(to io.Writer) error {
		return events.WriteDump(to, s.models.Index(), s.models.Default().Router.BlockSize(), s.dumpParts())
	})
}

// writeDump answers with what write writes, once it is its turn.
func (s *Service) writeDump(c *gin.Context, write func(to io.Writer) error) {
	wait := time.NewTimer(dumpWait)
	defer wait.Stop()
	select {
	case s.dumps <- struct{}{}:
		defer func() { <-s.dumps }()
	case <-c.Request.Context().Done():
		return
	case <-wait.C:
		c.Header("Retry-After", "1")
		plainError(c, http.StatusServiceUnavailable, fmt.Sprintf("%d dumps are being written: try again in a moment", maxDumps))
		return
	}
	http.NewResponseController(c.Writer).SetWriteDeadline(time.Now().Add(dumpTime))
	c.Header("Content-Type", "application/json")
	if err := write(c.Writer); err != nil {
		s.log.Debug("dump broken off", "error", err)
	}
}

// dumpParts sorts what the index knows into partitions.
func (s *Service) dumpParts() []events.DumpPart {
	own := events.Partition{Model: s.ownModel(), Group: events.DefaultGroup}
	parts := []events.DumpPart{{Name: own.DumpName()}}
	at := map[events.Partition]int{own: 0}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, key := range s.models.Index().Workers() {
		of := own
		if w, ok := s.registered[key.Worker]; ok {
			of = w.partition()
		} else if p, ok := s.recovered[key.Worker]; ok {
			of = p
		}
		if _, known := at[of]; !known {
			at[of] = len(parts)
			parts = append(parts, events.DumpPart{Name: of.DumpName()})
		}
		part := &parts[at[of]]
		part.Workers = append(part.Workers, key)
	}
	if len(parts) > 1 && len(parts[0].Workers) == 0 {
		parts = parts[1:]
	}
	return parts
}

// SetRecovered tells which workers a peer's dump has put into the index.
func (s *Service) SetRecovered(recovered events.Recovered) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recovered = recovered.Partition
}

// parseHashes reads hashes that may be written signed or unsigned.
func parseHashes(field string, numbers []json.Number) ([]uint64, error) {
	hashes := make([]uint64, len(numbers))
	for i, number := range numbers {
		h, err := parseHash(number)
		if err != nil {
			return nil, fmt.Errorf("%s[%d] is %q: it must be a 64-bit integer", field, i, number)
		}
		hashes[i] = h
	}
	return hashes, nil
}

// parseHash reads a 64-bit hash that may be written signed or unsigned.
func parseHash(number json.Number) (uint64, error) {
	if h, err := strconv.ParseUint(number.String(), 10, 64); err == nil {
		return h, nil
	}
	h, err := strconv.ParseInt(number.String(), 10, 64)
	return uint64(h), err
}
