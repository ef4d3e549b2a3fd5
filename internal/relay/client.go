package relay

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
)

const (
	// minRetry and maxRetry bound the time before a stream is opened again. It doubles with
	// each failure, and is drawn between a half and the whole.
	minRetry = 500 * time.Millisecond
	maxRetry = 30 * time.Second
	// pingTime is the idle time of a connection before a keepalive ping, pingLimit the time
	// for its answer.
	pingTime  = 10 * time.Second
	pingLimit = 5 * time.Second
	// infoLimit is the maximum time for a relay to say who it is.
	infoLimit = 10 * time.Second
	// defaultSilence is Following.Silence: three heartbeats of Dynamo's relay.
	defaultSilence = 30 * time.Second
	// defaultMemory is Following.Memory.
	defaultMemory = 256 << 20
	// maxStates bounds the catalogs that are read in a second, and the messages of readiness and
	// of load, of which a relay sends one: more wait at the relay.
	maxStates = 20
	// maxTrailers bounds the headers and trailers of an answer, bytes.
	maxTrailers = 16 << 10
)

// Following is how a relay is followed.
type Following struct {
	Address    string        // host and port
	Subscriber string        // this router's name in the relay's logs, 1 to 128 bytes
	TLS        *tls.Config   // nil: plaintext, the only way of Dynamo's relay
	Silence    time.Duration // after which a pool's filter is emptied; 0: 30 s
	Memory     int64         // bytes of all filters; 0: 256 MiB
	Want       Want          // what is looked up for an index
	Log        *slog.Logger
}

// Client follows a relay. Run ends it.
type Client struct {
	settings Following
	conn     *grpc.ClientConn
	budget   atomic.Int64            // bytes that filters may still take
	held     atomic.Pointer[holding] // for Want; nil: not known

	mu        sync.Mutex // guards the rest
	catalog   *Catalog   // nil: not known
	streams   map[Producer]*poolStream
	readiness *Readiness // nil: not known
	load      *Load      // nil: not known
	failed    error      // the last failure of the catalog's stream; nil: it is open
	refusals  rate.Sometimes
	unfit     string // see Unfit
}

// poolStream is a pool's stream that is open, or will be opened again.
type poolStream struct {
	cancel context.CancelFunc
	filter *Filter // nil: none yet
	failed error   // why there is none
}

// NewClient makes a client. Run must follow.
func NewClient(s Following) (*Client, error) {
	if n := len(s.Subscriber); n == 0 || n > maxSubscriber {
		return nil, fmt.Errorf("a subscriber's name of %d bytes: want 1 to %d", n, maxSubscriber)
	}
	if s.Silence == 0 {
		s.Silence = defaultSilence
	}
	if s.Memory == 0 {
		s.Memory = defaultMemory
	}
	secure := insecure.NewCredentials()
	if s.TLS != nil {
		secure = credentials.NewTLS(s.TLS)
	}
	conn, err := grpc.NewClient("passthrough:///"+s.Address, grpc.WithTransportCredentials(secure),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(newCodec()), grpc.MaxCallRecvMsgSize(maxMessage)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: pingTime, Timeout: pingLimit, PermitWithoutStream: true}),
		grpc.WithMaxHeaderListSize(maxTrailers), grpc.WithDisableServiceConfig(), grpc.WithUserAgent("kvrouter"))
	if err != nil {
		return nil, fmt.Errorf("relay %s: %w", s.Address, err)
	}
	c := &Client{settings: s, conn: conn, streams: map[Producer]*poolStream{}, refusals: rate.Sometimes{Interval: lookTime}}
	c.budget.Store(s.Memory)
	return c, nil
}

// Run follows the relay until ctx ends, through its failures and restarts.
func (c *Client) Run(ctx context.Context) {
	defer c.conn.Close()
	var all sync.WaitGroup
	all.Go(func() { c.again(ctx, "catalog", c.followCatalog) })
	all.Go(func() {
		c.again(ctx, "readiness", func(ctx context.Context) error {
			defer c.set(func() { c.readiness = nil })
			return c.receive(ctx, "SubscribeServingReadiness", nil, c.settings.Silence, func(message []byte) error {
				r, err := DecodeReadiness(message)
				c.set(func() { c.readiness = r })
				return err
			})
		})
	})
	all.Go(func() {
		c.again(ctx, "load", func(ctx context.Context) error {
			defer c.set(func() { c.load = nil })
			return c.receive(ctx, "SubscribeKvPoolLoad", nil, c.settings.Silence, func(message []byte) error {
				l, err := DecodeLoad(message)
				c.set(func() { c.load = l })
				return err
			})
		})
	})
	all.Wait()
}

