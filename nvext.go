package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/gin-gonic/gin"
	"github.com/tidwall/gjson"
)

// Headers by which a client names the worker that it wants, and that of the
// prompt where two share the request, as Dynamo's frontend takes them. They go
// before what the body says.
const (
	headerPinnedWorker  = "X-Worker-Instance-Id"
	headerPinnedRank    = "X-Dp-Rank"
	headerPinnedPrefill = "X-Prefill-Instance-Id"
	headerPrefillRank   = "X-Prefill-Dp-Rank"
)

// Annotations of nvext that mean something here; all others are ignored.
const (
	annotationQuery  = "query_instance_id"
	annotationWorker = "worker_instance_id"
)

// routingHints is what a request says about its own routing, in the field nvext
// of its body and in headers. Engines never heed them: vLLM passes over fields
// that it does not know.
type routingHints struct {
	Query          bool       // tell who would be chosen, and send nothing
	Pinned         *WorkerKey // this worker and no other
	PinnedPrefill  *WorkerKey // the same of the prompt, where two share the request
	Whole          bool       // nobody is to share it with the worker that is named
	PriorityJump   float64    // seconds by which the request counts as having come earlier
	StrictPriority uint32     // higher ones leave the queue first
	ExpectedOutput int        // tokens; 0: unknown
	Prefix         PrefixHints
}

// hintError says which hint makes no sense.
type hintError struct {
	param string // field or header
	want  string
	got   string
}

func (e *hintError) Error() string {
	return fmt.Sprintf("%s is %.40s: it must be %s", e.param, e.got, e.want)
}

// hint is one value and the field or header that it came from.
type hint struct{ param, text string }

// hintReader reads values and keeps the first error.
type hintReader struct{ bad *hintError }

// readHints reads a request's hints; bad is not nil if one makes no sense.
func readHints(header http.Header, nvext gjson.Result) (hints routingHints, bad *hintError) {
	var r hintReader
	if r.object("nvext", nvext) {
		r.annotations(nvext.Get("annotations"), &hints)
		r.agentHints(nvext.Get("agent_hints"), &hints)
	}
	r.prefixHeaders(header, &hints.Prefix)
	var worker, rank, prefill, prefillRank hint
	if hints.Pinned != nil {
		worker = hint{"nvext.annotations", strconv.FormatUint(hints.Pinned.Worker, 10)}
	}
	for _, source := range []struct {
		into *hint
		hint
	}{
		{&worker, hint{"nvext.backend_instance_id", rawOf(nvext.Get("backend_instance_id"))}},
		{&worker, hint{paramDecodeWorker, rawOf(nvext.Get("decode_worker_id"))}},
		{&worker, hint{headerPinnedWorker, header.Get(headerPinnedWorker)}},
		{&rank, hint{"nvext.dp_rank", rawOf(nvext.Get("dp_rank"))}},
		{&rank, hint{"nvext.decode_dp_rank", rawOf(nvext.Get("decode_dp_rank"))}},
		{&rank, hint{headerPinnedRank, header.Get(headerPinnedRank)}},
		{&prefill, hint{"nvext.prefill_worker_id", rawOf(nvext.Get("prefill_worker_id"))}},
		{&prefill, hint{headerPinnedPrefill, header.Get(headerPinnedPrefill)}},
		{&prefillRank, hint{"nvext.prefill_dp_rank", rawOf(nvext.Get("prefill_dp_rank"))}},
		{&prefillRank, hint{headerPrefillRank, header.Get(headerPrefillRank)}},
	} {
		if source.text != "" {
			*source.into = source.hint
		}
	}
	hints.Pinned = r.worker(worker, rank, headerPinnedWorker+" or nvext.backend_instance_id")
	hints.PinnedPrefill = r.worker(prefill, prefillRank, headerPinnedPrefill+" or nvext.prefill_worker_id")
	switch {
	case hints.Pinned == nil:
	case hints.PinnedPrefill == nil:
		hints.Whole = worker.param != paramDecodeWorker
	case *hints.PinnedPrefill == *hints.Pinned: // as a dry run tells it of one that stays whole
		hints.PinnedPrefill, hints.Whole = nil, true
	}
	return hints, r.bad
}

