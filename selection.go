package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"github.com/gin-gonic/gin"
)

// selectionBodyLimit bounds a request body on the router port, in bytes.
const selectionBodyLimit = 8 << 20

// Selection is the router port: the routing decision without the proxy, in the
// routes and names of Dynamo's standalone services.
type Selection struct {
	config  Config
	router  *Router
	index   Index
	workers func() []WorkerStatus
	log     *slog.Logger
}

// NewSelection returns the router port over the given rooms. workers lists the
// fleet.
func NewSelection(config Config, router *Router, index Index, workers func() []WorkerStatus, log *slog.Logger) *Selection {
	return &Selection{config: config, router: router, index: index, workers: workers, log: log}
}

// Handler returns the routes of the router port.
func (s *Selection) Handler() http.Handler {
	engine := newEngine(s.log)
	engine.NoRoute(func(c *gin.Context) { plainError(c, http.StatusNotFound, "route not found") })
	engine.GET("/health", func(c *gin.Context) { c.JSON(http.StatusOK, gin.H{"status": "ok"}) })
	guarded := engine.Group("/", requireKey(s.config.RouterAPIKey, plainError))
	guarded.GET("/ready", s.ready)
	guarded.GET("/workers", func(c *gin.Context) { c.JSON(http.StatusOK, s.records()) })
	guarded.POST("/find_best_worker", s.findBestWorker)
	guarded.POST("/overlap_scores", s.overlapScores)
	guarded.GET("/dump", s.dump)
	return engine
}

// plainError answers with the error shape of the router port.
func plainError(c *gin.Context, status int, message string) {
	c.JSON(status, gin.H{"error": message})
}

// workerRecord is a worker as the router port shows it; loads and blocks are
// those of all its ranks.
type workerRecord struct {
	WorkerID         uint64   `json:"worker_id"`
	ModelName        string   `json:"model_name"`
	RoutingGroup     string   `json:"routing_group"`
	Endpoint         string   `json:"endpoint"`
	KVEventsEndpoint string   `json:"kv_events_endpoint,omitempty"`
	ReplayEndpoint   string   `json:"replay_endpoint,omitempty"`
	BlockSize        int      `json:"block_size"`
	Lifecycle        string   `json:"lifecycle"`
	Reasons          []string `json:"not_schedulable_reasons,omitempty"`
	State            string   `json:"state"`
	PID              int      `json:"pid,omitempty"`
	Restarts         int      `json:"restarts"`
	Generation       int      `json:"generation"`
	InFlight         int      `json:"in_flight"`
	PrefillTokens    int      `json:"prefill_tokens"`
	RunningReqs      int      `json:"num_running_reqs"`
	WaitingReqs      int      `json:"num_waiting_reqs"`
	KVCacheUsage     float64  `json:"kv_cache_usage"`
	Blocks           int      `json:"blocks"`
}

func (s *Selection) records() []workerRecord {
	up := map[uint64]bool{}
	for _, t := range s.router.Targets() {
		up[t.Key.Worker] = true
	}
	records := []workerRecord{}
	for _, w := range s.workers() {
		r := workerRecord{
			WorkerID: w.ID, ModelName: s.config.ServedModelName, RoutingGroup: "default", Endpoint: w.URL,
			KVEventsEndpoint: w.KVEvents, ReplayEndpoint: w.Replay, BlockSize: s.router.BlockSize(),
			Lifecycle: "schedulable", State: w.State, PID: w.PID, Restarts: w.Restarts, Generation: w.Generation,
		}
		for _, key := range w.Keys() {
			load := s.router.Load(key)
			r.InFlight += load.InFlight
			r.PrefillTokens += load.PrefillTokens
			r.RunningReqs += load.Running
			r.WaitingReqs += load.Waiting
			r.KVCacheUsage = max(r.KVCacheUsage, load.KVUsage)
			r.Blocks += s.index.Blocks(key)
		}
		if !up[w.ID] {
			r.Lifecycle = "unschedulable"
			r.Reasons = []string{w.State}
			if w.LastError != "" {
				r.Reasons = append(r.Reasons, w.LastError)
			}
		}
		records = append(records, r)
	}
	return records
}

func (s *Selection) ready(c *gin.Context) {
	n := len(s.router.Targets())
	status := http.StatusOK
	if n == 0 {
		status = http.StatusServiceUnavailable
	}
	c.JSON(status, gin.H{"ready": n > 0, "schedulable_workers": n, "workers": s.records()})
}

// promptQuery is a prompt in one of the two forms that the routes take.
type promptQuery struct {
	LocalHashes []json.Number `json:"local_hashes"`
	NumTokens   *int          `json:"num_tokens"`
	TokenIDs    []uint32      `json:"token_ids"`
	LoRA        string        `json:"lora_name"`
}

// request checks the query and turns it into the router's form.
func (q promptQuery) request() (Request, error) {
	if q.TokenIDs != nil {
		return Request{Tokens: q.TokenIDs, LoRA: q.LoRA}, nil
	}
	if q.LocalHashes == nil {
		return Request{}, errors.New("local_hashes (with num_tokens) or token_ids is missing")
	}
	if q.NumTokens == nil || *q.NumTokens <= 0 {
		return Request{}, errors.New("num_tokens must be a positive number")
	}
	local := make([]uint64, len(q.LocalHashes))
	for i, number := range q.LocalHashes {
		h, err := parseHash(number)
		if err != nil {
			return Request{}, fmt.Errorf("local_hashes[%d] is %q: it must be a 64-bit integer", i, number)
		}
		local[i] = h
	}
	return Request{Local: local, NumTokens: *q.NumTokens}, nil
}

