package mocker

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/tools/engine"
)

// Values of --mock kv-load-failure.
const (
	loadFailureRecompute = "recompute"
	loadFailureFail      = "fail"
)

// transferPath is where the decode worker of a pair finds the prefill
// worker's part of it. It stands for NIXL's side channel and for SGLang's
// bootstrap server: as long as the request for it is open the prompt's blocks
// are kept.
const transferPath = "/mock/transfer"

// headerCached reports, with a prompt, how much of it the prefill worker had in its
// cache, tokens.
const headerCached = "X-Mock-Cached-Tokens"

// joinLimit bounds the wait for a prefill worker that has the prompt already.
const joinLimit = 5 * time.Second

// rooms are the prompts that a mock worker computes for others, by the name
// under which those fetch them.
type rooms struct {
	mu   sync.Mutex // guards what follows, and the rooms' users, owned and taken
	byID map[string]*sglangRoom
}

// sglangRoom is where the two legs of a request meet. It is gone when both have
// left. Each channel is closed once.
type sglangRoom struct {
	users    int
	owned    bool          // a prefill leg has come
	taken    bool          // a decode worker has come
	joined   chan struct{} // the same
	left     chan struct{} // it has gone
	computed chan struct{} // the prompt can be fetched
	ended    chan struct{} // the prefill leg is over
	cached   int           // tokens of the prompt that were not to be computed; valid once it can be fetched
}

// enter returns the room of that name; nil: there is none and none may be made.
// Else leave must follow.
func (r *rooms) enter(id string, create bool) *sglangRoom {
	r.mu.Lock()
	defer r.mu.Unlock()
	room := r.byID[id]
	if room == nil {
		if !create {
			return nil
		}
		room = &sglangRoom{joined: make(chan struct{}), left: make(chan struct{}), computed: make(chan struct{}), ended: make(chan struct{})}
		if r.byID == nil {
			r.byID = map[string]*sglangRoom{}
		}
		r.byID[id] = room
	}
	room.users++
	return room
}

// own is enter for a prefill leg; nil: another has the room.
func (r *rooms) own(id string) *sglangRoom {
	room := r.enter(id, true)
	if !r.first(&room.owned) {
		r.leave(id, room)
		return nil
	}
	return room
}

func (r *rooms) leave(id string, room *sglangRoom) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if room.users--; room.users == 0 {
		delete(r.byID, id)
	}
}

// Transfers returns the number of prompts that the worker computes for others.
func (w *Worker) Transfers() int {
	w.rooms.mu.Lock()
	defer w.rooms.mu.Unlock()
	return len(w.rooms.byID)
}

// first sets a flag of a room and reports whether the caller is the first to.
func (r *rooms) first(flag *bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	was := *flag
	*flag = true
	return !was
}

// transfer is the part of a request that has to do with its other leg. With vLLM
// only the first choice has one: a prompt is handed over once.
type transfer struct {
	w      *Worker
	choice *Choice
	kind   kv.Kind
	id     string      // of the room
	room   *sglangRoom // of a prefill leg
	source string      // URL of a decode leg's room
	cached int         // found in the cache by the prefill leg, tokens
}

// transfers are those of a request, by prompt.
type transfers []*transfer

// transfers reads a request's fields on its other leg; it may have none. A
// prefill leg must be closed. SGLang's prompts have a room each.
func (w *Worker) transfers(body *jsonbody.Body, answer *Answer) (all transfers) {
	if w.sglang() && answer.samples > 1 { // SGLang has no room for them
		return nil
	}
	for i, choice := range answer.choices {
		if t := w.transfer(body, choice, i); t != nil {
			all = append(all, t)
		}
		if !w.sglang() {
			break
		}
	}
	return all
}

// ready waits for the decode workers of all.
func (all transfers) ready(ctx context.Context) *refusal {
	for _, t := range all {
		if problem := t.ready(ctx); problem != nil {
			return problem
		}
	}
	return nil
}

// computed hands all prompts over.
func (all transfers) computed(ctx context.Context, rank *Rank) *refusal {
	for _, t := range all {
		t.release()
	}
	for _, t := range all {
		if problem := t.computed(ctx, rank); problem != nil {
			return problem
		}
	}
	return nil
}

func (all transfers) close(rank *Rank) {
	for _, t := range all {
		t.close(rank)
	}
}

