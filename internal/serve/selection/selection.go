// Package selection serves the router port: its clients request a routing decision and
// forward the request themselves. Its routes and names are those of Dynamo's standalone
// selection service.
package selection

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/peers/replica"
)

// SelectionBodyLimit bounds a request body on the router port, in bytes.
const SelectionBodyLimit = 8 << 20

// Bounds of dumps, each of which takes about 60 bytes a block.
const (
	maxDumps = 2                // written at the same time
	dumpWait = 10 * time.Second // maximum time that a further one waits
)

// Service is the router port.
type Service struct {
	settings   Settings
	models     *models.Set
	fleet      *workers.Fleet
	partitions *Partitions
	mesh       *replica.Mesh // with peer routers; nil: none
	dynamo     *dynamo.Link  // with Dynamo; nil: --replica-sync is off
	tenants    http.Handler  // serves GET /tenants; nil: it is no route
	metrics    http.Handler  // serves GET /metrics; nil: it is no route
	log        *slog.Logger

	history func(kv.WorkerKey) *events.Log // of a rank's KV events; nil result: they are not followed

	reserved  *reservations
	pending   *pendingSelections
	decisions openDecisions
	dumps     chan struct{} // has a token for each dump that is being written
	draining  atomic.Bool

	changing sync.Mutex // held while a worker is registered, changed or removed; taken before all other locks
}

// Settings are the settings of the router port.
type Settings struct {
	Host               string    // address of the port; empty: unknown
	Keys               *web.Keys // that are accepted; nil: none is required
	BlockSize          int       // tokens
	KVEvents           bool      // KV events are followed
	TrackPrefillTokens bool      // --router-track-prefill-tokens
	CountsPasses       bool      // --router-queue-threshold is set; its unit is a pass of a worker
	Hop                web.Hop   // identifies this router in the Via header
	Places             int       // maximum number of requests of all clients at the same time; 0: no limit
}

// Deps are the parts that the router port serves.
type Deps struct {
	Models     *models.Set
	Fleet      *workers.Fleet
	Partitions *Partitions
	Mesh       *replica.Mesh // with peer routers; nil: none
	Dynamo     *dynamo.Link  // with Dynamo; nil: --replica-sync is off
	Tenants    http.Handler  // serves GET /tenants; nil: it is no route
	Metrics    http.Handler  // serves GET /metrics; nil: it is no route
	Log        *slog.Logger
}

// New returns the router port.
func New(settings Settings, deps Deps) *Service {
	return &Service{
		settings: settings, models: deps.Models, fleet: deps.Fleet, partitions: deps.Partitions, mesh: deps.Mesh, dynamo: deps.Dynamo,
		tenants: deps.Tenants,
		metrics: deps.Metrics, log: deps.Log, history: deps.Fleet.History,
		reserved: newReservations(), pending: newPendingSelections(),
		decisions: openDecisions{byID: map[string]*openDecision{}}, dumps: make(chan struct{}, maxDumps),
	}
}