// paramDecodeWorker names a worker that leaves the prompt to others.
const paramDecodeWorker = "nvext.decode_worker_id"

// worker reads the name of a worker; nil: there is none. by says how it is given.
func (r *hintReader) worker(id, rank hint, by string) *WorkerKey {
	if id.text != "" {
		return &WorkerKey{Worker: r.whole(id, 64), Rank: uint32(r.whole(rank, 32))}
	}
	if rank.text != "" {
		r.fail(rank, "given together with a worker's id ("+by+")")
	}
	return nil
}

// rawOf returns a field's JSON; empty: there is none, or null.
func rawOf(v gjson.Result) string {
	if v.Type == gjson.Null {
		return ""
	}
	return v.Raw
}

func (r *hintReader) fail(h hint, want string) {
	if r.bad == nil {
		r.bad = &hintError{h.param, want, h.text}
	}
}

// object tells whether v is an object; nothing and null are none.
func (r *hintReader) object(param string, v gjson.Result) bool {
	if raw := rawOf(v); raw != "" && !v.IsObject() {
		r.fail(hint{param, raw}, "an object")
	}
	return v.IsObject()
}

// annotations reads entries of the forms "name" and "name:value".
func (r *hintReader) annotations(list gjson.Result, into *routingHints) {
	if raw := rawOf(list); raw != "" && !list.IsArray() {
		r.fail(hint{"nvext.annotations", raw}, "a list of strings")
		return
	}
	entries := list.Array()
	for _, entry := range entries {
		switch name, value, _ := strings.Cut(entry.Str, ":"); {
		case name == annotationQuery:
			into.Query = true
		case name == annotationWorker && value != "":
			into.Pinned = &WorkerKey{Worker: r.whole(hint{"nvext.annotations", value}, 64)}
		}
	}
	r.prefixAnnotations(entries, &into.Prefix)
}

// agentHints reads priorities, the expected length of the answer and the series
// of requests that this one belongs to. Clients
// that send a latency sensitivity may send beside it a priority that falls with
// urgency: the sensitivity counts then.
func (r *hintReader) agentHints(hints gjson.Result, into *routingHints) {
	if !r.object("nvext.agent_hints", hints) {
		return
	}
	field := func(name string) hint { return hint{"nvext.agent_hints." + name, rawOf(hints.Get(name))} }
	for _, jump := range []hint{field("priority"), field("latency_sensitivity")} {
		if jump.text == "" {
			continue
		}
		seconds, err := strconv.ParseFloat(jump.text, 64)
		if err != nil || math.IsInf(seconds, 0) {
			r.fail(jump, "a number")
		}
		into.PriorityJump = max(0, seconds)
	}
	into.StrictPriority = uint32(r.whole(field("strict_priority"), 32))
	into.ExpectedOutput = int(r.whole(field("osl"), 31))
	r.prefixAgentHints(hints, &into.Prefix)
}

// whole reads a whole number that is not negative; nothing is 0.
func (r *hintReader) whole(h hint, bits int) uint64 {
	if h.text == "" {
		return 0
	}
	n, err := strconv.ParseUint(h.text, 10, bits)
	if err != nil {
		r.fail(h, fmt.Sprintf("a whole number from 0 to %d", uint64(math.MaxUint64)>>(64-bits)))
	}
	return n
}

// pinnedError says that a worker which a request asks for cannot serve it.
type pinnedError struct {
	worker, prefill *WorkerKey // not both nil
	err             error
}

func (e *pinnedError) Error() string {
	var named []string
	if e.prefill != nil {
		named = append(named, fmt.Sprintf("prefill worker %d rank %d", e.prefill.Worker, e.prefill.Rank))
	}
	if e.worker != nil {
		named = append(named, fmt.Sprintf("worker %d rank %d", e.worker.Worker, e.worker.Rank))
	}
	return fmt.Sprintf("%s, which the request names, cannot take it (%v); no other is taken in its place", strings.Join(named, " with "), e.err)
}

func (e *pinnedError) Unwrap() error { return e.err }

