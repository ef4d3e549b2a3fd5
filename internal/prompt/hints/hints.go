// Package hints reads the routing hints of a request from its headers and from the field
// nvext of its body.
package hints

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// Headers that pin a request to a worker, and its prefill leg to another, as in Dynamo's
// frontend. They take precedence over the body.
const (
	HeaderPinnedWorker  = "X-Worker-Instance-Id"
	HeaderPinnedRank    = "X-Dp-Rank"
	HeaderPinnedPrefill = "X-Prefill-Instance-Id"
	headerPrefillRank   = "X-Prefill-Dp-Rank"
)

// Supported annotations of nvext; all others are ignored.
const (
	AnnotationQuery  = "query_instance_id"
	annotationWorker = "worker_instance_id"
)

// Hints are the routing hints of a request, from the field nvext of its body and from
// headers. Engines ignore unknown fields.
type Hints struct {
	Query          bool          // dry run: return the choice and send nothing
	Pinned         *kv.WorkerKey // the only worker that may serve the request
	PinnedPrefill  *kv.WorkerKey // the same for the prefill leg
	Whole          bool          // the request is aggregated: the pinned worker serves it alone
	PriorityJump   float64       // seconds by which the arrival time is moved back
	StrictPriority uint32        // higher ones leave the queue first
	ExpectedOutput int           // tokens; 0: unknown
	Prefix         Prefix
	Tenant         string        // whose share of a fair queue it uses; empty: its key's
	TTFT           time.Duration // objective of the time to first token; 0: none
	TPOT           time.Duration // objective of the time per further token; 0: none
	Class          *fair.Class   // that the client names; nil: none. An untrusted client may only lower its own
	Session        string        // name of its session; empty: none. Set by the caller of Read
	FromAbove      bool          // it has HeaderRouted: a router above has sent it, or a client says so
}

// headerPriority is the priority of a request in vLLM's own queue.
const headerPriority = "X-Vllm-Priority"

// Session returns the name of a request's session, from the header of that name,
// otherwise from the cookie; empty: none. Either name may be empty.
func Session(header http.Header, name, cookie string) (session string) {
	if name != "" {
		session = header.Get(name)
	}
	if session == "" && cookie != "" {
		if c, err := (&http.Request{Header: header}).Cookie(cookie); err == nil {
			session = c.Value
		}
	}
	return session
}

// Untrusted returns h without priorities, tenants, objectives, pinned workers and the length of
// the answer, which affect other clients: in a fair queue that length is a cost.
func (h Hints) Untrusted() Hints {
	h.Pinned, h.PinnedPrefill, h.Whole, h.PriorityJump, h.StrictPriority = nil, nil, false, 0, 0
	h.Tenant, h.TTFT, h.TPOT, h.ExpectedOutput = "", 0, 0, 0
	return h
}

// MayWait reports whether the request may wait until a worker is available: dry runs and
// requests with a pinned worker fail immediately.
func (h Hints) MayWait() bool { return !h.Query && h.Pinned == nil && h.PinnedPrefill == nil }

// Error is an invalid hint, with the valid values.
type Error struct {
	Param string // field or header
	want  string
	got   string
}

// Error names the hint, its value and the accepted values.
func (e *Error) Error() string {
	return fmt.Sprintf("%s is %.40s: it must be %s", e.Param, e.got, e.want)
}

// hint is one value and the field or header that it came from.
type hint struct{ param, text string }

// hintReader reads values and keeps the first error.
type hintReader struct {
	names   *kv.Names // by which workers may be called
	trusted bool      // errors may reveal worker names
	bad     *Error
}