// itemOf is a field's value for prompt i: it may be a list with an entry for each.
func itemOf(v gjson.Result, i int) gjson.Result {
	if v.IsArray() {
		return v.Get(strconv.Itoa(i))
	}
	return v
}

// bootstrapRoom is the name of the room of prompt i, where the request has one: the
// rooms of several prompts follow one another.
func bootstrapRoom(body *jsonbody.Body, i int) (id string, ok bool) {
	field := body.Get("bootstrap_room")
	v := itemOf(field, i)
	if v.Type != gjson.Number {
		return "", false
	}
	if number, err := strconv.ParseInt(v.Raw, 10, 64); err == nil && !field.IsArray() {
		return strconv.FormatInt(number+int64(i), 10), true
	}
	return v.Raw, true
}

// transfer is that of a request's choice i; nil: it has none.
func (w *Worker) transfer(body *jsonbody.Body, choice *Choice, i int) *transfer {
	answer := choice.Answer
	t := &transfer{w: w, choice: choice, kind: w.part.Kind}
	room, hasRoom := bootstrapRoom(body, i)
	switch params := body.Get("kv_transfer_params"); {
	case t.kind == kv.KindNIXL && params.Get("do_remote_decode").Bool():
		t.id = answer.id + "-" + rand.Text() // as vLLM's own: attempts at a request have the same id
		t.room = w.rooms.own(t.id)
	case t.kind == kv.KindNIXL && params.Get("do_remote_prefill").Bool():
		if blocks := params.Get("remote_block_ids.0"); !blocks.Exists() || IsNull(params.Get("remote_engine_id")) ||
			IsNull(params.Get("remote_request_id")) ||
			IsNull(params.Get("remote_host")) || IsNull(params.Get("remote_port")) {
			w.log.Warn("mock worker: prefill request without a bootstrap room", "worker", w.number)
			return nil
		}
		t.source = transferURL(params.Get("remote_host").String(), params.Get("remote_port").String(), params.Get("remote_request_id").String(),
			params.Get("remote_engine_id").String())
	case t.kind == kv.KindSGLang && w.part.Role == kv.RolePrefill && hasRoom:
		t.id = room
		if t.room = w.rooms.own(t.id); t.room == nil {
			w.log.Warn("mock worker: second prefill request for a bootstrap room", "worker", w.number, "room", t.id)
			return nil
		}
	case t.kind == kv.KindSGLang && w.part.Role == kv.RoleDecode && hasRoom:
		port := cmp.Or(itemOf(body.Get("bootstrap_port"), i).Raw, strconv.Itoa(kv.SGLangPort))
		t.source = transferURL(itemOf(body.Get("bootstrap_host"), i).String(), port, room, "")
	default:
		return nil
	}
	choice.request.Keep, choice.request.Fetch = t.room != nil, t.source != ""
	choice.fetching = make(chan struct{})
	return t
}

func transferURL(host, port, id, engine string) string {
	query := url.Values{"id": {id}, "engine": {engine}}
	return "http://" + net.JoinHostPort(host, port) + transferPath + "?" + query.Encode()
}

// prefillsFor reports whether a request is the prefill leg of an SGLang pair, which
// has the limits of the whole one.
func (w *Worker) prefillsFor(body *jsonbody.Body) bool {
	_, hasRoom := bootstrapRoom(body, 0)
	return w.part.Kind == kv.KindSGLang && w.part.Role == kv.RolePrefill && hasRoom
}

// ready waits, before a prompt is computed, until there is memory for it at the
// decode worker, where that has to come first.
func (t *transfer) ready(ctx context.Context) *refusal {
	if t.room == nil || t.kind != kv.KindSGLang {
		return nil
	}
	return t.wait(ctx, t.room.joined, "no decode worker has joined bootstrap room "+t.id)
}

// wait waits for one of the room's channels.
func (t *transfer) wait(ctx context.Context, c <-chan struct{}, otherwise string) *refusal {
	limit := t.w.cfg.BootstrapTimeout
	select {
	case <-c:
		return nil
	case <-time.After(limit):
		otherwise = fmt.Sprintf("%s within %s", otherwise, limit)
	case <-ctx.Done():
	}
	return &refusal{http.StatusInternalServerError, "InternalServerError", otherwise, ""}
}

