package events

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
	"kvrouter/internal/web"
	"kvrouter/internal/zmq"
)

// replayRounds bounds how often one catch-up asks again because the publisher
// dropped batches out of the middle of a replay. Its ROUTER socket queues 1,000
// messages and drops more without a word, so each round brings at least that.
const replayRounds = 64

// replayRetries is how often a failed replay is asked for again in quick
// succession.
const replayRetries = 8

// retryPause is the wait after so many failures before the last one.
func (t streamTiming) retryPause(failures int) time.Duration {
	if failures >= replayRetries {
		return t.Retry
	}
	return min(t.retryFirst<<failures, t.Retry)
}

// ReplayEnd is the sequence number that ends a replay: -1 in 64 bits.
const ReplayEnd = ^uint64(0)

// Reasons why a replay did not bring the stream up to date.
var (
	errRestarted  = errors.New("publisher is a new one")
	errReplayHole = errors.New("replay has a hole")
	errStalled    = errors.New("connection carries nothing")
)

// catchUp brings the index up to what has been published so far. After an
// error it asks again later, and what the index holds is as old as before, or
// nothing.
func (s *Stream) catchUp(ctx context.Context) error {
	fromStart := s.resync || !s.sure
	whole := fromStart // what the rounds together bring
	applied := s.stats.ReplayedBatches.Load()
	for round := 0; ; round++ {
		before := s.next
		err := s.replay(ctx, fromStart)
		switch {
		case err == nil:
			s.resync, s.seeded = s.resync && !whole, false
			s.failures = 0
			return nil
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, errRestarted) && round < replayRounds:
			s.restarted()
			fromStart, whole = true, true
			continue
		case errors.Is(err, errReplayHole) && round < replayRounds && s.sure && (fromStart || s.next > before):
			fromStart = false
			continue
		}
		s.stats.ReplayFailures.Add(1)
		if s.sure && s.stats.ReplayedBatches.Load() != applied {
			s.forget("its history could be replayed in part only")
		}
		s.resync, s.retryAt = true, time.Now().Add(s.Timing.retryPause(s.failures))
		s.failures++
		s.warnOnce("replay", "cannot replay the worker's KV events", "replay", s.replayAt, "error", err)
		return err
	}
}

// replay asks once for the batches from the last applied one on, or from the
// start of the publisher's buffer, and applies what is new.
func (s *Stream) replay(ctx context.Context, fromStart bool) error {
	s.stats.Replays.Add(1)
	verify := !fromStart && s.sure && s.next > 0
	from := uint64(0)
	if verify {
		from = s.next - 1
	}
	conn, err := zmq.Dial(ctx, s.replayAt, zmq4.Dealer)
	if err != nil {
		return err
	}
	defer conn.Close()
	// The empty frame is what a REQ socket would send; vLLM insists on it.
	if err := conn.Send(nil, binary.BigEndian.AppendUint64(nil, from)); err != nil {
		return fmt.Errorf("ask %s for a replay: %w", s.replayAt, err)
	}
	limit := s.Timing.ReplayLimit
	for first := true; ; first = false {
		ready, err := conn.Wait(time.Now().Add(limit))
		if err == nil && !ready && first {
			return fmt.Errorf("%s sent no replay within %v", s.replayAt, limit)
		}
		if err == nil && !ready {
			return errReplayHole // the end mark was dropped
		}
		var frames [][]byte
		if err == nil {
			frames, err = conn.Recv()
		}
		if err != nil {
			return fmt.Errorf("replay from %s: %w", s.replayAt, err)
		}
		limit = s.Timing.ReplayPause
		seq, payload, err := BatchFrames(frames)
		switch {
		case err != nil:
			return fmt.Errorf("replay from %s: %w", s.replayAt, err)
		case seq == ReplayEnd && first && verify:
			return errRestarted // it does not know the batch we have
		case seq == ReplayEnd && first:
			s.Begin(0) // nothing was published yet
			return nil
		case seq == ReplayEnd:
			return nil
		case seq < from:
			return fmt.Errorf("replay from %s begins at %d, asked for %d", s.replayAt, seq, from)
		case first && verify && seq == from:
			if xxh3.Hash(payload) != s.sum {
				return errRestarted
			}
			continue
		case first && verify:
			s.stats.ReplayFailures.Add(1)
			s.forget("missed events have left the publisher's replay buffer")
			s.Begin(seq)
		case first:
			s.Begin(seq)
		}
		if seq > s.next {
			return errReplayHole
		}
		if seq == s.next {
			s.stats.ReplayedBatches.Add(1)
			s.Apply(seq, payload, false)
		}
	}
}

// BatchFrames takes a message apart: topic, sequence number (8 bytes
// big-endian), payload; a replay puts an empty frame before them, and SGLang
// leaves the topic out there.
func BatchFrames(frames [][]byte) (seq uint64, payload []byte, err error) {
	n := len(frames)
	if n < 2 || len(frames[n-2]) != 8 {
		return 0, nil, fmt.Errorf("%d frames, want topic, 8-byte sequence number, payload", n)
	}
	return binary.BigEndian.Uint64(frames[n-2]), frames[n-1], nil
}

// Peers are other routers that follow the same workers under the same ids.
type Peers struct {
	urls   []string // of their router ports
	key    string   // bearer key that they ask for; may be empty
	client *http.Client
}