// Handler returns the routes of the router port.
func (s *Service) Handler() http.Handler {
	engine := web.NewEngine(s.log)
	engine.Use(s.settings.Hop.Refuse)
	engine.NoRoute(func(c *gin.Context) { plainError(c, http.StatusNotFound, "route not found") })
	engine.NoMethod(func(c *gin.Context) { plainError(c, http.StatusMethodNotAllowed, "method not allowed") })
	engine.GET("/health", statusOK)
	guarded := engine.Group("/", Guards(s.settings.Host, s.settings.Keys, "missing or unknown API key", plainError)...)
	guarded.Use(web.Within(web.Places(s.settings.Places), web.Address, func(c *gin.Context) {
		plainError(c, http.StatusServiceUnavailable, fmt.Sprintf("all %d places for requests, or your share of them, are taken: try again",
			s.settings.Places))
	}))
	guarded.GET("/ready", s.ready)
	guarded.GET("/workers", s.listWorkers)
	guarded.POST("/workers", withBody(s.addWorker))
	guarded.PATCH("/workers/:id", s.patchWorker)
	guarded.DELETE("/workers/:id", s.deleteWorker)
	guarded.POST("/find_best_worker", s.withPrompt(s.findBestWorker))
	guarded.POST("/find_worker", withBody(s.findWorker))
	guarded.POST("/feedback", withBody(s.feedback))
	guarded.POST("/overlap_scores", s.withPrompt(s.overlapScores))
	guarded.POST("/select", s.withSelection(s.selectWorker))
	guarded.POST("/select_and_reserve", s.withSelection(s.selectAndReserve))
	guarded.POST("/reservations", withBody(s.reserve))
	guarded.POST("/reservations/:id/prefill_complete", s.prefillComplete)
	guarded.POST("/reservations/:id/output_block", withBody(s.outputBlock))
	guarded.DELETE("/reservations/:id", s.free)
	guarded.GET("/decisions", s.explainDecisions)
	guarded.GET("/loads", s.loads)
	if s.tenants != nil {
		guarded.GET("/tenants", gin.WrapH(s.tenants))
	}
	if s.metrics != nil {
		guarded.GET("/metrics", gin.WrapH(s.metrics))
	}
	guarded.POST("/potential_loads", s.withSelection(s.potentialLoads))
	guarded.POST("/route", withBody(s.route))
	guarded.GET("/dump", s.dump)
	guarded.GET("/events", s.events)
	guarded.GET("/cluster", s.showCluster)
	guarded.POST("/replica_sync/register_peer", s.withPeer(s.registerPeer))
	guarded.POST("/replica_sync/deregister_peer", s.withPeer(s.deregisterPeer))
	guarded.GET("/replica_sync/peers", s.listPeers)
	s.managed(engine, guarded)
	return engine
}

// Guards reject requests of other sites' pages, requests without one of the keys and bodies that
// are not declared as JSON. host is the address of the port, the value of whose begins the error
// for a missing key, and fail writes errors.
func Guards(host string, keys *web.Keys, whose string, fail func(*gin.Context, int, string)) []gin.HandlerFunc {
	return []gin.HandlerFunc{web.OwnPages(host, keys.Asked(), fail), web.RequireKey(keys, whose, fail), web.WantJSON(fail)}
}

// Drain makes /ready fail, so that load balancers send no new requests.
func (s *Service) Drain() { s.draining.Store(true) }

// plainError answers with the error shape of the router port.
func plainError(c *gin.Context, status int, message string) {
	c.JSON(status, gin.H{"error": message})
}

func statusOK(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"status": "ok"}) }

// routingError responds to a request that the Router has rejected.
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

// body decodes the JSON body of a request into query. Not ok: an error response was sent.
func body(c *gin.Context, query any) (ok bool) {
	text, err := web.ReadBody(c.Writer, c.Request, SelectionBodyLimit)
	var unread *web.BodyError
	if err == nil {
		err = json.Unmarshal(text, query)
	}
	switch {
	case err == nil:
		return true
	case errors.As(err, &unread):
		plainError(c, unread.Status, unread.Message)
	case errors.As(err, new(*json.UnmarshalTypeError)):
		plainError(c, http.StatusUnprocessableEntity, "bad body: "+fieldError(err).Error())
	default:
		plainError(c, http.StatusBadRequest, "bad body: "+err.Error())
	}
	return false
}

// withBody returns a handler of requests with a JSON body.
func withBody[Query any](handle func(*gin.Context, Query)) gin.HandlerFunc {
	return func(c *gin.Context) {
		var query Query
		if body(c, &query) {
			handle(c, query)
		}
	}
}

// fieldError names the field of a wrong type if that is the cause of err.
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