// release lets a prefill leg's prompt be fetched.
func (t *transfer) release() {
	if t.room != nil {
		t.room.cached = int(t.choice.cached.Load())
		close(t.room.computed)
	}
}

// computed is called when a request has all its tokens, before that is sent. Of
// a prefill leg SGLang answers once the prompt has been fetched, vLLM at once: it
// says where the blocks are, and keeps them until they have been fetched or
// they were not requested in time.
func (t *transfer) computed(ctx context.Context, rank *Rank) *refusal {
	if t.room == nil {
		return nil
	}
	if t.kind == kv.KindSGLang {
		return t.wait(ctx, t.room.left, "the decode worker has not fetched the prompt of bootstrap room "+t.id)
	}
	w, room := t.w, t.room
	t.choice.Answer.transfer = string(MustJSON(map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]uint32{t.choice.blocks},
		"remote_engine_id": w.engineID(), "remote_request_id": t.id, "remote_host": w.cfg.host(), "remote_port": w.cfg.Ports.HTTP + w.number,
		"tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": t.choice.prompt, "remote_blocks_expiry_time": nil,
		"transfer_mode": "pull",
	}))
	t.room = nil // passes to the owner of the blocks
	w.beside.Go(func() {
		defer w.rooms.leave(t.id, room)
		defer close(room.ended)
		defer rank.Do(func(e *engine.Engine) { e.Abort(t.choice.request) })
		select {
		case <-room.joined:
		case <-time.After(w.cfg.KVLease):
			return
		case <-w.ctx.Done():
			return
		}
		select {
		case <-room.left:
		case <-w.ctx.Done():
		}
	})
	return nil
}

// close ends the request's part in its room, and lets the blocks go.
func (t *transfer) close(rank *Rank) {
	if t.room == nil {
		return
	}
	close(t.room.ended)
	t.w.rooms.leave(t.id, t.room)
	rank.Do(func(e *engine.Engine) { e.Abort(t.choice.request) })
}

// engineID is vLLM's name of this incarnation.
func (w *Worker) engineID() string {
	return fmt.Sprintf("mock-%d-%d", w.number, w.started.UnixNano())
}

// joinRoom serves transferPath: it answers when the prompt can be fetched,
// and the answer ends when the asker has, or when the prompt is gone.
func (w *Worker) joinRoom(out http.ResponseWriter, in *http.Request) {
	id, engine := in.URL.Query().Get("id"), in.URL.Query().Get("engine")
	var room *sglangRoom
	if engine == "" || engine == w.engineID() {
		room = w.rooms.enter(id, w.part.Kind == kv.KindSGLang)
	}
	if room == nil {
		http.Error(out, "nothing is kept under that name", http.StatusNotFound)
		return
	}
	defer w.rooms.leave(id, room)
	if !w.rooms.first(&room.taken) {
		http.Error(out, "another decode worker has already connected", http.StatusConflict)
		return
	}
	defer close(room.left)
	close(room.joined)
	select {
	case <-room.computed:
	case <-room.ended:
		http.Error(out, "the prompt will not be computed", http.StatusGone)
		return
	case <-time.After(w.cfg.BootstrapTimeout):
		http.Error(out, "the prompt does not come", http.StatusGatewayTimeout)
		return
	case <-in.Context().Done():
		return
	case <-w.ctx.Done():
		return
	}
	out.Header().Set(headerCached, strconv.Itoa(room.cached))
	out.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(out).Flush()
	select {
	case <-room.ended:
	case <-in.Context().Done():
	case <-w.ctx.Done():
	}
}

// errPromptLost is the error of a prompt lost after its transfer had begun.
var errPromptLost = errors.New("the prefill worker is gone")

// fetch transfers a decode leg's prompt and notifies the engine. It ends with ctx.
func (t *transfer) fetch(ctx context.Context, rank *Rank, failed chan<- *refusal) {
	err := t.bring(ctx, rank)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.w.log.Warn("mock worker: KV transfer failed", "worker", t.w.number, "error", err)
		if t.kind == kv.KindSGLang || t.w.cfg.KVLoadFailure == loadFailureFail {
			message := "the prompt could not be fetched"
			if t.w.sglang() {
				message = "Decode transfer failed"
			}
			failed <- &refusal{http.StatusInternalServerError, "InternalServerError", fmt.Sprintf("%s: %v", message, err), ""}
			return
		}
	}
	rank.Do(func(e *engine.Engine) {
		e.Fetched(t.choice.request, err == nil)
		if t.w.sglang() { // it repeats the prefill leg's answer
			t.choice.request.Cached, t.choice.request.Missing = t.cached, 0
		}
	})
}

