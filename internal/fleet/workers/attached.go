package workers

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// Attached is a running worker, as given by --worker.
type Attached struct {
	probe.Server
	HasID  bool   // ID was given; otherwise AssignIDs assigns the next free one
	KeyEnv string // environment variable with its own key; empty: none
}

// attachedKeys are the keys that UnmarshalText reads.
const attachedKeys = "url, id, kv-events, replay, load, key-env, role, kind, bootstrap, p2p"

// UnmarshalText reads url=...,id=...,kv-events=...,replay=...,load=...,key-env=...,
// role=...,kind=...,bootstrap=...,p2p=... in any order, or a bare URL.
func (w *Attached) UnmarshalText(text []byte) error {
	*w = Attached{}
	seen := map[string]bool{}
	for part := range strings.SplitSeq(string(text), ",") {
		part = strings.TrimSpace(part)
		key, value, found := strings.Cut(part, "=")
		if !found && strings.Contains(part, ":") {
			key, value = "url", part
		} else if !found || value == "" {
			return fmt.Errorf("worker %q: %q is neither a URL such as http://host:8000 nor key=value; the keys are %s", text, part, attachedKeys)
		}
		if seen[key] {
			if key == "url" {
				return fmt.Errorf("worker %q: url is given twice: separate workers by spaces", text)
			}
			return fmt.Errorf("worker %q: %s is given twice", text, key)
		}
		seen[key] = true
		var err error
		switch key {
		case "id":
			w.HasID = true
			w.ID, err = strconv.ParseUint(value, 10, 64)
			if err != nil {
				return fmt.Errorf("worker %q: id=%s is not a whole number from 0", text, value)
			}
		case "url":
			if w.URL, err = kv.ParseURL(value); errors.Is(err, kv.ErrUserinfo) {
				return fmt.Errorf("worker: url: %w", err) // not to be shown
			}
		case "kv-events":
			w.KVEvents, err = kv.ParseEndpoint(value)
		case "replay":
			w.Replay, err = kv.ParseEndpoint(value)
		case "load":
			w.Load, err = kv.ParseEndpoint(value)
		case "key-env":
			w.KeyEnv = value
		case "role":
			err = w.Role.UnmarshalText([]byte(value))
		case "kind":
			err = w.Kind.UnmarshalText([]byte(value))
		case "bootstrap":
			err = w.Bootstrap.UnmarshalText([]byte(value))
		case "p2p":
			err = w.P2P.UnmarshalText([]byte(value))
		default:
			return fmt.Errorf("worker %q: unknown key %s; the keys are %s", text, key, attachedKeys)
		}
		if err != nil {
			return fmt.Errorf("worker %q: %s: %w", text, key, err)
		}
	}
	if w.URL == "" {
		return fmt.Errorf("worker %q: url is missing; give url=http://host:port", text)
	}
	return nil
}

// maxPageFailures is how often in a row the metrics page of a worker may fail before
// its reports count as unknown.
const maxPageFailures = 2

// eventSources finds an attached worker's event streams: those that the flags
// name, and for the rest those that the worker reports. None is no error: not
// every server publishes events.
func (f *Fleet) eventSources(ctx context.Context, w *worker) []events.Source {
	w.inferred.endpoints, w.inferred.contested = nil, false
	sources, err := f.probe.EventSources(ctx, w.spec)
	if err == nil {
		w.reports(sources)
		return sources
	}
	f.log.Debug("worker reports no KV event sources", "worker", w.id, "error", err)
	if w.spec.EventsPort == 0 && w.spec.KVEvents == "" || !probe.NotFound(err) {
		return sources
	}
	inferred, err := f.probe.InferEventSources(ctx, w.spec)
	if w.inferred.failures++; err == nil || w.inferred.failures >= maxPageFailures {
		w.inferred.failures, sources = 0, inferred
	}
	if w.spec.KVEvents == "" && !f.infers(w, sources) {
		return nil
	}
	return sources
}

// superviseAttached follows a worker that runs already until ctx is done, each time that
// it goes and comes back.
func (f *Fleet) superviseAttached(ctx context.Context, w *worker) {
	if w.spec.Kind == kv.KindRouter {
		f.superviseCell(ctx, w)
		return
	}
	for misses := 1; ctx.Err() == nil; misses++ {
		wasUp := f.followAttached(ctx, w)
		if ctx.Err() != nil {
			break
		}
		if wasUp {
			misses = 1
		}
		if !f.sleep(ctx, f.pauseAfter(misses), w.wake) {
			break
		}
	}
	f.update(w, func(s *Status) { s.State = StateStopped })
}