func (c *Client) set(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
	c.choose()
}

// again calls follow until ctx ends. A stream that has been open for a while is opened
// again soon, one that fails at once later and later.
func (c *Client) again(ctx context.Context, what string, follow func(context.Context) error) {
	wait := minRetry
	for ctx.Err() == nil {
		began := time.Now()
		err := follow(ctx)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > maxRetry {
			wait = minRetry
		}
		pause := wait/2 + rand.N(wait/2)
		c.settings.Log.Warn("the stream of a relay has ended: opening it again", "relay", c.settings.Address, "stream", what, "error", err, "in", pause.Round(time.Millisecond))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		wait = min(maxRetry, 2*wait)
	}
}

// receive opens a stream and hands its messages on until it ends, is silent for too long,
// or one is refused. silence 0: the stream has no heartbeat.
func (c *Client) receive(ctx context.Context, method string, expected *Producer, silence time.Duration, use func(message []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/"+service+"/"+method)
	if err != nil {
		return err
	}
	request := encodeRequest(c.settings.Subscriber, expected)
	if err := errors.Join(stream.SendMsg(&request), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	var silent *time.Timer
	if silence > 0 {
		silent = time.AfterFunc(silence, func() { cancel(fmt.Errorf("no message for %v", silence)) })
		defer silent.Stop()
	}
	pace := rate.NewLimiter(maxStates, maxStates)
	if expected != nil {
		pace.SetLimit(rate.Inf) // deltas change single words, under no lock
	}
	for {
		var message []byte
		if err := stream.RecvMsg(&message); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return err
		}
		if silent != nil {
			silent.Reset(silence)
		}
		if err := use(message); err != nil {
			return err
		}
		if err := pace.Wait(ctx); err != nil {
			return cmp.Or(context.Cause(ctx), err)
		}
	}
}

// followCatalog follows the relay's pools, and the stream of each while the catalog has it.
// All end with the catalog's stream.
func (c *Client) followCatalog(ctx context.Context) (err error) {
	ctx, cancel := context.WithCancel(ctx)
	var pools sync.WaitGroup
	defer func() {
		cancel()
		pools.Wait()
		c.set(func() { c.catalog, c.failed = nil, err })
	}()
	if err := c.meet(ctx); err != nil {
		return err
	}
	return c.receive(ctx, "WatchKvPoolCatalog", nil, 0, func(message []byte) error {
		catalog, err := DecodeCatalog(message)
		if err != nil {
			return err
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		if n := len(catalog.Refused); n > 0 {
			c.refusals.Do(func() {
				c.settings.Log.Warn("pools of a relay are left out", "relay", c.settings.Address, "pools", n, "first", catalog.Refused[0])
			})
		}
		c.catalog, c.failed = catalog, nil
		listed, model := map[Producer]bool{}, c.wanted()
		for i := range catalog.Pools {
			if c.settings.Want.BlockSize > 0 && c.unfitOf(&catalog.Pools[i], model) != "" {
				continue // its filter would be of no use
			}
			p := catalog.Pools[i].Producer
			if listed[p] = true; c.streams[p] != nil {
				continue
			}
			ctx, cancel := context.WithCancel(ctx)
			s := &poolStream{cancel: cancel}
			c.streams[p] = s
			pools.Go(func() {
				defer c.set(func() {
					if c.streams[p] == s {
						delete(c.streams, p)
					}
				})
				c.again(ctx, "pool", func(ctx context.Context) error { return c.followPool(ctx, catalog.Relay, p, s) })
			})
		}
		for p, s := range c.streams {
			if !listed[p] {
				s.cancel()
				delete(c.streams, p) // it may be listed again before its stream has ended
			}
		}
		c.choose()
		return nil
	})
}

// meet asks the relay who it is, so that one of another contract is told apart.
func (c *Client) meet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, infoLimit)
	defer cancel()
	request, answer := end(nil), []byte(nil)
	if err := c.conn.Invoke(ctx, "/"+service+"/GetRelayInfo", &request, &answer); err != nil {
		return err
	}
	_, err := decodeInfo(answer)
	return err
}