// bring fetches the prompt once the engine has blocks for it. vLLM lets the
// prefill worker know from the start that it will.
func (t *transfer) bring(ctx context.Context, rank *Rank) error {
	var from *prompt
	var err error
	if t.kind == kv.KindNIXL {
		from, err = t.join(ctx, joinLimit)
	}
	if err == nil && from != nil {
		defer from.Close()
	}
	select {
	case <-t.choice.fetching:
	case <-ctx.Done():
		return ctx.Err()
	}
	if t.kind == kv.KindSGLang {
		if from, err = t.join(ctx, t.w.cfg.BootstrapTimeout); err == nil {
			defer from.Close()
		}
	}
	if err != nil {
		return err
	}
	t.cached = from.cached
	gone := make(chan struct{})
	t.w.beside.Go(func() { // ends with from.Close at the latest
		_, _ = io.Copy(io.Discard, from)
		close(gone)
	})
	takes := t.w.cfg.Handover().Takes(t.choice.request.Missing)
	if ratio := t.w.cfg.SpeedupRatio; ratio > 0 {
		takes = time.Duration(float64(takes) / ratio)
	} else {
		takes = 0
	}
	select {
	case <-time.After(takes):
		rank.Counts.ExternalHits.Add(int64(t.choice.request.Missing))
		return nil
	case <-gone:
		return errPromptLost
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join requests the prompt and waits until it can be fetched. What it returns is
// to be closed once it has been.
func (t *transfer) join(ctx context.Context, limit time.Duration) (*prompt, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(fmt.Errorf("the prefill worker did not answer within %s", limit)) })
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, t.source, nil)
	if err == nil {
		var response *http.Response
		if response, err = t.w.client.Do(request); err == nil {
			if timer.Stop() && response.StatusCode == http.StatusOK {
				cached, _ := strconv.Atoi(response.Header.Get(headerCached)) // none: 0
				return &prompt{response.Body, cancel, max(0, cached)}, nil
			}
			why, _ := io.ReadAll(io.LimitReader(response.Body, 200))
			response.Body.Close()
			err = fmt.Errorf("%s: %s", response.Status, strings.TrimSpace(string(why)))
		}
	}
	timer.Stop()
	err = cmp.Or(context.Cause(ctx), err)
	cancel(nil)
	return nil, err
}

// prompt is an open request for a prompt.
type prompt struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
	cached int // tokens that were in the prefill worker's cache
}

func (p *prompt) Close() error {
	p.cancel(nil)
	return p.ReadCloser.Close()
}

// pairInfo is the part of SGLang's /server_info that describes prefill and decode.
func (w *Worker) pairInfo(out http.ResponseWriter, in *http.Request) {
	if w.part.Kind != kv.KindSGLang {
		http.NotFound(out, in)
		return
	}
	answerJSON(out, http.StatusOK, map[string]any{"disaggregation_mode": w.part.Role.String(),
		"disaggregation_bootstrap_port": w.part.Bootstrap.Port, "dist_init_addr": nil})
}

// inference is a request that SGLang's /abort_request can name.
type inference struct {
	rid   string
	abort func()
}

// named notes requests with their names until done is called.
func (w *Worker) named(list ...*inference) (done func()) {
	w.mu.Lock()
	w.running = append(w.running, list...)
	w.mu.Unlock()
	return func() {
		w.mu.Lock()
		w.running = slices.DeleteFunc(w.running, func(r *inference) bool { return slices.Contains(list, r) })
		w.mu.Unlock()
	}
}

// abortRequest ends all requests, or those with names that begin with rid. SGLang does so
// only where one has just that name.
func (w *Worker) abortRequest(out http.ResponseWriter, in *http.Request) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	rid, all := body.Get("rid").String(), body.Get("abort_all").Bool()
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.sglang() && !all && !slices.ContainsFunc(w.running, func(r *inference) bool { return r.rid == rid }) {
		return
	}
	for _, r := range w.running {
		if all || rid != "" && strings.HasPrefix(r.rid, rid) {
			r.abort()
		}
	}
}