// prompt reads the prompt that a request is about; not ok: it has been answered.
func (s *Selection) prompt(c *gin.Context) (request Request, ok bool) {
	body, err := io.ReadAll(http.MaxBytesReader(c.Writer, c.Request.Body, selectionBodyLimit))
	var tooLarge *http.MaxBytesError
	if errors.As(err, &tooLarge) {
		plainError(c, http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", tooLarge.Limit))
		return Request{}, false
	}
	var query promptQuery
	if err == nil {
		err = json.Unmarshal(body, &query)
	}
	if err != nil {
		plainError(c, http.StatusBadRequest, "bad body: "+err.Error())
		return Request{}, false
	}
	request, err = query.request()
	if err != nil {
		plainError(c, http.StatusBadRequest, err.Error())
		return Request{}, false
	}
	return request, true
}

// findBestWorker chooses a worker for a client that forwards its request
// itself. Since such a client does not tell when the request ends, nothing is
// booked; the worker counts as one request longer until it publishes its load.
func (s *Selection) findBestWorker(c *gin.Context) {
	request, ok := s.prompt(c)
	if !ok {
		return
	}
	request.Unbooked = true
	decision, err := s.router.Route(c.Request.Context(), request)
	if err != nil {
		plainError(c, http.StatusServiceUnavailable, err.Error())
		return
	}
	c.JSON(http.StatusOK, gin.H{"worker_id": decision.Target.Key.Worker, "dp_rank": decision.Target.Key.Rank, "overlap_tokens": decision.OverlapTokens})
}

// overlapScores tells what each worker holds of a prompt, choosing none.
func (s *Selection) overlapScores(c *gin.Context) {
	request, ok := s.prompt(c)
	if !ok {
		return
	}
	overlaps, blocks := s.router.Overlaps(request)
	workers := []gin.H{}
	for _, o := range overlaps {
		workers = append(workers, gin.H{"worker_id": o.Worker.Worker, "dp_rank": o.Worker.Rank, "device_blocks": o.Blocks})
	}
	c.JSON(http.StatusOK, gin.H{"block_size": s.router.BlockSize(), "num_blocks": blocks, "workers": workers})
}

// dumpEvent is one store event of a dump.
type dumpEvent struct {
	WorkerID    uint64 `json:"worker_id"`
	StorageTier string `json:"storage_tier"`
	Event       struct {
		EventID int `json:"event_id"`
		Data    struct {
			Stored dumpStored `json:"stored"`
		} `json:"data"`
		DPRank uint32 `json:"dp_rank"`
	} `json:"event"`
}

type dumpStored struct {
	ParentHash    *uint64     `json:"parent_hash"`
	StartPosition *int        `json:"start_position"`
	Blocks        []dumpBlock `json:"blocks"`
}

type dumpBlock struct {
	BlockHash  uint64 `json:"block_hash"`
	TokensHash uint64 `json:"tokens_hash"`
}

// dump streams the whole index as store events from which another router can
// fill its own: blocks that follow each other in one event, parents before
// children.
func (s *Selection) dump(c *gin.Context) {
	http.NewResponseController(c.Writer).SetWriteDeadline(time.Now().Add(5 * time.Minute))
	c.Header("Content-Type", "application/json")
	out := bufio.NewWriter(c.Writer)
	defer out.Flush()
	model, _ := json.Marshal(s.config.ServedModelName + ":default")
	fmt.Fprintf(out, `{%s:{"block_size":%d,"events":[`, model, s.router.BlockSize())
	var open *dumpEvent
	ids := map[WorkerKey]int{}
	write := func(e *dumpEvent) bool {
		text, err := json.Marshal(e)
		if err != nil {
			return false
		}
		_, err = out.Write(text)
		return err == nil
	}
	first := true
	s.index.Dump(func(w WorkerKey, parent uint64, hasParent bool, block StoredBlock) bool {
		entry := dumpBlock{BlockHash: block.Engine, TokensHash: block.Local}
		if open != nil {
			blocks := open.Event.Data.Stored.Blocks
			if open.WorkerID == w.Worker && open.Event.DPRank == w.Rank && hasParent && blocks[len(blocks)-1].BlockHash == parent {
				open.Event.Data.Stored.Blocks = append(blocks, entry)
				return true
			}
			if !write(open) {
				open = nil
				return false
			}
			first = false
		}
		if !first {
			out.WriteByte(',')
		}
		open = &dumpEvent{WorkerID: w.Worker, StorageTier: "device"}
		open.Event.EventID = ids[w]
		open.Event.DPRank = w.Rank
		ids[w]++
		open.Event.Data.Stored.Blocks = []dumpBlock{entry}
		if hasParent {
			open.Event.Data.Stored.ParentHash = &parent
		}
		return true
	})
	if open != nil {
		write(open)
	}
	out.WriteString("]}}")
}

// parseHash reads a 64-bit hash that may be written signed or unsigned.
func parseHash(number json.Number) (uint64, error) {
	if h, err := strconv.ParseUint(number.String(), 10, 64); err == nil {
		return h, nil
	}
	h, err := strconv.ParseInt(number.String(), 10, 64)
	return uint64(h), err
}