func (c *Client) followPool(ctx context.Context, relay Identity, p Producer, s *poolStream) (err error) {
	stream, err := newStream(p, &c.budget)
	if err != nil {
		return err
	}
	stream.relay, stream.heard = relay, true
	defer stream.Close()
	c.set(func() { s.filter, s.failed = stream.Filter(), nil })
	defer func() { c.set(func() { s.filter, s.failed = nil, err }) }()
	return c.receive(ctx, "SubscribeKvPool", &p, c.settings.Silence, func(message []byte) error {
		u, err := DecodeUpdate(message)
		if err != nil {
			return err
		}
		known := stream.Filter().Known()
		if err := stream.Apply(u); err != nil {
			return err
		}
		if !known && stream.Filter().Known() {
			c.set(func() {})
		}
		return nil
	})
}

// PoolView is a pool as the relay last told.
type PoolView struct {
	Pool
	Filter  *Filter  // nil: not known
	State   State    // of the model asked for
	Load    PoolLoad // see Loaded
	Loaded  bool
	Failure error // why there is no filter
}

// Pools returns the pools that serve a model, by the name or an alias of it or of an
// adapter, each with the state of that model. Those whose names mean different models are
// left out, as the contract demands. err says why the relay is not known.
func (c *Client) Pools(model string) (views []PoolView, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.catalog == nil {
		if c.failed != nil {
			return nil, fmt.Errorf("relay %s: %w", c.settings.Address, c.failed)
		}
		return nil, fmt.Errorf("relay %s has not answered yet", c.settings.Address)
	}
	var meant *Model
	for i := range c.catalog.Pools {
		pool := &c.catalog.Pools[i]
		m, known := pool.Serves(model)
		if !known {
			continue
		}
		if meant != nil && (m.Base != meant.Base || m.Adapter != meant.Adapter) {
			return nil, fmt.Errorf("relay %s: %q names different models of its pools", c.settings.Address, model)
		}
		meant = m
		v := PoolView{Pool: *pool, State: c.stateOf(pool, m)}
		if s := c.streams[pool.Producer]; s != nil {
			v.Filter, v.Failure = s.filter, s.failed
		}
		if c.load != nil && c.load.Relay == c.catalog.Relay {
			for _, l := range c.load.Pools {
				if l.Producer == pool.Producer {
					v.Load, v.Loaded = l, true
				}
			}
		}
		views = append(views, v)
	}
	return views, nil
}

// stateOf returns the state of a pool's model. Without the readiness of the relay it is
// Unknown.
func (c *Client) stateOf(pool *Pool, m *Model) State {
	if c.readiness == nil || c.readiness.Relay != c.catalog.Relay {
		return Unknown
	}
	for i := range c.readiness.Entries {
		e := &c.readiness.Entries[i]
		if e.Namespace != pool.Endpoint.Namespace || e.Model != m.Base {
			continue
		}
		for j := range e.Members {
			if member := &e.Members[j]; !member.HasPool || member.Pool != pool.Producer.Pool {
				continue
			}
			if m.Adapter == "" {
				return e.State
			}
			for _, a := range e.Adapters {
				if a.Name == m.Name || a.Name == m.Adapter {
					return min(a.State, e.State)
				}
			}
			return Unavailable
		}
	}
	return Unknown
}

// Match is what a pool holds of a prompt.
type Match struct {
	PoolView
	Blocks int // from the prompt's first on
}

// Match looks a prompt up in the pools that serve its model.
func (c *Client) Match(prompt *Prompt) ([]Match, error) {
	views, err := c.Pools(prompt.Model)
	matches := make([]Match, 0, len(views))
	type way struct {
		size   int
		format HashFormat
	}
	hashes := map[way][]uint64{}
	for _, v := range views {
		m := Match{PoolView: v}
		if v.Filter != nil && v.Filter.Known() {
			model, _ := v.Serves(prompt.Model)
			w := way{v.BlockSize, v.Format}
			sequence, done := hashes[w]
			if !done {
				sequence = v.Hashes(prompt, model.Adapter)
				hashes[w] = sequence
			}
			m.Blocks = v.Filter.Prefix(sequence)
		}
		matches = append(matches, m)
	}
	return matches, err
}
