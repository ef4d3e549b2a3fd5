package doctor

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/go-zeromq/zmq4"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/workers"
	"kvrouter/internal/zmq"
)

// maxMark bounds the bytes of the message that ends a replay.
const maxMark = 64 << 10

// maxSilent is after how many ranks whose events cannot be had the others are not tried.
const maxSilent = 3

// lookAtEvents looks whether a worker's KV events and their replay can be had.
func (v visitor) lookAtEvents(ctx context.Context, sources []events.Source, engine kv.Engine, p *patient) {
	r := &p.report
	if len(sources) == 0 {
		r.mend("publishes no KV events: what it has cached is not known", "start it with "+workers.EventFlags(engine)+", or name kv-events= in --worker")
		return
	}
	heard, replayed := 0, 0
	for _, source := range sources {
		if len(p.endpoints) > heard+maxSilent || len(p.endpoints) > replayed+maxSilent {
			r.note(fmt.Sprintf("the other %d ranks were not tried", len(sources)-len(p.endpoints)), "")
			break
		}
		p.endpoints = append(p.endpoints, source.Endpoint)
		if err := v.subscribes(ctx, source.Endpoint); err != nil {
			r.mend(fmt.Sprintf("its KV events at %s cannot be heard: %s", shorten(source.Endpoint), shorten(err.Error())),
				`bind them where the router reaches them ("endpoint":"tcp://*:5557" in --kv-events-config) and open that port, or correct kv-events= of --worker`)
			continue
		}
		heard++
		if source.Replay == "" {
			r.note("its KV events have no replay: a router that starts later, or misses one, does not know what is cached",
				`add "replay_endpoint":"tcp://*:5757" to its --kv-events-config, or name replay= in --worker`)
			continue
		}
		if err := v.replays(ctx, source.Replay); err != nil {
			r.mend(fmt.Sprintf("its KV events are not replayed at %s: %s", shorten(source.Replay), shorten(err.Error())),
				`bind "replay_endpoint" in --kv-events-config where the router reaches it and open that port, or correct replay= of --worker`)
			continue
		}
		replayed++
	}
	if heard > 0 {
		r.ok("KV events of %d of %d ranks are heard, %d replayed", heard, len(sources), replayed)
	}
}

// subscribes tells whether a PUB socket listens at endpoint.
func (v visitor) subscribes(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, v.wait)
	defer cancel()
	conn, err := zmq.DialSub(ctx, endpoint, "")
	if err != nil {
		return explain(ctx, err)
	}
	conn.Close()
	return nil
}

// replays asks for what comes after all events, and waits for the mark that ends every
// replay: nothing else is sent.
func (v visitor) replays(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, v.wait)
	defer cancel()
	conn, err := zmq.Dial(ctx, endpoint, zmq4.Dealer)
	if err != nil {
		return explain(ctx, err)
	}
	defer conn.Close()
	conn.Limit(maxMark)
	if err := conn.Send(nil, binary.BigEndian.AppendUint64(nil, math.MaxInt64)); err != nil {
		return explain(ctx, err)
	}
	frames, err := conn.Recv()
	if err != nil {
		return explain(ctx, err)
	}
	for _, frame := range frames {
		if len(frame) == 8 && binary.BigEndian.Uint64(frame) == events.ReplayEnd {
			return nil
		}
	}
	return errors.New("it answers something else than a replay")
}

// lookAtLoad looks whether the socket of a worker's load can be heard; empty: there is
// none.
func (v visitor) lookAtLoad(ctx context.Context, endpoint string, r *report) {
	if endpoint == "" {
		return
	}
	if err := v.subscribes(ctx, endpoint); err != nil {
		r.mend(fmt.Sprintf("its load at %s cannot be heard: %s", shorten(endpoint), shorten(err.Error())), "open that port, or correct load= of --worker")
		return
	}
	r.ok("its load is heard at %s", shorten(endpoint))
}

// explain says of an error that came of waiting for too long that it did.
func explain(ctx context.Context, err error) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errors.New("no answer in time")
	}
	return err
}
