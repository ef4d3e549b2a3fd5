package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/go-zeromq/zmq4"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/fleet/probe"
)

// maxMark bounds the bytes of the message that ends a replay.
const maxMark = 64 << 10

// maxSilent is the number of ranks without events after which the others are not checked.
const maxSilent = 3

// noEvents notes that a worker publishes no KV events.
func (p *patient) noEvents(engine kv.Engine, shift int) {
	flags := probe.EventFlags(engine, shift)
	p.lack(flags)
	p.report.note("is routed approximately: it publishes no KV events, and the router expects what it has sent to the worker itself in its cache",
		"start it with "+flags+", or set kv-events= of --worker")
}

// checkEvents checks the KV events of a worker and their replay.
func (v visitor) checkEvents(ctx context.Context, sources []events.Source, p *patient) {
	r := &p.report
	heard, replayed := 0, 0
	for _, source := range sources {
		if len(p.endpoints) > heard+maxSilent || len(p.endpoints) > replayed+maxSilent {
			r.note(fmt.Sprintf("the other %d ranks were not checked", len(sources)-len(p.endpoints)), "")
			break
		}
		p.endpoints = append(p.endpoints, source.Endpoint)
		if err := v.subscribes(ctx, source.Endpoint); err != nil {
			r.fail(fmt.Sprintf("cannot subscribe to its KV events at %s: %s", shorten(source.Endpoint), shorten(err.Error())),
				`bind an endpoint that the router can reach ("endpoint":"tcp://*:5557" in --kv-events-config) and open `+
					`its port, or correct kv-events= of --worker`)
			continue
		}
		heard++
		if source.Replay == "" {
			r.note("its KV events have no replay: a router that starts later, or misses an event, does not know the cached blocks",
				`add "replay_endpoint":"tcp://*:5757" to its --kv-events-config, or set replay= of --worker`)
			continue
		}
		if err := v.replays(ctx, source.Replay); err != nil {
			r.fail(fmt.Sprintf("cannot replay its KV events from %s: %s", shorten(source.Replay), shorten(err.Error())),
				`set "replay_endpoint" of --kv-events-config to an endpoint that the router can reach and open its port, `+
					`or correct replay= of --worker`)
			continue
		}
		replayed++
	}
	if heard > 0 {
		r.ok("subscribed to KV events of %d of %d ranks, replayed %d", heard, len(sources), replayed)
	}
}

// subscribes checks that a PUB socket listens at endpoint.
func (v visitor) subscribes(ctx context.Context, endpoint string) error {
	return v.within(ctx, func(ctx context.Context) error {
		conn, err := zmq.DialSub(ctx, endpoint, "")
		if err == nil {
			conn.Close()
		}
		return err
	})
}

// replays requests the events after the last one, and waits for the mark that ends every
// replay.
func (v visitor) replays(ctx context.Context, endpoint string) error {
	return v.within(ctx, func(ctx context.Context) error {
		conn, err := zmq.Dial(ctx, endpoint, zmq4.Dealer)
		if err != nil {
			return err
		}
		defer conn.Close()
		conn.Limit(maxMark)
		if err := conn.Send(nil, binary.BigEndian.AppendUint64(nil, math.MaxInt64)); err != nil {
			return err
		}
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		for _, frame := range frames {
			if len(frame) == 8 && binary.BigEndian.Uint64(frame) == events.ReplayEnd {
				return nil
			}
		}
		return errors.New("the answer is not a replay")
	})
}

// within does one check within --wait, and replaces the error of an expired wait.
func (v visitor) within(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, v.wait)
	defer cancel()
	err := check(ctx)
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errors.New("no answer in time")
	}
	return err
}

// checkLoad checks the socket of a worker's load; empty: there is none.
func (v visitor) checkLoad(ctx context.Context, endpoint string, r *report) {
	if endpoint == "" {
		return
	}
	if err := v.subscribes(ctx, endpoint); err != nil {
		r.fail(fmt.Sprintf("cannot subscribe to its load at %s: %s", shorten(endpoint), shorten(err.Error())),
			"open its port, or correct load= of --worker")
		return
	}
	r.ok("subscribed to its load at %s", shorten(endpoint))
}