// followAttached follows one incarnation: from the first answer until the
// process is gone. It returns whether there was an answer.
func (f *Fleet) followAttached(ctx context.Context, w *worker) (wasUp bool) {
	w.applyDiscovered()
	healthy, served, info, err := f.greet(ctx, w)
	if err != nil {
		f.unreachable(ctx, w, err)
		return false
	}
	in := f.begin(ctx, w)
	defer in.end("no longer followed")
	if in.answered = healthy; !healthy {
		f.log.Warn(fmt.Sprintf("%s: has neither /health nor /v1/models: it counts as healthy while it accepts connections", w), "url", w.spec.URL)
	}
	if in.know(info); served.SGLang {
		in.isSGLang() // behind a gateway that hides the rest, too
	}
	if err := in.join(in.serves(served)); err != nil {
		f.unreachable(ctx, w, err)
		return false
	}
	in.setDisagg(probe.Disagg(w.spec, info))
	sources := in.eventSources()
	in.follow(served, sources)
	f.log.Info(fmt.Sprintf("%s: attached", w), "url", w.spec.URL, "engine", in.engine, "models", served.Names, "event_streams", len(sources),
		"role", in.disagg.Role, "kind", in.disagg.Kind)
	in.warnOfEvents(sources)

	for {
		select {
		case <-ctx.Done():
			return true
		case looked := <-w.look:
			in.lookAtModels()
			close(looked)
		case <-w.discoveryChanges():
			sources = in.applyDiscovered(ctx, sources)
			continue
		case <-w.wake:
		case <-time.After(in.pause()):
		}
		in.checkHealth()
		if in.gone {
			return true
		}
		if in.up && in.misses.Count == 0 && f.contested(w) != w.inferred.contested {
			sources = in.followAnew(ctx)
			continue
		}
		if in.resized() || in.unrivaled() {
			sources = in.followAnew(ctx)
			continue
		}
		in.review()
		if in.info != nil || len(sources) > 0 || in.warnedOfEvents || !in.up || in.misses.Count > 0 || !f.cfg.KVEvents {
			continue
		}
		// A server may name its sources only once its engine runs.
		if sources = in.eventSources(); len(sources) > 0 {
			in.follow(in.served, sources)
		}
		in.warnOfEvents(sources)
	}
}

// greet asks an attached worker, at its first answer, whether it is healthy and what it
// is; info is nil if it is no SGLang server. One that runs and does not say whether it is
// healthy must answer chats.
func (f *Fleet) greet(ctx context.Context, w *worker) (healthy bool, served probe.Models, info *probe.ServerInfo, err error) {
	err = f.checkWithin(ctx, w, func(limit time.Duration) error { return f.probe.Health(ctx, w.spec, limit, false) })
	healthy = err == nil
	if probe.Rejected(err) {
		err = f.probe.AnswersChats(ctx, w.spec)
	}
	if err != nil {
		return false, served, nil, err
	}
	if served, err = f.probe.Models(ctx, w.spec); err != nil {
		return false, served, nil, err
	}
	info, err = f.probe.ServerInfo(ctx, w.spec)
	if !served.SGLang { // only of an SGLang server the answer decides how it is used
		err = nil
	}
	return healthy, served, info, err
}

// eventSources finds the worker's event streams.
func (in *incarnation) eventSources() []events.Source {
	if in.info != nil {
		sources := in.info.Sources(in.w.spec)
		in.w.reports(sources)
		return sources
	}
	return in.f.eventSources(in.ctx, in.w)
}

// follow follows these event streams of an attached worker and the load of its targets,
// and announces them.
func (in *incarnation) follow(served probe.Models, sources []events.Source) {
	in.learn()
	for _, source := range sources {
		in.followEvents(source)
	}
	in.setTargets(served, sources)
	in.followLoads()
	in.markUp()
}

// unreachable notes, unless ctx is done, that a worker does not answer. The first time
// since it last did is logged as a warning.
func (f *Fleet) unreachable(ctx context.Context, w *worker, err error) {
	if ctx.Err() != nil {
		return
	}
	level := f.log.Debug
	f.update(w, func(s *Status) {
		if s.LastError == "" || s.State != StateConnecting {
			level = f.log.Warn
		}
		s.State = StateConnecting
		s.LastError = err.Error()
	})
	if errors.Is(err, probe.ErrLeadsBack) {
		level = f.log.Error // it will not recover by itself
	}
	level(fmt.Sprintf("%s: not reachable yet, retrying", w), "url", w.spec.URL, "error", err)
}