// promptQuery is a prompt, in one of three forms, and the partition that it is for.
type promptQuery struct {
	ModelName      string        `json:"model_name"`
	RoutingGroup   string        `json:"routing_group"`
	TokenIDs       []uint32      `json:"token_ids"`
	LocalHashes    []json.Number `json:"local_hashes"` // with num_tokens
	NumTokens      *int          `json:"num_tokens"`
	BlockHashes    []json.Number `json:"block_hashes"` // alternatively, with sequence_hashes and isl_tokens
	SequenceHashes []json.Number `json:"sequence_hashes"`
	ISLTokens      *int          `json:"isl_tokens"`
	LoRA           string        `json:"lora_name"`
	Salt           string        `json:"cache_salt"`
	MMInfos        []*mmInfo     `json:"block_mm_infos"` // of token_ids, one for each block
}

// request validates the query and converts it to a router.Request.
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

// tokensWithin rejects a number of tokens above kv.MaxTokens.
func tokensWithin(field string, n int) error {
	if n > kv.MaxTokens {
		return fmt.Errorf("%s is %d: it must be at most %d", field, n, kv.MaxTokens)
	}
	return nil
}

// hashedRequest is request for a prompt given by its hashes.
func (q promptQuery) hashedRequest() (router.Request, error) {
	switch {
	case q.SequenceHashes == nil:
		return router.Request{}, errors.New("sequence_hashes is required without token_ids")
	case q.ISLTokens == nil:
		return router.Request{}, errors.New("isl_tokens is required without token_ids")
	case *q.ISLTokens <= 0:
		return router.Request{}, errors.New("isl_tokens must be greater than 0")
	case len(q.BlockHashes) != len(q.SequenceHashes):
		return router.Request{}, fmt.Errorf("block_hashes length %d must match sequence_hashes length %d", len(q.BlockHashes),
			len(q.SequenceHashes))
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

// partition returns the partition that the query is for.
func (q promptQuery) partition() events.Partition {
	if q.RoutingGroup == "" {
		return events.Partition{Model: q.ModelName, Group: events.DefaultGroup}
	}
	return events.Partition{Model: q.ModelName, Group: q.RoutingGroup}
}

// router returns the router of a partition's model; without a name, of the default model.
func (s *Service) router(of events.Partition) *router.Router {
	m, _ := s.models.Of(of.Model)
	return m.Router
}

// within restricts a request to the workers of a partition. They may be Unanswered: the
// client forwards the request, and may reach what the router does not.
func (s *Service) within(request router.Request, of events.Partition) router.Request {
	request.Model, request.Unanswered = of.Model, true
	if request.LoRA == "" && of.Model != "" {
		request.LoRA, _ = s.router(of).Adapter(of.Model)
	}
	if of.Group == events.DefaultGroup && !s.partitions.grouped() {
		return request
	}
	allowed := []uint64{}
	for _, t := range s.router(of).Targets() {
		given := request.Allowed == nil || slices.Contains(request.Allowed, t.Key.Worker)
		if given && s.partitions.group(t.Key.Worker) == of.Group {
			allowed = append(allowed, t.Key.Worker)
		}
	}
	request.Allowed = allowed
	return request
}

// schedulable reports whether the partition has a worker that is up and not cordoned.
func (s *Service) schedulable(of events.Partition) bool {
	return s.router(of).Has(func(t *kv.Target) bool {
		return !t.Cordoned && t.Serves(of.Model) && s.partitions.group(t.Key.Worker) == of.Group
	})
}

// targets returns the ranks of a partition that are up, sorted by key.
func (s *Service) targets(of events.Partition) (targets []kv.Target) {
	for _, t := range s.router(of).Targets() {
		if t.Serves(of.Model) && s.partitions.group(t.Key.Worker) == of.Group {
			targets = append(targets, t)
		}
	}
	return targets
}

// withPrompt returns a handler of requests with a prompt, for any partition.
func (s *Service) withPrompt(handle func(c *gin.Context, of events.Partition, request router.Request)) gin.HandlerFunc {
	return withBody(func(c *gin.Context, query promptQuery) {
		request, err := query.request()
		if err != nil {
			plainError(c, http.StatusBadRequest, err.Error())
			return
		}
		handle(c, query.partition(), request)
	})
}

// ready reports whether any worker can be routed to.
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

// findBestWorker selects a worker for a client that forwards its request itself. Such a
// client does not report the end of the request, so nothing is reserved; the worker's
// queue counts as one request longer until it publishes its load.
func (s *Service) findBestWorker(c *gin.Context, of events.Partition, request router.Request) {
	request.ChooseOnly = true
	decision, err := s.router(of).Route(c.Request.Context(), s.within(request, of))
	if err != nil {
		s.routingError(c, of, err)
		return
	}
	c.JSON(http.StatusOK, gin.H{"worker_id": decision.Target.Key.Worker, "dp_rank": decision.Target.Key.Rank,
		"overlap_tokens": decision.OverlapTokens})
}

// overlapScores returns the cached blocks of a prompt on each worker, without a selection.
func (s *Service) overlapScores(c *gin.Context, of events.Partition, request router.Request) {
	targets := s.targets(of)
	if len(targets) == 0 {
		plainError(c, http.StatusServiceUnavailable, noSchedulable(of))
		return
	}
	overlaps, unit, blocks := s.router(of).Overlaps(request)
	cached := map[kv.WorkerKey]router.Overlap{}
	for _, o := range overlaps {
		cached[o.Worker] = o
	}
	workers := []gin.H{}
	for _, t := range targets {
		o := cached[t.Key]
		host, disk := int(o.Staged.Host), int(o.Staged.Disk+o.Staged.External)
		workers = append(workers, gin.H{
			"worker_id": t.Key.Worker, "dp_rank": t.Key.Rank,
			"device_blocks": o.Blocks, "host_pinned_blocks": o.Blocks + host, "disk_blocks": o.Blocks + host + disk,
			"host_pinned_extension_blocks": host, "disk_extension_blocks": disk, "shared_beyond_device_blocks": nil,
		})
	}
	c.JSON(http.StatusOK, gin.H{
		"block_size": unit, "num_blocks": blocks, "workers": workers,
		"shared_cache": gin.H{"enabled": false, "total_hit_blocks": 0, "ranges": [][2]int{}, "error": nil},
	})
}

// dump streams the index of the default model as store events, from which another router
// can fill its own.
func (s *Service) dump(c *gin.Context) {
	s.writeDump(c, func(to io.Writer) error {
		return events.WriteDump(to, s.models.Index(), s.models.Default().Router.Unit(), s.blockSize, s.partitions.dumpParts(s.models.Index().Workers()))
	})
}

// blockSize returns the tokens in a block of a worker of the default model.
func (s *Service) blockSize(w kv.WorkerKey) int {
	r := s.models.Default().Router
	for _, t := range r.Ranks(w.Worker) {
		if t.Key == w {
			return int(t.BlockSize)
		}
	}
	return r.Unit()
}

// writeDump responds with the output of write, at most maxDumps at a time.
func (s *Service) writeDump(c *gin.Context, write func(to io.Writer) error) {
	select {
	case s.dumps <- struct{}{}:
		defer func() { <-s.dumps }()
	case <-c.Request.Context().Done():
		return
	case <-time.After(dumpWait):
		c.Header("Retry-After", "1")
		plainError(c, http.StatusServiceUnavailable, fmt.Sprintf("%d dumps are being written: try again in a moment", maxDumps))
		return
	}
	c.Header("Content-Type", "application/json")
	if err := write(c.Writer); err != nil {
		s.log.Debug("dump interrupted", "error", err)
	}
}

// parseHashes parses 64-bit hashes, signed or unsigned.
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

// parseHash parses a 64-bit hash, signed or unsigned.
func parseHash(number json.Number) (uint64, error) {
	if h, err := strconv.ParseUint(number.String(), 10, 64); err == nil {
		return h, nil
	}
	h, err := strconv.ParseInt(number.String(), 10, 64)
	return uint64(h), err
}