// Bounds of asking peers.
const (
	peerLimit       = 10 * time.Second // for a whole answer
	peerAnswerLimit = 256 << 20        // bytes
	// peerRetries is how often a peer that has not seen the newest batch yet is
	// asked again, after peerPause and each time double.
	peerRetries = 3
	peerPause   = 50 * time.Millisecond
)

// NewPeers returns the routers at these URLs; none: nil.
func NewPeers(urls []string, key string) *Peers {
	if len(urls) == 0 {
		return nil
	}
	client := newPeerClient()
	client.Timeout = peerLimit
	return &Peers{urls: urls, key: key, client: client}
}

// newPeerClient returns what asks peers: over a new connection each time, and
// nobody else than them.
func newPeerClient() *http.Client {
	transport := web.NewTransport(nil)
	transport.DisableKeepAlives = true
	return web.NewClient(transport)
}

// ask asks one peer for w's events from start on, or all its blocks.
func (p *Peers) ask(ctx context.Context, peer string, w kv.WorkerKey, start *uint64, check uint64) (answer Answer, err error) {
	query := url.Values{"worker_id": {strconv.FormatUint(w.Worker, 10)}, "dp_rank": {strconv.FormatUint(uint64(w.Rank), 10)}, "check": {strconv.FormatUint(check, 10)}}
	if start != nil {
		query.Set("start", strconv.FormatUint(*start, 10))
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, peer+"/events?"+query.Encode(), nil)
	if err != nil {
		return answer, err
	}
	if p.key != "" {
		request.Header.Set("Authorization", "Bearer "+p.key)
	}
	response, err := p.client.Do(request)
	if err != nil {
		return answer, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return answer, fmt.Errorf("GET /events answered %d %s", response.StatusCode, http.StatusText(response.StatusCode))
	}
	err = json.NewDecoder(io.LimitReader(response.Body, peerAnswerLimit)).Decode(&answer)
	return answer, err
}

// askPeers brings the rank up to the live batch seq, which has the hash sum, by
// what another router has applied: the events since the last one applied here,
// else all blocks. That router must have seen the same live batch, and where it
// tells events, the same batch before them. Not ok: nothing has changed, or the
// rank was forgotten.
func (s *Stream) askPeers(ctx context.Context, seq, sum uint64) (ok bool) {
	if s.Peers == nil {
		return false
	}
	s.asked = true
	pause := peerPause
	for range 1 + peerRetries {
		behind := false
		for _, peer := range s.Peers.urls {
			var start *uint64
			if s.sure && !s.stats.Cold.Load() && s.next > 0 {
				from := s.next
				start = &from
			}
			answer, err := s.Peers.ask(ctx, peer, s.Src.Worker, start, seq)
			if err == nil && answer.Kind == kindEvents && (answer.BeforeDigest == nil || *answer.BeforeDigest != s.sum) {
				answer, err = s.Peers.ask(ctx, peer, s.Src.Worker, nil, seq)
			}
			switch {
			case err != nil:
				s.warnOnce("peer "+peer, "cannot ask another router for missed KV events", "peer", peer, "error", err)
			case answer.Last == nil || *answer.Last < seq:
				behind = true
			case answer.CheckDigest == nil || *answer.CheckDigest != sum || answer.LastDigest == nil || answer.BlockSize != s.Src.BlockSize:
				s.warnOnce("peer "+peer, "another router follows another worker under this id", "peer", peer)
			case !answer.Complete: // what it lacks, it would lack here
			case s.take(answer):
				s.log.Info("took missed KV events over from another router", "peer", peer, "kind", answer.Kind, "events", len(answer.Events))
				return true
			default:
				s.forget("another router's events do not fit")
			}
		}
		if !behind || ctx.Err() != nil {
			return false
		}
		s.pause(ctx, pause)
		pause *= 2
	}
	return false
}

// take applies a peer's answer. Where it goes on is told by the answer as a
// whole: ids of a dump's events are made up.
func (s *Stream) take(answer Answer) bool {
	if answer.Kind == kindDump {
		s.Begin(0)
		s.stats.PeerDumps.Add(1)
	} else {
		s.stats.PeerEvents.Add(uint64(len(answer.Events)))
	}
	for _, e := range answer.Events {
		switch {
		case e.Data.Stored != nil:
			s.blocks = s.blocks[:0]
			for _, b := range e.Data.Stored.Blocks {
				s.blocks = append(s.blocks, kv.StoredBlock{Engine: b.BlockHash, Local: b.TokensHash})
			}
			var parent uint64
			if p := e.Data.Stored.ParentHash; p != nil {
				parent = *p
			}
			if s.index.Store(s.Src.Worker, parent, e.Data.Stored.ParentHash != nil, s.blocks) != nil {
				return false
			}
		case e.Data.Cleared:
			s.index.Clear(s.Src.Worker)
		default:
			s.index.Remove(s.Src.Worker, e.Data.Removed)
		}
	}
	s.history.cleared() // it cannot vouch for batches that it has not seen
	s.sure, s.next, s.sum = true, *answer.Last+1, *answer.LastDigest
	s.resync = false
	s.stats.Cold.Store(false)
	s.stats.LastSeq.Store(*answer.Last)
	return true
}
