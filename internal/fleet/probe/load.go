package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/decide/policy"
)

const (
	// pollInterval is the time between polls of the /metrics of a worker without a
	// load socket.
	pollInterval = time.Second
	// idleInterval is the same for a worker that had no request at idleAfter polls in a
	// row: polling hundreds of idle workers would take much of a core, and the router
	// knows what it sends there itself. It is below the time for which connections to
	// workers are kept (4 s).
	idleInterval = 3 * time.Second
	idleAfter    = 5
	// loadRetry is the shortest pause after a failure of either source.
	loadRetry = 500 * time.Millisecond
	// noPageRetry is the pause after an answer that there is no such page.
	noPageRetry = 10 * time.Second
	// loadLeast is the minimum time between two reports of a load socket that count:
	// each takes the router's lock.
	loadLeast = 5 * time.Millisecond
	// maxLoadMessage bounds the bytes of a load message; the plugin's has about 100.
	maxLoadMessage = 64 << 10
)

// LoadSource is the source of the load of one worker's ranks: from a socket, or from
// the worker's pages.
type LoadSource struct {
	URL    string // of the worker
	Engine kv.Engine
	Ranks  []kv.WorkerKey
	// ZMQ PUB, of the plugin's JSON or SGLang's LoadStat, of the only rank; empty: none. Pages of the server replace one that fails
	Socket string
	Apart  bool     // pages show each rank as an engine of that number; otherwise the page describes the only rank
	Heard  *Hearing // records each message of the socket; nil: not recorded
	Lives  func()   // called when the socket or the pages show that the engine makes progress; nil: nothing is
	// Restarted is called for each rank when the pages show that the engine is another one than before; nil: nothing is.
	Restarted func(kv.WorkerKey)
	Key       func() kv.Secret // returns the worker's current key
	// Rest returns the time between two polls of the page while the worker is idle; what is
	// less than idleInterval counts as that. nil: idleInterval.
	Rest func() time.Duration
	// Counters is what else to report of the pages that are polled for the load, when it is due;
	// nil: nothing, see FollowCounters.
	Counters *Counters

	progress *progress // last shown by the pages
}

// from names the source in log lines.
func (s LoadSource) from() string {
	if s.Socket != "" {
		return s.Socket
	}
	return s.URL + metricsPath
}

// server is the worker of the source.
func (s LoadSource) server() Server {
	return Server{ID: s.Ranks[0].Worker, URL: s.URL, Key: s.Key()}
}

// engine is the number of a rank on pages; empty: they show no others.
func (s LoadSource) engine(rank kv.WorkerKey) string {
	if !s.Apart {
		return ""
	}
	return strconv.FormatUint(uint64(rank.Rank), 10)
}

// Hearing is the time of the load sockets' last messages. Its methods are safe for concurrent use; the
// zero value has no sockets.
type Hearing struct {
	mu   sync.Mutex // guards last
	last map[kv.WorkerKey]time.Time
}

// Note records a message on a rank's socket; the zero time records that the rank
// has a socket.
func (h *Hearing) Note(rank kv.WorkerKey, now time.Time) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last == nil {
		h.last = map[kv.WorkerKey]time.Time{}
	}
	h.last[rank] = now
}

// Since reports whether there are sockets and all have sent a message after that
// time.
func (h *Hearing) Since(then time.Time) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, last := range h.last {
		if last.Before(then) {
			return false
		}
	}
	return len(h.last) > 0
}

// publish gets the load of a rank.
type publish = func(kv.WorkerKey, policy.Published)

