package workers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// warnOfEvents warns, once, about blocks of an attached worker that the router does not
// learn of. Sources are those that are subscribed to.
func (in *incarnation) warnOfEvents(sources []events.Source) {
	if !in.f.cfg.KVEvents || in.warnedOfEvents {
		return
	}
	silent := len(sources) == 0 || in.keepsNone()
	if silent && in.info == nil && time.Since(in.began) < in.f.timing.silentAfter {
		return // it may name them yet
	}
	in.warnedOfEvents = true
	if silent { // review says so
		return
	}
	for _, source := range sources {
		if source.Replay == "" {
			in.f.log.Warn(fmt.Sprintf("%s: its KV events have no replay: blocks stored before are unknown", in.w), "url", in.w.spec.URL,
				"rank", source.Worker.Rank,
				"remedy", `add "replay_endpoint":"tcp://*:5757" to its --kv-events-config`+in.orName("replay"))
			return
		}
	}
}

// keepsNone reports whether the engine keeps no prompts, and no endpoint of its events is given.
func (in *incarnation) keepsNone() bool {
	if in.info == nil || in.w.spec.KVEvents != "" {
		return false
	}
	keeps, _ := in.info.KeepsPrompts()
	return !keeps
}

// orName says where the settings can name an endpoint of the worker: only --worker and a
// discovery file can.
func (in *incarnation) orName(key string) string {
	switch {
	case in.w.discovered != nil:
		return ", or, with --discovery file:, set " + key + " in the file"
	case in.w.added():
		return "" // a worker that is added has a URL only
	}
	return ", or set " + key + "= of --worker"
}

// know takes over what an SGLang server reports about itself.
func (in *incarnation) know(info *probe.ServerInfo) {
	if info == nil {
		return
	}
	in.info, in.ranks = info, info.Ranks()
	in.isSGLang()
	in.describe(info)
}

// describe notes how exact predictions for an SGLang server are, and whether it drafts
// tokens.
func (in *incarnation) describe(info *probe.ServerInfo) {
	if info == nil {
		return
	}
	predictions := info.Predictions()
	if predictions != "" {
		in.f.log.Info(fmt.Sprintf("%s: predictions are not exact", in.w), "url", in.w.spec.URL, "predictions", predictions)
	}
	in.f.update(in.w, func(s *Status) { s.Predictions, s.Speculation = predictions, info.Speculation })
}

// isSGLang notes that the worker runs SGLang.
func (in *incarnation) isSGLang() {
	in.engine = kv.EngineSGLang
	in.f.update(in.w, func(s *Status) { s.Engine = in.engine })
}

// errStuck means that an SGLang server's HTTP side answers, and its engine does not.
type errStuck time.Duration

func (e errStuck) Error() string {
	return fmt.Sprintf("its scheduler has not answered for %s", time.Duration(e))
}

// checkAlive asks the worker whether it is healthy. An SGLang server that has been
// healthy is asked for /ping, which is free: its /health computes a token, and takes a
// second.
func (in *incarnation) checkAlive() error {
	err := in.f.checkWithin(in.ctx, in.w, func(limit time.Duration) error {
		if in.engine != kv.EngineSGLang || !in.answered {
			return in.f.probe.Health(in.ctx, in.w.spec, limit, in.answered)
		}
		err := in.f.probe.Ping(in.ctx, in.w.spec, limit)
		if probe.NotFound(err) {
			return in.f.probe.Health(in.ctx, in.w.spec, limit, true)
		}
		return err
	})
	if err == nil && in.stuck.Load() {
		return errStuck(in.f.timing.engineLimit)
	}
	return err
}

// watchEngine reports to checkAlive, until the incarnation ends, whether an SGLang
// server's schedulers work: each publishes its load once a second, and one that does not
// is asked for its state, which computes no token either.
func (in *incarnation) watchEngine(spec probe.Server) {
	for in.f.sleep(in.ctx, spread(in.f.timing.engineEvery), nil) {
		stuck := false
		if !in.heard.Since(time.Now().Add(-in.f.timing.engineEvery)) {
			stuck = errors.Is(in.f.probe.CheckScheduler(in.ctx, spec, in.f.timing.engineLimit), context.DeadlineExceeded)
		}
		if in.ctx.Err() == nil && in.stuck.Swap(stuck) != stuck {
			in.f.ReportFailure(in.w.id)
		}
	}
}
