package proxy

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/fleet/control"
)

const (
	// askedAtOnce is the number of workers that are asked side by side.
	askedAtOnce = 64
	// modelsTimeout bounds the asking of a worker for its models, modelsLimit its
	// answer (bytes) and maxModels the models that are listed.
	modelsTimeout = time.Second
	modelsLimit   = 1 << 20
	maxModels     = 10_000
)

// checkStatus refuses a status that cannot be passed on: none of HTTP, or one that
// is no final answer.
func checkStatus(response *http.Response) error {
	if response.StatusCode < http.StatusOK || response.StatusCode > 999 {
		return fmt.Errorf("answered with status %03d", response.StatusCode)
	}
	return nil
}

// Question is a short request to several workers.
type Question struct {
	Method, Path string
	Header       http.Header
	Body         []byte
	Limit        int64         // of each answer, bytes; 0: askLimit
	Patience     time.Duration // for each answer; 0: askTimeout
	Rolling      int           // workers that are asked at once, and get no requests meanwhile; 0: any number, and they do
}

// changes returns what the question does to an engine.
func (q *Question) changes() (change kv.EngineChange) {
	if change = control.ChangeOf(q.Path, q.Body); q.Rolling > 0 {
		change.Meanwhile |= kv.Paused
	}
	return change
}

// Answer is one worker's answer to a Question.
type Answer struct {
	Target kv.Target
	Status int
	Body   []byte
	Err    error // the worker did not answer
}

// AskAll queries all targets concurrently, with the limits of Ask for each, and
// calls heard with each answer as it arrives, until heard returns false; then it
// does not wait for the others. Calls of heard are sequential.
func (p *Proxy) AskAll(ctx context.Context, targets []kv.Target, q Question, heard func(Answer) bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	answers := make(chan Answer, len(targets)) // a late answer blocks no goroutine
	slots := make(chan struct{}, cmp.Or(q.Rolling, askedAtOnce))
	go func() { // ends with ctx at the latest
		for _, t := range targets {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
				answers <- Answer{Target: t, Err: ctx.Err()}
				continue
			}
			go func() { // ends with Ask
				defer func() { <-slots }()
				a := Answer{Target: t}
				a.Status, a.Body, a.Err = p.ask(ctx, t, q)
				answers <- a
			}()
		}
	}()
	for range targets {
		if !heard(<-answers) {
			return
		}
	}
}

// Pass sends a request to a worker and its answer to w as it comes, for as long as the worker is
// not silent. An error other than ErrAnswered means that nothing was written to w.
func (p *Proxy) Pass(ctx context.Context, w http.ResponseWriter, t kv.Target, q Question) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	heard := func() {}
	if timeout := p.settings.RequestTimeout; timeout > 0 {
		timer := time.AfterFunc(timeout, func() { cancel(ErrSilent) })
		defer timer.Stop()
		heard = func() { timer.Reset(timeout) }
	}
	request, err := http.NewRequestWithContext(ctx, q.Method, t.URL+q.Path, bytes.NewReader(q.Body))
	if err != nil {
		return err
	}
	request.Header = p.header(q.Header, t)
	response, err := p.client.Do(request)
	if err == nil {
		defer response.Body.Close()
		err = checkStatus(response)
	}
	if err != nil {
		return p.unanswered(t.Key.Worker, cause(ctx, err), health.Refused)
	}
	answer := &upstreamAnswer{Response: response, ctx: ctx, heard: heard, sent: new(inflight)}
	web.DropHopByHop(response.Header)
	dropOwn(response.Header)
	response.Header.Del(web.HeaderRequest)
	maps.Copy(w.Header(), response.Header)
	w.WriteHeader(response.StatusCode)
	memory := p.streams.Get().(*streamBuffer)
	defer p.streams.Put(memory)
	stream := answer.kind() == "text/event-stream" && encoding(response.Header) == ""
	events := eventScanner{Numbered: true}
	for {
		n, err := answer.Read(memory.buffer[:])
		part := memory.buffer[:n]
		if stream {
			part = events.Scan(part)
		}
		if err == io.EOF && stream {
			part = append(part, events.End()...)
		}
		if len(part) > 0 {
			if _, err := w.Write(part); err != nil {
				return errors.Join(ErrAnswered, err)
			}
			_ = http.NewResponseController(w).Flush()
		}
		switch {
		case err == nil:
			continue
		case err == io.EOF || events.done:
			return nil
		case stream:
			events.tell(w, ResponsesRoute, failure(p.names.Label(t.Key.Worker), err, ""))
		default:
			cutOff(w)
		}
		return errors.Join(ErrAnswered, err)
	}
}

// Models lists the workers' models, each as the first of the targets that serves it
// describes it. For a worker that does not answer within 1 s, the names of its
// target are listed.
func (p *Proxy) Models(ctx context.Context, targets []kv.Target, header http.Header) []json.RawMessage {
	ctx, cancel := context.WithTimeout(ctx, modelsTimeout)
	defer cancel()
	told := make(map[uint64][]byte, len(targets))
	p.AskAll(ctx, targets, Question{Method: http.MethodGet, Path: "/v1/models", Header: header, Limit: modelsLimit}, func(a Answer) bool {
		if a.Err == nil && a.Status == http.StatusOK && gjson.ValidBytes(a.Body) {
			told[a.Target.Key.Worker] = a.Body
		}
		return true
	})
	list := []json.RawMessage{}
	seen := map[string]bool{}
	add := func(name string, card []byte) bool {
		if !seen[name] && len(list) < maxModels {
			seen[name] = true
			list = append(list, card)
		}
		return len(list) < maxModels
	}
	for _, t := range targets {
		gjson.GetBytes(told[t.Key.Worker], "data").ForEach(func(_, m gjson.Result) bool {
			return !m.IsObject() || add(m.Get("id").String(), []byte(m.Raw))
		})
	}
	for _, t := range targets {
		for _, name := range t.Models {
			if told[t.Key.Worker] == nil {
				add(name, ModelCard(name))
			}
		}
	}
	return list
}

// ModelCard returns the description of a model of which only the name is known.
func ModelCard(name string) json.RawMessage {
	return fmt.Appendf(nil, `{"id":%s,"object":"model","created":0,"owned_by":"kvrouter"}`, Quoted(name))
}