// decide routes a request; the error of one that names its worker says so.
func (a *API) decide(ctx context.Context, request Request) (Decision, error) {
	decision, err := a.router.Route(ctx, request)
	if err != nil && request.Pinned != nil {
		err = &pinnedError{request.Pinned, nil, err}
	}
	return decision, err
}

// decidePair is decide for a request that two workers may share; why says why it
// is to stay whole, if it is.
func (a *API) decidePair(ctx context.Context, request Request, why string) (Pair, error) {
	rule := PairRule{LeastUncached: a.config.DisaggMinUncachedTokens, Whole: why, Enforce: a.config.EnforceDisagg}
	if request.PinnedPrefill != nil && why == wholePrefilled {
		return Pair{}, ErrNoPair // its prefill worker has failed
	}
	pair, err := a.router.RoutePair(ctx, request, rule)
	if err != nil && (request.Pinned != nil || request.PinnedPrefill != nil) {
		err = &pinnedError{request.Pinned, request.PinnedPrefill, err}
	}
	return pair, err
}

// queryAnswer tells who would serve a request. It stands where the answer's
// text would, under the names of Dynamo's frontends: the older have
// worker_instance_id and token_data, the newer worker_id and token_ids.
type queryAnswer struct {
	ID      string     `json:"id"`
	Object  string     `json:"object"`
	Created int64      `json:"created"`
	Model   string     `json:"model"`
	Choices []struct{} `json:"choices"`
	NVExt   struct {
		WorkerInstanceID uint64 `json:"worker_instance_id"`
		WorkerID         struct {
			PrefillWorker uint64 `json:"prefill_worker_id"`
			PrefillRank   uint32 `json:"prefill_dp_rank"`
			DecodeWorker  uint64 `json:"decode_worker_id"`
			DecodeRank    uint32 `json:"decode_dp_rank"`
		} `json:"worker_id"`
		TokenData     []uint32 `json:"token_data"`
		TokenIDs      []uint32 `json:"token_ids"`
		OverlapTokens int      `json:"overlap_tokens"`
	} `json:"nvext"`
}

// answerQuery answers a dry run: nothing is sent to the worker that is chosen, or
// to the two that may share the request, and nothing booked.
func (a *API) answerQuery(c *gin.Context, kind promptKind, stream bool, request Request, shared bool, why string, tokens []uint32) error {
	var pair Pair
	var err error
	if shared {
		pair, err = a.decidePair(c.Request.Context(), request, why)
	} else {
		pair.Decode, err = a.decide(c.Request.Context(), request)
	}
	if err != nil {
		return err
	}
	decision, prefill := pair.Decode, pair.Decode.Target.Key
	if shared && pair.Whole == "" {
		decision.OverlapTokens, prefill = pair.Prefill.OverlapTokens, pair.Prefill.Target.Key
	}
	key := decision.Target.Key
	answer := queryAnswer{ID: requestID(c), Object: "chat.completion", Created: time.Now().Unix(), Model: request.Model, Choices: []struct{}{}}
	switch {
	case kind == completionPrompt:
		answer.Object = "text_completion"
	case kind != chatPrompt:
		answer.Object = annotationQuery
	case stream:
		answer.Object = "chat.completion.chunk"
	}
	if tokens == nil {
		tokens = []uint32{}
	}
	e := &answer.NVExt
	e.WorkerInstanceID, e.OverlapTokens = key.Worker, decision.OverlapTokens
	e.WorkerID.PrefillWorker, e.WorkerID.PrefillRank = prefill.Worker, prefill.Rank
	e.WorkerID.DecodeWorker, e.WorkerID.DecodeRank = key.Worker, key.Rank
	e.TokenData, e.TokenIDs = tokens, tokens
	c.Header(headerRequest, answer.ID)
	c.Header(headerWorker, workerLabel(key.Worker))
	c.Header(headerOverlap, strconv.Itoa(decision.OverlapTokens))
	if !stream {
		c.JSON(http.StatusOK, answer)
		return nil
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return err
	}
	c.Data(http.StatusOK, "text/event-stream; charset=utf-8", fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", text))
	return nil
}