// FollowLoad reports the load of a source's ranks until ctx is done: each message
// of the socket or, without one, the page, polled every second, or every third
// second while the worker is idle, or when its rest is over. It reconnects indefinitely.
func (c *Client) FollowLoad(ctx context.Context, s LoadSource, log *slog.Logger, report func(kv.WorkerKey, policy.Published)) {
	s.progress = new(progress)
	read := c.pollLoad
	if s.Socket != "" {
		read = c.readSocket
	}
	for failures := 0; ctx.Err() == nil; failures++ {
		err := c.edges.Do(guard.WorkerLoad, log, func() error {
			return read(ctx, s, log, func(w kv.WorkerKey, p policy.Published) {
				failures = 0
				report(w, p)
			})
		})
		if ctx.Err() != nil {
			return
		}
		missing := "no load from worker"
		if s.Socket != "" {
			if _, _, failure := c.askLoad(ctx, s, loadNames, report); failure == nil {
				missing = "load socket of worker fails: its load is read from its pages"
			}
		}
		pause := loadRetry + rand.N(loadRetry)
		if s.Socket == "" && s.Engine != kv.EngineSGLang && Rejected(err) {
			if pause = noPageRetry; failures == 0 {
				log.Info("worker has no page of metrics: its load is that of this router's requests", "worker", s.Ranks[0].Worker, "error", err)
			}
		} else if failures == 10 { // a worker that is starting is silent for a while
			log.Warn(missing, "worker", s.Ranks[0].Worker, "rank", s.Ranks[0].Rank, "from", s.from(), "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// loadMessage is the plugin's JSON. The example's older publisher calls the
// usage gpu_cache_usage.
type loadMessage struct {
	Waiting  *int     `json:"num_waiting_reqs"`
	Running  int      `json:"num_running_reqs"`
	KVUsage  *float64 `json:"kv_cache_usage"`
	GPUUsage *float64 `json:"gpu_cache_usage"`
}

func (m loadMessage) published() (policy.Published, error) {
	usage := m.KVUsage
	if usage == nil {
		usage = m.GPUUsage
	}
	if m.Waiting == nil || usage == nil {
		return policy.Published{}, errors.New("load message lacks num_waiting_reqs or kv_cache_usage")
	}
	return published(float64(m.Running), float64(*m.Waiting), *usage), nil
}

// published is a load of these gauges.
func published(running, waiting, usage float64) policy.Published {
	return policy.Published{Running: int(gauge(running, kv.MaxTokens)), Waiting: int(gauge(waiting, kv.MaxTokens)), KVUsage: gauge(usage, 1),
		At: time.Now()}
}

// gauge limits a worker's gauge to 0 to most. NaN counts as most: it must not attract
// requests, as an unknown load would.
func gauge(value, most float64) float64 {
	if math.IsNaN(value) {
		return most
	}
	return min(max(value, 0), most)
}

// readLoad reads a load message: the plugin's JSON, or SGLang's.
func readLoad(text []byte) (policy.Published, error) {
	if isLoadStat(text) {
		return readLoadStat(text)
	}
	var load loadMessage
	if err := json.Unmarshal(text, &load); err != nil {
		return policy.Published{}, fmt.Errorf("load message: %w", err)
	}
	return load.published()
}

// readSocket reports the socket's messages until it fails or ctx is done. Of
// messages that come faster than loadLeast the last one counts.
func (c *Client) readSocket(ctx context.Context, s LoadSource, _ *slog.Logger, report publish) error {
	conn, err := zmq.DialSub(ctx, s.Socket, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(maxLoadMessage)
	var last []byte // message that has not been reported; empty: none
	var shown []byte
	for next := (time.Time{}); ; {
		var until time.Time
		if len(last) > 0 {
			until = next
		}
		ready, err := conn.Wait(until)
		if err != nil {
			return err
		}
		if ready {
			frames, err := conn.Recv()
			if err != nil {
				return err
			}
			last = append(last[:0], frames[len(frames)-1]...)
		}
		now := time.Now()
		if ready && s.Heard != nil {
			s.Heard.Note(s.Ranks[0], now)
		}
		if now.Before(next) {
			continue
		}
		p, err := readLoad(last)
		if err != nil {
			return fmt.Errorf("%s: %w", s.Socket, err)
		}
		report(s.Ranks[0], p)
		if s.Lives != nil && (isLoadStat(last) || len(shown) > 0 && !bytes.Equal(shown, last)) { // SGLang's scheduler sends its own
			s.Lives()
		}
		shown = append(shown[:0], last...)
		last, next = last[:0], now.Add(loadLeast)
	}
}

// pollLoad polls a worker's pages, once for all ranks, until one fails or ctx is done.
func (c *Client) pollLoad(ctx context.Context, s LoadSource, log *slog.Logger, report publish) error {
	timer := time.NewTimer(pollInterval)
	defer timer.Stop()
	idle := 0                    // polls in a row that showed no request
	var polled, counts time.Time // of the last poll, and from which on one reads the counters
	for warned := false; ; {
		if rests := idle >= idleAfter && s.Rest != nil && time.Since(polled) < s.Rest()-idleInterval/2; !rests {
			polled = time.Now()
			idle++
			names, counting := loadNames, s.Counters != nil && !polled.Before(counts)
			if counting {
				names = pageNames
			}
			page, lags, err := c.askLoad(ctx, s, names, func(w kv.WorkerKey, p policy.Published) {
				if p.Running+p.Waiting > 0 {
					idle = 0
				}
				report(w, p)
			})
			s.note(page)
			if counting {
				counts = polled.Add(min(s.count(page), transfersEvery)) // the page is read in any case
			}
			if err != nil {
				return err
			}
			if lags && !warned {
				warned = true
				log.Warn(fmt.Sprintf("worker %d: its load is read from /v1/loads, which lags by up to 15 passes", s.Ranks[0].Worker),
					"url", s.URL+loadsPath, "remedy",
					"start it with --load-publish-endpoint tcp://*:5657 and --kv-events-config, or with --enable-metrics")
			}
		}
		pause := Together(idleInterval)
		if idle < idleAfter {
			pause = pollInterval - min(time.Since(polled), pollInterval)
		}
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
	}
}

// Together shortens a pause of a second or more, by less than a quarter of one, so that it ends
// when others do. What thousands of idle workers cost is mostly that each wakes the processor.
func Together(d time.Duration) time.Duration {
	if d < time.Second {
		return d
	}
	now := time.Now()
	return now.Add(d).Truncate(time.Second / 4).Sub(now)
}

// askLoad reads the load of a source's ranks from the worker's metrics page or, if an
// SGLang server has no such page or the page shows no load, from its list of loads,
// which lags. It returns what the page shows of these names; nil: there is none.
func (c *Client) askLoad(ctx context.Context, s LoadSource, names []string, report publish) (page Page, lags bool, err error) {
	page, err = c.page(ctx, s.server(), names)
	if err == nil {
		err = reportRanks(s, metricsPath, report, page.Load)
	}
	if err == nil || s.Engine != kv.EngineSGLang || ctx.Err() != nil {
		return page, false, err
	}
	list, failure := c.listLoads(ctx, s.server())
	if failure == nil {
		failure = reportRanks(s, loadsPath, report, list.load)
	}
	if failure != nil {
		return page, false, errors.Join(err, failure)
	}
	return page, true, nil
}

// reportRanks reports the load of each rank that has one; an error means that none has.
func reportRanks(s LoadSource, path string, report publish, load func(engine string) (policy.Published, error)) (err error) {
	reported := 0
	for _, rank := range s.Ranks {
		p, failure := load(s.engine(rank))
		if failure != nil {
			err = failure
			continue
		}
		report(rank, p)
		reported++
	}
	if reported == 0 {
		return fmt.Errorf("%s%s: %w", s.URL, path, err)
	}
	return nil
}
