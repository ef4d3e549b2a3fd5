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

	"kvrouter/internal/engine"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/kv"
)

// Values of --mock-kv-load-failure.
const (
	loadFailureRecompute = "recompute"
	loadFailureFail      = "fail"
)

// transferPath is where the decode worker of a pair finds the prefill
// worker's part of it. It stands for NIXL's side channel and for SGLang's
// bootstrap server: as long as the request for it is open the prompt's blocks
// are kept.
const transferPath = "/mock/transfer"

// joinLimit bounds the wait for a prefill worker that has the prompt already.
const joinLimit = 5 * time.Second

// rooms are the prompts that a mock worker computes for others, by the name
// under which those ask for them.
type rooms struct {
	Mu   sync.Mutex // guards what follows, and the rooms' users, owned and taken
	ByID map[string]*sglangRoom
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
}

// enter returns the room of that name; nil: there is none and none is to be made.
// Else leave must follow.
func (r *rooms) enter(id string, create bool) *sglangRoom {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	room := r.ByID[id]
	if room == nil {
		if !create {
			return nil
		}
		room = &sglangRoom{joined: make(chan struct{}), left: make(chan struct{}), computed: make(chan struct{}), ended: make(chan struct{})}
		if r.ByID == nil {
			r.ByID = map[string]*sglangRoom{}
		}
		r.ByID[id] = room
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
	r.Mu.Lock()
	defer r.Mu.Unlock()
	if room.users--; room.users == 0 {
		delete(r.ByID, id)
	}
}

// first sets a flag of a room and tells whether the caller is the first to.
func (r *rooms) first(flag *bool) bool {
	r.Mu.Lock()
	defer r.Mu.Unlock()
	was := *flag
	*flag = true
	return !was
}

// transfer is the part of a request that has to do with its other leg. Only
// the first choice has one: a prompt is handed over once.
type transfer struct {
	w      *Worker
	choice *Choice
	kind   kv.Kind
	id     string      // of the room
	room   *sglangRoom // of a prefill leg
	source string      // URL of a decode leg's room
}

// transfer reads what a request says of its other leg; nil: it has none. A
// prefill leg must be closed.
func (w *Worker) transfer(body *jsonbody.Body, answer *Answer) *transfer {
	choice := answer.choices[0]
	t := &transfer{w: w, choice: choice, kind: w.part.Kind}
	switch params := body.Get("kv_transfer_params"); {
	case t.kind == kv.KindNIXL && params.Get("do_remote_decode").Bool():
		t.id = answer.id + "-" + rand.Text() // as vLLM's own: attempts at a request have the same id
		t.room = w.Rooms.own(t.id)
	case t.kind == kv.KindNIXL && params.Get("do_remote_prefill").Bool():
		if blocks := params.Get("remote_block_ids.0"); !blocks.Exists() || IsNull(params.Get("remote_engine_id")) || IsNull(params.Get("remote_request_id")) ||
			IsNull(params.Get("remote_host")) || IsNull(params.Get("remote_port")) {
			w.log.Warn("a mock worker computes a prompt that nobody says where to fetch", "worker", w.number)
			return nil
		}
		t.source = transferURL(params.Get("remote_host").String(), params.Get("remote_port").String(), params.Get("remote_request_id").String(), params.Get("remote_engine_id").String())
	case t.kind == kv.KindSGLang && w.part.Role == kv.RolePrefill && body.Get("bootstrap_room").Type == gjson.Number:
		t.id = body.Get("bootstrap_room").Raw
		if t.room = w.Rooms.own(t.id); t.room == nil {
			w.log.Warn("a mock worker computes a second prompt for a bootstrap room, which nobody will fetch", "worker", w.number, "room", t.id)
			return nil
		}
	case t.kind == kv.KindSGLang && w.part.Role == kv.RoleDecode && body.Get("bootstrap_room").Type == gjson.Number:
		port := cmp.Or(body.Get("bootstrap_port").Raw, strconv.Itoa(kv.SGLangPort))
		t.source = transferURL(body.Get("bootstrap_host").String(), port, body.Get("bootstrap_room").Raw, "")
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

// prefillsFor tells whether a request is the prefill leg of an SGLang pair, which
// has the limits of the whole one.
func (w *Worker) prefillsFor(body *jsonbody.Body) bool {
	return w.part.Kind == kv.KindSGLang && w.part.Role == kv.RolePrefill && body.Get("bootstrap_room").Type == gjson.Number
}

// ready waits, before a prompt is computed, until there is memory for it at the
// decode worker, where that has to come first.
func (t *transfer) ready(ctx context.Context) *refusal {
	if t == nil || t.room == nil || t.kind != kv.KindSGLang {
		return nil
	}
	return t.wait(ctx, t.room.joined, "no decode worker has joined bootstrap room "+t.id)
}

// wait waits for one of the room's channels.
func (t *transfer) wait(ctx context.Context, c <-chan struct{}, otherwise string) *refusal {
	limit := t.w.cfg.MockBootstrapTimeout
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-c:
		return nil
	case <-timer.C:
		otherwise = fmt.Sprintf("%s within %s", otherwise, limit)
	case <-ctx.Done():
	}
	return &refusal{http.StatusInternalServerError, "InternalServerError", otherwise, ""}
}

// computed is called when a request has all its tokens, before that is told. Of
// a prefill leg SGLang tells once the prompt has been fetched, vLLM at once: it
// says where the blocks are, and keeps them until they have been fetched or
// nobody has asked for them in time.
func (t *transfer) computed(ctx context.Context, rank *Rank) *refusal {
	if t == nil || t.room == nil {
		return nil
	}
	close(t.room.computed)
	if t.kind == kv.KindSGLang {
		return t.wait(ctx, t.room.left, "the decode worker has not fetched the prompt of bootstrap room "+t.id)
	}
	w, room := t.w, t.room
	t.choice.Answer.transfer = string(MustJSON(map[string]any{
		"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [][]uint32{t.choice.blocks},
		"remote_engine_id": w.engineID(), "remote_request_id": t.id, "remote_host": "127.0.0.1", "remote_port": w.cfg.Ports.HTTP + w.number,
		"tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": t.choice.prompt, "remote_blocks_expiry_time": nil, "transfer_mode": "pull",
	}))
	t.room = nil // goes over to the one who keeps the blocks
	w.beside.Go(func() {
		defer w.Rooms.leave(t.id, room)
		defer close(room.ended)
		defer rank.Do(func(e *engine.Engine) { e.Abort(t.choice.request) })
		lease := time.NewTimer(w.cfg.MockKVLease)
		defer lease.Stop()
		select {
		case <-room.joined:
		case <-lease.C:
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
	if t == nil || t.room == nil {
		return
	}
	close(t.room.ended)
	t.w.Rooms.leave(t.id, t.room)
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
		room = w.Rooms.enter(id, w.part.Kind == kv.KindSGLang)
	}
	if room == nil {
		http.Error(out, "nothing is kept under that name", http.StatusNotFound)
		return
	}
	defer w.Rooms.leave(id, room)
	if !w.Rooms.first(&room.taken) {
		http.Error(out, "another decode worker has come already", http.StatusConflict)
		return
	}
	defer close(room.left)
	close(room.joined)
	timer := time.NewTimer(w.cfg.MockBootstrapTimeout)
	defer timer.Stop()
	select {
	case <-room.computed:
	case <-room.ended:
		http.Error(out, "the prompt will not be computed", http.StatusGone)
		return
	case <-timer.C:
		http.Error(out, "the prompt does not come", http.StatusGatewayTimeout)
		return
	case <-in.Context().Done():
		return
	case <-w.ctx.Done():
		return
	}
	out.WriteHeader(http.StatusOK)
	_ = http.NewResponseController(out).Flush()
	select {
	case <-room.ended:
	case <-in.Context().Done():
	case <-w.ctx.Done():
	}
}

// errPromptLost is why a prompt does not come whose transfer had begun.
var errPromptLost = errors.New("the prefill worker has gone")

// fetch has a decode leg's prompt come, and tells the engine. It ends with ctx.
func (t *transfer) fetch(ctx context.Context, rank *Rank, failed chan<- *refusal) {
	err := t.bring(ctx, rank)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.w.log.Warn("a mock worker could not fetch a prompt", "worker", t.w.number, "error", err)
		if t.kind == kv.KindSGLang || t.w.cfg.MockKVLoadFailure == loadFailureFail {
			failed <- &refusal{http.StatusInternalServerError, "InternalServerError", fmt.Sprintf("the prompt could not be fetched: %v", err), ""}
			return
		}
	}
	rank.Do(func(e *engine.Engine) { e.Fetched(t.choice.request, err == nil) })
}

// bring fetches the prompt once the engine has blocks for it. vLLM lets the
// prefill worker know from the start that it will.
func (t *transfer) bring(ctx context.Context, rank *Rank) error {
	var from io.ReadCloser
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
		if from, err = t.join(ctx, t.w.cfg.MockBootstrapTimeout); err == nil {
			defer from.Close()
		}
	}
	if err != nil {
		return err
	}
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
	timer := time.NewTimer(takes)
	defer timer.Stop()
	select {
	case <-timer.C:
		rank.Counts.ExternalHits.Add(int64(t.choice.request.Missing))
		return nil
	case <-gone:
		return errPromptLost
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join asks for the prompt and waits until it can be fetched. What it returns is
// to be closed once it has been.
func (t *transfer) join(ctx context.Context, limit time.Duration) (io.ReadCloser, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(limit, func() { cancel(fmt.Errorf("the prefill worker has not answered within %s", limit)) })
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, t.source, nil)
	if err == nil {
		var response *http.Response
		if response, err = t.w.client.Do(request); err == nil {
			if timer.Stop() && response.StatusCode == http.StatusOK {
				return &prompt{response.Body, cancel}, nil
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
}

func (p *prompt) Close() error {
	p.cancel(nil)
	return p.ReadCloser.Close()
}

// serverInfo is the part of SGLang's that tells of prefill and decode.
func (w *Worker) serverInfo(out http.ResponseWriter, in *http.Request) {
	if w.part.Kind != kv.KindSGLang {
		http.NotFound(out, in)
		return
	}
	answerJSON(out, http.StatusOK, map[string]any{"disaggregation_mode": w.part.Role.String(), "disaggregation_bootstrap_port": w.part.Bootstrap.Port, "dist_init_addr": nil})
}

// inference is a request that SGLang's /abort_request can name.
type inference struct {
	rid    string
	cancel context.CancelFunc
}

// named notes a request with a name until done is called.
func (w *Worker) named(rid string, cancel context.CancelFunc) (done func()) {
	running := &inference{rid, cancel}
	w.Mu.Lock()
	w.Running = append(w.Running, running)
	w.Mu.Unlock()
	return func() {
		w.Mu.Lock()
		w.Running = slices.DeleteFunc(w.Running, func(r *inference) bool { return r == running })
		w.Mu.Unlock()
	}
}

// abortRequest ends the requests whose name begins with rid, or all.
func (w *Worker) abortRequest(out http.ResponseWriter, in *http.Request) {
	body, ok := w.body(out, in)
	if !ok {
		return
	}
	rid := body.Get("rid").String()
	w.Mu.Lock()
	defer w.Mu.Unlock()
	for _, r := range w.Running {
		if body.Get("abort_all").Bool() || rid != "" && strings.HasPrefix(r.rid, rid) {
			r.cancel()
		}
	}
}
