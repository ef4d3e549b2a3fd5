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
	// maxMemory is the maximum size of all filters of a relay, bytes.
	maxMemory = 256 << 20
	// maxStates bounds the catalogs that are read in a second, and the messages of readiness, of
	// which a relay sends one: reading more pauses.
	maxStates = 20
	// maxTrailers bounds the headers and trailers of an answer, bytes.
	maxTrailers = 16 << 10
	// subscriber is this router's name in the relay's logs.
	subscriber = "kvrouter"
)

// Following are the settings for following a relay.
type Following struct {
	Address string        // host and port
	TLS     *tls.Config   // nil: plaintext, the only way of Dynamo's relay
	Silence time.Duration // after which a pool's filter is emptied; 0: 30 s
	Want    Want          // what is looked up
	Log     *slog.Logger
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
	refusals  rate.Sometimes
	unfit     string // see Unfit
}

// poolStream is a pool's stream that is open, or will be opened again.
type poolStream struct {
	cancel context.CancelFunc
	filter *Filter // nil: none yet
}

// NewClient makes a client. Run must follow.
func NewClient(s Following) (*Client, error) {
	if s.Silence == 0 {
		s.Silence = defaultSilence
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
	c.budget.Store(maxMemory)
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
				r, err := decodeReadiness(message)
				c.set(func() { c.readiness = r })
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

// again calls follow until ctx ends. A stream that has been open for a while is reopened
// soon, one that fails at once with growing pauses.
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
		c.settings.Log.Warn("the stream of a relay has ended: opening it again", "relay", c.settings.Address, "stream", what, "error", err,
			"in", pause.Round(time.Millisecond))
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
		case <-timer.C:
		}
		timer.Stop()
		wait = min(maxRetry, 2*wait)
	}
}

// receive opens a stream and passes on its messages until it ends, is silent for too long,
// or a message is refused. producer is nil but for SubscribeKvPool. silence 0: the stream has no
// heartbeat.
func (c *Client) receive(ctx context.Context, method string, producer []byte, silence time.Duration, use func(message []byte) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := c.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, "/"+service+"/"+method)
	if err != nil {
		return err
	}
	request := encodeRequest(producer)
	if err := errors.Join(stream.SendMsg(&request), stream.CloseSend()); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	var silent *time.Timer
	if silence > 0 {
		silent = time.AfterFunc(silence, func() { cancel(fmt.Errorf("no message for %v", silence)) })
		defer silent.Stop()
	}
	pace := rate.NewLimiter(maxStates, maxStates)
	if producer != nil {
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
func (c *Client) followCatalog(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	var pools sync.WaitGroup
	defer func() {
		cancel()
		pools.Wait()
		c.set(func() { c.catalog = nil })
	}()
	if err := c.meet(ctx); err != nil {
		return err
	}
	return c.receive(ctx, "WatchKvPoolCatalog", nil, 0, func(message []byte) error {
		catalog, err := decodeCatalog(message)
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
		c.catalog = catalog
		listed, model := map[Producer]bool{}, c.wanted()
		for i := range catalog.Pools {
			pool := &catalog.Pools[i]
			if c.unfitOf(pool, model) != "" {
				continue // its filter would be of no use
			}
			p := pool.Producer
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
				c.again(ctx, "pool", func(ctx context.Context) error { return c.followPool(ctx, catalog.Relay, pool, s) })
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

// meet asks the relay who it is, and refuses one of another contract.
func (c *Client) meet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, infoLimit)
	defer cancel()
	request, answer := appendMarker(nil), []byte(nil)
	if err := c.conn.Invoke(ctx, "/"+service+"/GetRelayInfo", &request, &answer); err != nil {
		return err
	}
	_, err := readAnswer(answer, fields{})
	return err
}

func (c *Client) followPool(ctx context.Context, relay Identity, pool *Pool, s *poolStream) error {
	stream := NewStream(pool.Producer, &c.budget)
	stream.relay, stream.heard = relay, true
	defer stream.Close()
	c.set(func() { s.filter = stream.Filter() })
	defer c.set(func() { s.filter = nil })
	return c.receive(ctx, "SubscribeKvPool", pool.encoded, c.settings.Silence, func(message []byte) error {
		u, err := decodeUpdate(message)
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

// unavailable reports whether the relay says that a model of a pool cannot be served. The caller
// has locked c.mu.
func (c *Client) unavailable(pool *Pool, m *Model) bool {
	return c.readiness != nil && c.readiness.Relay == c.catalog.Relay && c.readiness.Unavailable[served{pool.Producer.Pool, m.Base}]
}