// Read reads a request's hints; bad is the first invalid one. A worker is given by its id
// or its name. For an untrusted client it returns only Untrusted hints, and errors do not
// reveal worker names.
func Read(header http.Header, nvext gjson.Result, names *kv.Names, trusted bool) (hints Hints, bad *Error) {
	if header.Get(HeaderRouted) != "" {
		return readRouted(header, nvext, names, trusted), nil
	}
	r := hintReader{names: names, trusted: trusted}
	if r.object("nvext", nvext) {
		r.annotations(nvext.Get("annotations"), &hints)
		r.agentHints(nvext.Get("agent_hints"), &hints)
	}
	r.prefixHeaders(header, &hints.Prefix)
	hints.Class = r.class(hint{HeaderClass, header.Get(HeaderClass)})
	if trusted {
		hints.Tenant = tenantOf(header)
		hints.TTFT, hints.TPOT = r.objective(hint{HeaderTTFT, header.Get(HeaderTTFT)}), r.objective(hint{HeaderTPOT, header.Get(HeaderTPOT)})
	}
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
		{&worker, hint{HeaderPinnedWorker, header.Get(HeaderPinnedWorker)}},
		{&rank, hint{"nvext.dp_rank", rawOf(nvext.Get("dp_rank"))}},
		{&rank, hint{"nvext.decode_dp_rank", rawOf(nvext.Get("decode_dp_rank"))}},
		{&rank, hint{HeaderPinnedRank, header.Get(HeaderPinnedRank)}},
		{&prefill, hint{"nvext.prefill_worker_id", rawOf(nvext.Get("prefill_worker_id"))}},
		{&prefill, hint{HeaderPinnedPrefill, header.Get(HeaderPinnedPrefill)}},
		{&prefillRank, hint{"nvext.prefill_dp_rank", rawOf(nvext.Get("prefill_dp_rank"))}},
		{&prefillRank, hint{headerPrefillRank, header.Get(headerPrefillRank)}},
	} {
		if source.text != "" {
			*source.into = source.hint
		}
	}
	hints.Pinned = r.worker(worker, rank, HeaderPinnedWorker+" or nvext.backend_instance_id")
	hints.PinnedPrefill = r.worker(prefill, prefillRank, HeaderPinnedPrefill+" or nvext.prefill_worker_id")
	switch {
	case hints.Pinned == nil:
	case hints.PinnedPrefill == nil:
		hints.Whole = worker.param != paramDecodeWorker
	case *hints.PinnedPrefill == *hints.Pinned: // as a dry run reports a request that stays whole
		hints.PinnedPrefill, hints.Whole = nil, true
	}
	if !trusted {
		hints = hints.Untrusted()
	}
	return hints, r.bad
}

// paramDecodeWorker names a worker that leaves the prompt to others.
const paramDecodeWorker = "nvext.decode_worker_id"

// worker reads the name of a worker; nil: there is none. by says how it is given.
func (r *hintReader) worker(id, rank hint, by string) *kv.WorkerKey {
	if id.text != "" {
		return &kv.WorkerKey{Worker: r.id(id), Rank: uint32(r.whole(rank, 32))}
	}
	if rank.text != "" {
		r.fail(rank, "given together with a worker id ("+by+")")
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
		r.bad = &Error{h.param, want, h.text}
	}
}

// object reports whether v is an object; nothing and null are none.
func (r *hintReader) object(param string, v gjson.Result) bool {
	if raw := rawOf(v); raw != "" && !v.IsObject() {
		r.fail(hint{param, raw}, "an object")
	}
	return v.IsObject()
}

// maxAnnotations bounds the annotations of a request.
const maxAnnotations = 1024

// annotations reads entries of the forms "name" and "name:value".
func (r *hintReader) annotations(list gjson.Result, into *Hints) {
	if raw := rawOf(list); raw != "" && !list.IsArray() {
		r.fail(hint{"nvext.annotations", raw}, "a list of strings")
		return
	}
	entries, ok := jsonbody.Elements(list, maxAnnotations)
	if !ok {
		r.fail(hint{"nvext.annotations", fmt.Sprintf("more than %d", maxAnnotations)}, fmt.Sprintf("at most %d strings", maxAnnotations))
	}
	if slices.ContainsFunc(entries, func(entry gjson.Result) bool { return entry.Type != gjson.String }) {
		r.fail(hint{"nvext.annotations", list.Raw}, "a list of strings")
		return
	}
	for _, entry := range entries {
		switch name, value, _ := strings.Cut(entry.Str, ":"); {
		case name == AnnotationQuery:
			into.Query = true
		case name == annotationWorker && value != "":
			into.Pinned = &kv.WorkerKey{Worker: r.id(hint{"nvext.annotations", value})}
		}
	}
	r.prefixAnnotations(entries, &into.Prefix)
}

// agentHints reads priorities, the expected length of the answer and the series
// of requests that this one belongs to. Clients
// that send a latency sensitivity may send beside it a priority that falls with
// urgency: the sensitivity counts then.
func (r *hintReader) agentHints(hints gjson.Result, into *Hints) {
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

// id reads a worker's id, or finds that of its name, which is a string in a body.
func (r *hintReader) id(h hint) uint64 {
	name := h.text
	if v := gjson.Parse(name); v.Type == gjson.String {
		name = v.Str
	}
	if id, found := r.names.ID(name); found {
		return id
	}
	if _, err := strconv.ParseUint(h.text, 10, 64); err != nil && r.names.Any() {
		if r.trusted {
			r.fail(h, "the name of a known worker, or an id")
		}
		return 0
	}
	return r.whole(h, 64)
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
