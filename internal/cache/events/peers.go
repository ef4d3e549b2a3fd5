package events

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/cache/radix"
)

// Peers are other routers that follow the same workers under the same ids.
type Peers struct {
	urls   []string // of their router ports
	key    string   // bearer key that they require; may be empty
	client *http.Client
	turns  chan struct{} // holds a token for each answer that is being read
}

// Bounds of asking peers.
const (
	peerLimit       = 10 * time.Second // for a whole answer
	peerAnswerLimit = 256 << 20        // bytes
	peerAnswerSize  = 1 << 24          // blocks, where an event counts as peerEventSize
	peerEventSize   = 4
	// peerTurns is the number of answers that are read at a time, over all ranks.
	peerTurns = 2
	// peerRetries is the number of times that a peer that has not seen the newest batch yet is
	// asked again, after peerPause and each time double.
	peerRetries = 3
	peerPause   = 50 * time.Millisecond
)

// NewPeers returns the routers at these URLs; none: nil. A nil transport queries them over
// the network.
func NewPeers(urls []string, key string, transport http.RoundTripper) *Peers {
	if len(urls) == 0 {
		return nil
	}
	client := newPeerClient()
	if transport != nil {
		client.Transport = transport
	}
	client.Timeout = peerLimit
	return &Peers{urls: urls, key: key, client: client, turns: make(chan struct{}, peerTurns)}
}

// newPeerClient returns the client of peers: over a new connection each time, and
// only them.
func newPeerClient() *http.Client {
	transport := web.NewTransport(nil)
	transport.DisableKeepAlives = true
	return web.NewClient(transport)
}

// ask queries one peer for w's events from start on, or all its blocks.
func (p *Peers) ask(ctx context.Context, peer string, w kv.WorkerKey, start *uint64, check uint64) (answer Answer, err error) {
	select {
	case p.turns <- struct{}{}:
		defer func() { <-p.turns }()
	case <-ctx.Done():
		return answer, ctx.Err()
	}
	query := url.Values{"worker_id": {strconv.FormatUint(w.Worker, 10)}, "dp_rank": {strconv.FormatUint(uint64(w.Rank), 10)},
		"check": {strconv.FormatUint(check, 10)}}
	if start != nil {
		query.Set("start", strconv.FormatUint(*start, 10))
	}
	body, err := get(ctx, p.client, peer, "/events", "?"+query.Encode(), p.key)
	if err != nil {
		return answer, err
	}
	defer body.Close()
	return readAnswer(io.LimitReader(body, peerAnswerLimit))
}

// get returns the body of a peer's answer to GET path, which the caller must close. key is
// the bearer key to show; empty: none.
func get(ctx context.Context, client *http.Client, peer, path, query, key string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, peer+path+query, nil)
	if err != nil {
		return nil, err
	}
	if key != "" {
		request.Header.Set("Authorization", "Bearer "+key)
	}
	response, err := client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		response.Body.Close()
		return nil, fmt.Errorf("GET %s answered %d %s", path, response.StatusCode, http.StatusText(response.StatusCode))
	}
	return response.Body, nil
}

// readAnswer reads an answer event by event, so that its text need not fit into
// memory.
func readAnswer(in io.Reader) (answer Answer, err error) {
	value := &valueReader{in, maxDumpValue}
	r := dumpReader{in: value, decoder: json.NewDecoder(value)}
	fields := map[string]any{
		"kind": &answer.Kind, "worker_id": &answer.WorkerID, "dp_rank": &answer.DPRank, "block_size": &answer.BlockSize, "layout": &answer.Layout,
		"complete":      &answer.Complete,
		"last_event_id": &answer.Last, "last_digest": &answer.LastDigest, "before_digest": &answer.BeforeDigest,
		"check_digest": &answer.CheckDigest,
	}
	size := 0
	err = r.object(func(name string) error {
		if name != "events" {
			into, known := fields[name]
			if !known {
				into = new(json.RawMessage)
			}
			return r.decoder.Decode(into)
		}
		return r.list(func() error {
			var e peerEvent
			if err := r.decoder.Decode(&e); err != nil {
				return err
			}
			c, err := e.Data.change()
			if err != nil {
				return err
			}
			if size += peerEventSize + c.Size() + len(c.Skipped) + len(c.Setting().Stores); size > peerAnswerSize {
				return fmt.Errorf("it contains more than %d blocks", peerAnswerSize)
			}
			answer.Events = append(answer.Events, c)
			return nil
		})
	})
	if err != nil {
		return Answer{}, fmt.Errorf("GET /events: %w", err)
	}
	return answer, nil
}

// askPeers brings the rank up to the live batch seq, which has the hash sum, by
// what another router has applied: the events since the last one applied here,
// else all blocks. That router must have seen the same live batch, and where it
// sends events, the same batch before them. Not ok: nothing has changed, or the
// rank was forgotten.
func (s *Stream) askPeers(ctx context.Context, seq, sum uint64) (ok bool) {
	if s.Peers == nil {
		return false
	}
	s.asked = true
	wait := peerPause
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
				s.warnOnce("peer "+peer, "cannot request missed KV events from another router", "peer", peer, "error", err)
			case answer.Last == nil || *answer.Last < seq:
				behind = true
			case answer.CheckDigest == nil || *answer.CheckDigest != sum || answer.LastDigest == nil || answer.BlockSize != s.Src.BlockSize:
				s.warnOnce("peer "+peer, "another router has a different worker under this id", "peer", peer)
			case !answer.Complete: // its missing blocks would be missing here
			case s.take(answer):
				s.log.Info("recovered missed KV events from another router", "peer", peer, "kind", answer.Kind, "events", len(answer.Events))
				return true
			default:
				s.forget("the events of another router do not match")
			}
		}
		if !behind || ctx.Err() != nil {
			return false
		}
		pause(ctx, wait)
		wait *= 2
	}
	return false
}

// take applies a peer's answer. The answer as a whole has the position where it continues: a
// whole: ids of a dump's events are made up.
func (s *Stream) take(answer Answer) bool {
	s.history.cleared() // it cannot vouch for batches that it has not seen
	if answer.Kind == kindDump {
		layout, err := kv.ParseLayout(answer.Layout)
		if err != nil || !fits(layout, s.Src.BlockSize) {
			return false
		}
		s.Begin(0)
		s.setLayout(layout)
		s.stats.PeerDumps.Add(1)
	} else if answer.Layout != s.layoutText {
		return false // its events name other groups
	} else {
		s.stats.PeerEvents.Add(uint64(len(answer.Events)))
	}
	for i := range answer.Events {
		c := &answer.Events[i]
		switch c.Kind {
		case radix.Stored, radix.Held, radix.Removed, radix.Cleared, radix.DeviceCleared, radix.ChunkSet, radix.LowerRestored:
			if _, err := s.index.Apply(s.Src.Worker, c); err != nil {
				return false
			}
		case radix.Forgotten, radix.LayoutSet, radix.LookaheadStored, radix.DoubtSettled: // no event has it
			return false
		}
	}
	s.chunkBlocks = s.index.LowerOf(s.Src.Worker).Chunk
	s.sure, s.next, s.sum = true, *answer.Last+1, *answer.LastDigest
	s.history.reach(s.position())
	s.resync = false
	s.stats.Cold.Store(false)
	s.stats.LastSeq.Store(*answer.Last)
	return true
}
