package proxy

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
)

const (
	// bootstrapTimeout bounds a question to a bootstrap server.
	bootstrapTimeout = 2 * time.Second
	// watchEvery is the time between two checks of a prefill worker whose blocks are
	// being fetched.
	watchEvery = 500 * time.Millisecond
	// engineKept is the time that an engine id is taken for granted: a worker that was
	// started again has another, and a decode worker that does not know the one it
	// is given silently recomputes the prompt. enginesKept bounds the ids.
	engineKept  = 5 * time.Second
	enginesKept = 4096
)

// errPrefillGone ends a decode leg for which its prefill worker kept blocks.
var errPrefillGone = errors.New("it went down with the prompt's blocks")

// mooncakeEngine is the engine id of one incarnation of a worker's rank.
type mooncakeEngine struct {
	generation int
	id         string
	asked      time.Time
}

// mooncakeEngines remembers the engine ids of prefill workers.
type mooncakeEngines struct {
	mu  sync.Mutex // guards ids
	ids map[kv.WorkerKey]mooncakeEngine
}

// mooncakeParams returns the transfer parameters of both legs of a Mooncake
// pair; engine is the prefill worker's engine id.
func mooncakeParams(at kv.Bootstrap, engine, transfer string) (prefill, decode string) {
	id := Quoted(transfer)
	return fmt.Sprintf(`{"do_remote_decode":true,"do_remote_prefill":false,"transfer_id":%s}`, id),
		fmt.Sprintf(`{"do_remote_decode":false,"do_remote_prefill":true,"remote_bootstrap_addr":%s,"remote_engine_id":%s,"transfer_id":%s}`,
			Quoted("http://"+at.String()), Quoted(engine), id)
}

// cutShort reports whether a vLLM worker's answer, of any route, ended because it
// had the most tokens allowed.
func cutShort(answer []byte) bool {
	for _, why := range gjson.GetManyBytes(answer, "choices.0.finish_reason", "stop_reason", "incomplete_details.reason") {
		switch why.Str {
		case "length", "max_tokens", "max_output_tokens":
			return true
		}
	}
	return false
}

// watchPrefill ends the decode leg if the prefill worker goes before the answer
// begins: a Mooncake decode worker that waits for its blocks would not notice for
// 540 s. Whether it has them already is unknown for an answer that does not
// stream, so the watch ends with the time that the first event may take.
func (p *Proxy) watchPrefill(ctx context.Context, l legs, end context.CancelCauseFunc) {
	look := time.NewTicker(watchEvery)
	defer look.Stop()
	late := time.NewTimer(p.settings.DisaggHandoverTimeout)
	defer late.Stop()
	worker := l.pair.Prefill.Target
	for {
		select {
		case <-ctx.Done():
			return
		case <-late.C:
			return
		case <-look.C:
		}
		if l.shared.hasStarted() {
			return
		}
		if !l.decode.chooser.IsUp(worker) {
			end(&PrefillFailure{worker.Key.Worker, l.shared.Worker, errPrefillGone})
			return
		}
	}
}

// engineID returns the engine id of a Mooncake prefill worker, as its bootstrap
// server reports it.
func (p *Proxy) engineID(ctx context.Context, t kv.Target) (string, error) {
	p.engines.mu.Lock()
	known := p.engines.ids[t.Key]
	p.engines.mu.Unlock()
	if known.generation != t.Generation {
		known = mooncakeEngine{}
	}
	began := p.now()
	if known.id != "" && began.Sub(known.asked) < engineKept {
		return known.id, nil
	}
	ctx, cancel := context.WithTimeout(ctx, bootstrapTimeout)
	defer cancel()
	server := kv.Target{Key: t.Key, URL: "http://" + t.Bootstrap.String()}
	status, answer, err := p.Ask(ctx, server, http.MethodGet, "/query", nil, nil)
	id := gjson.GetBytes(answer, fmt.Sprintf("%d.engine_id", t.Key.Rank)).Str
	if err == nil && (status != http.StatusOK || id == "") {
		err = fmt.Errorf("its bootstrap server at %s returned no engine id for rank %d (status %d)", t.Bootstrap, t.Key.Rank, status)
	}
	if err != nil && known.id != "" {
		return known.id, nil // the server shares its interpreter with the engine and may be slow
	}
	if err != nil {
		return "", err
	}
	p.engines.mu.Lock()
	defer p.engines.mu.Unlock()
	if len(p.engines.ids) >= enginesKept {
		clear(p.engines.ids)
	}
	p.engines.ids[t.Key] = mooncakeEngine{t.Generation, id, began}
	return id, nil
}

// forgetEngine makes the next request ask again: the worker may have been
// started again.
func (p *Proxy) forgetEngine(key kv.WorkerKey) {
	p.engines.mu.Lock()
	defer p.engines.mu.Unlock()
	delete(p.engines.ids, key)
}
