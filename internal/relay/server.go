package relay

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"
	"unicode"

	"github.com/zeebo/xxh3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"kvrouter/internal/web"
)

const (
	// heartbeat is the time after which a pool's stream without a delta, and that of
	// readiness, tell that they are alive: that of Dynamo's relay.
	heartbeat = 10 * time.Second
	// loadWindow is the time between two loads, and between two looks at the models and
	// their readiness: that of Dynamo's relay.
	loadWindow = time.Second
	// sendLimit is the maximum time for a subscriber to take a message.
	sendLimit = time.Minute
	// maxConnections and maxStreams limit the subscribers' connections, and the streams on
	// each. maxPoolStreams limits the pool's streams of all: each copies the filter.
	maxConnections = 64
	maxStreams     = 16
	maxPoolStreams = 16
	// requestSize is the maximum size of a request, bytes.
	requestSize = 16 << 10
	// reasonKey is the trailer that tells why a stream was refused or has ended.
	reasonKey = "kv-relay-error-reason"
)

// Deps are what a Server tells beside the blocks. Its functions must not block.
type Deps struct {
	Secure    *tls.Config    // for --relay-tls
	BlockSize int            // tokens
	Models    func() []Model // that the pool serves; empty: there is none yet
	Ready     func() bool    // requests can be served
	Load      func() (used, total uint64, observed, expected int)
	Log       *slog.Logger
}

// Server lets others follow the blocks that a router's workers hold. It has one pool, of
// the default model. Serve must run, Close ends it.
type Server struct {
	holdings *Holdings
	deps     Deps
	endpoint Endpoint
	grpc     *grpc.Server
	listener net.Listener
	pools    chan struct{} // a place for each pool's stream
	closing  chan struct{}
	once     sync.Once
	sending  sync.WaitGroup // goroutines that may outlive their stream's handler

	mu       sync.Mutex // guards the rest
	revision uint64     // of catalog and readiness
	models   []Model
	ready    bool
	window   uint64
	changed  chan struct{} // closed at the next revision
	elapsed  chan struct{} // closed at the next window
}

// New opens the port, and makes the Holdings that the index must be followed by. Serve or
// Close must follow.
func New(s Settings, deps Deps) (*Server, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(s.RelayHost, strconv.Itoa(s.RelayPort)))
	if err != nil {
		return nil, fmt.Errorf("--relay-port %d: %w: free the port or choose another", s.RelayPort, err)
	}
	endpoint := Endpoint{Namespace: "kvrouter", Component: "router", Name: "generate"}
	scope := fmt.Sprintf("%s block=%d", endpoint, deps.BlockSize)
	producer := Producer{
		Pool: PoolID{
			Semantics:  Digest{Sum: digestOf("standard " + scope), Source: Explicit},
			Scope:      Digest{Sum: digestOf(endpoint.String()), Source: Explicit},
			DataCenter: xxh3.HashString(s.RelayDataCenter),
		},
		Incarnation: rand.Uint64(), Generation: 1, Format: FormatFor(s.RelayBlocks),
	}
	x := &Server{
		holdings: newHoldings(Identity{Instance: rand.Uint64(), Incarnation: rand.Uint64()}, producer, time.Now), deps: deps, endpoint: endpoint,
		listener: web.BoundMultiplexed(listener, maxConnections), pools: make(chan struct{}, maxPoolStreams), closing: make(chan struct{}),
		revision: 1, window: 1, changed: make(chan struct{}), elapsed: make(chan struct{}),
	}
	var secure []grpc.ServerOption
	if s.RelayTLS {
		secure = append(secure, grpc.Creds(credentials.NewTLS(deps.Secure)))
	}
	x.grpc = grpc.NewServer(append(secure, grpc.ForceServerCodecV2(newCodec()), grpc.MaxRecvMsgSize(requestSize), grpc.MaxConcurrentStreams(maxStreams), grpc.ConnectionTimeout(web.HeaderTimeout),
		grpc.WaitForHandlers(true), // Close waits for all of them
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: pingTime, Timeout: pingLimit}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}))...)
	x.grpc.RegisterService(x.description(), x)
	checks := health.NewServer()
	checks.SetServingStatus(service, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(x.grpc, checks)
	return x, nil
}

// digestOf returns 16 bytes that stand for a text.
func digestOf(text string) (sum [16]byte) {
	whole := sha256.Sum256([]byte(text))
	copy(sum[:], whole[:])
	return sum
}

// Holdings returns what the server tells.
func (x *Server) Holdings() *Holdings { return x.holdings }

// Address returns the address of the port.
func (x *Server) Address() string { return x.listener.Addr().String() }

// Serve answers subscribers until Close.
func (x *Server) Serve() error {
	var all sync.WaitGroup
	all.Go(x.publish)
	all.Go(x.look)
	err := x.grpc.Serve(x.listener)
	x.once.Do(func() { close(x.closing) })
	all.Wait()
	if err != nil {
		return fmt.Errorf("--relay-port: %w", err)
	}
	return nil
}

// Close ends all streams at once and closes the port.
func (x *Server) Close() {
	x.once.Do(func() { close(x.closing) })
	x.grpc.Stop()
	x.listener.Close() // if Serve was not called
	x.sending.Wait()
}

// publish tells the changes of the blocks, those of a while at once, until Close.
func (x *Server) publish() {
	timer := time.NewTimer(0)
	<-timer.C
	defer timer.Stop()
	for {
		select {
		case <-x.closing:
			return
		case <-x.holdings.wake:
		}
		timer.Reset(publishDelay)
		select {
		case <-x.closing:
			return
		case <-timer.C:
			x.holdings.publish()
		}
	}
}

// look looks at the models and their readiness until Close.
func (x *Server) look() {
	ticker := time.NewTicker(loadWindow)
	defer ticker.Stop()
	for {
		models, ready := x.deps.Models(), x.deps.Ready()
		x.mu.Lock()
		if ready != x.ready || !slices.EqualFunc(models, x.models, func(a, b Model) bool {
			return a.Name == b.Name && a.Base == b.Base && a.Adapter == b.Adapter && slices.Equal(a.Aliases, b.Aliases)
		}) {
			x.models, x.ready = models, ready
			x.revision++
			close(x.changed)
			x.changed = make(chan struct{})
		}
		x.window++
		close(x.elapsed)
		x.elapsed = make(chan struct{})
		x.mu.Unlock()
		select {
		case <-x.closing:
			return
		case <-ticker.C:
		}
	}
}

// catalog returns the catalog now, and the channel that is closed when it changes.
func (x *Server) catalog() (message []byte, changed <-chan struct{}) {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := Catalog{Relay: x.holdings.relay, Revision: x.revision}
	if len(x.models) > 0 {
		c.Pools = []Pool{{Producer: x.holdings.producer, Endpoint: x.endpoint, Models: x.models, BlockSize: x.deps.BlockSize, Format: Standard, Roles: []Role{Aggregated}}}
	}
	return c.Encode(), x.changed
}

// readiness does the same for the readiness.
func (x *Server) readiness() (message []byte, changed <-chan struct{}) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r := Readiness{Relay: x.holdings.relay, Revision: x.revision}
	state, present, missing := Unavailable, []Role(nil), []Role{Aggregated}
	if x.ready {
		state, present, missing = Ready, missing, nil
	}
	for _, m := range x.models {
		if m.Adapter == "" {
			r.Entries = append(r.Entries, Entry{
				Namespace: x.endpoint.Namespace, Model: m.Name, State: state, Present: present, Missing: missing,
				Members: []Member{{Endpoint: x.endpoint, Roles: []Role{Aggregated}, Pool: x.holdings.producer.Pool, HasPool: true}},
			})
		} else if i := slices.IndexFunc(r.Entries, func(e Entry) bool { return e.Model == m.Base }); i >= 0 {
			r.Entries[i].Adapters = append(r.Entries[i].Adapters, AdapterState{Name: m.Name, State: state, Missing: missing})
		}
	}
	return r.Encode(), x.changed
}

// load does the same for the load.
func (x *Server) load() (message []byte, elapsed <-chan struct{}) {
	used, total, observed, expected := x.deps.Load()
	x.mu.Lock()
	defer x.mu.Unlock()
	l := Load{Relay: x.holdings.relay, Window: x.window, Observed: uint64(time.Now().UnixMilli()), Length: uint64(loadWindow.Milliseconds())}
	if len(x.models) > 0 {
		l.Pools = []PoolLoad{{Producer: x.holdings.producer, Used: used, Total: total, Observed: uint32(observed), Expected: uint32(expected)}}
	}
	return l.Encode(), x.elapsed
}

// description describes the service to gRPC.
func (x *Server) description() *grpc.ServiceDesc {
	d := &grpc.ServiceDesc{ServiceName: service, HandlerType: (*any)(nil)}
	d.Methods = []grpc.MethodDesc{{MethodName: "GetRelayInfo", Handler: func(_ any, ctx context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
		var request []byte
		if err := decode(&request); err != nil {
			return nil, err
		}
		if _, _, err := decodeRequest(request, false); err != nil {
			return nil, err.tell(func(m metadata.MD) { _ = grpc.SetTrailer(ctx, m) })
		}
		answer := (&Catalog{Relay: x.holdings.relay}).EncodeInfo()
		return &answer, nil
	}}}
	for _, one := range []struct {
		method string
		pool   bool
		serve  func(stream grpc.ServerStream, expected *Producer) *refusal
	}{
		{"WatchKvPoolCatalog", false, func(s grpc.ServerStream, _ *Producer) *refusal { return x.tellEach(s, 0, x.catalog) }},
		{"SubscribeServingReadiness", false, func(s grpc.ServerStream, _ *Producer) *refusal { return x.tellEach(s, heartbeat, x.readiness) }},
		{"SubscribeKvPoolLoad", false, func(s grpc.ServerStream, _ *Producer) *refusal { return x.tellEach(s, 0, x.load) }},
		{"SubscribeKvPool", true, x.tellPool},
	} {
		d.Streams = append(d.Streams, grpc.StreamDesc{StreamName: one.method, ServerStreams: true, Handler: func(_ any, stream grpc.ServerStream) error {
			var request []byte
			if err := stream.RecvMsg(&request); err != nil {
				return err
			}
			subscriber, expected, err := decodeRequest(request, true)
			if err == nil && one.pool && expected == nil {
				err = refuse(codes.InvalidArgument, "INVALID_REQUEST", "the request names no producer")
			}
			if err == nil {
				x.deps.Log.Debug("a relay's stream begins", "stream", one.method, "subscriber", subscriber)
				err = one.serve(stream, expected)
			}
			if err != nil {
				return err.tell(stream.SetTrailer)
			}
			return nil
		}})
	}
	return d
}

// tellEach tells a state now, whenever it changes and, unless rest is 0, whenever it has
// not for that long.
func (x *Server) tellEach(stream grpc.ServerStream, rest time.Duration, state func() ([]byte, <-chan struct{})) *refusal {
	var ticks <-chan time.Time
	if rest > 0 {
		ticker := time.NewTicker(rest)
		defer ticker.Stop()
		ticks = ticker.C
	}
	for {
		message, changed := state()
		if err := x.send(stream, message); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ticks:
		case <-stream.Context().Done():
			return nil
		case <-x.closing:
			return errClosing
		}
	}
}

// tellPool tells the filter and its changes.
func (x *Server) tellPool(stream grpc.ServerStream, expected *Producer) *refusal {
	switch h := x.holdings; {
	case expected.Pool != h.producer.Pool:
		return refuse(codes.NotFound, "POOL_NOT_FOUND", "no such pool")
	case *expected != h.producer:
		return refuse(codes.FailedPrecondition, "PRODUCER_CHANGED", "the pool has another producer: read the catalog")
	}
	select {
	case x.pools <- struct{}{}:
		defer func() { <-x.pools }()
	default:
		return refuse(codes.ResourceExhausted, "RESOURCE_LIMIT", fmt.Sprintf("%d streams of pools are open already", maxPoolStreams))
	}
	words, sequence, s := x.holdings.subscribe()
	defer x.holdings.unsubscribe(s)
	u := Update{Relay: x.holdings.relay, Producer: x.holdings.producer, Kind: Snapshot}
	for i := range chunksOf(len(words)) {
		u.Base, u.Sequence, u.Sent = sequence, sequence, uint64(time.Now().UnixMicro())
		u.Payload = encodeChunk(&u.Producer, sequence, words, i)
		if err := x.send(stream, u.Encode()); err != nil {
			return err
		}
	}
	words, u.Kind, u.Payload = nil, Heartbeat, nil
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for {
		select {
		case message, open := <-s.queue:
			if !open {
				return refuse(codes.ResourceExhausted, "SUBSCRIBER_LAGGED", "more messages are waiting than fit: begin with a snapshot")
			}
			x.holdings.took(s, message)
			if err := x.send(stream, message); err != nil {
				return err
			}
			sequence++
			ticker.Reset(heartbeat)
		case <-ticker.C:
			u.Base, u.Sequence, u.Sent = sequence, sequence, uint64(time.Now().UnixMicro())
			if err := x.send(stream, u.Encode()); err != nil {
				return err
			}
		case <-stream.Context().Done():
			return nil
		case <-x.closing:
			return errClosing
		}
	}
}

// send sends a message, for sendLimit at most. One that is not taken ends with its stream.
func (x *Server) send(stream grpc.ServerStream, message []byte) *refusal {
	sent := make(chan error, 1)
	x.sending.Go(func() { sent <- stream.SendMsg(&message) })
	timer := time.NewTimer(sendLimit)
	defer timer.Stop()
	select {
	case err := <-sent:
		if err != nil {
			return refuse(status.Code(err), "INTERNAL", "the message was not sent")
		}
		return nil
	case <-timer.C:
		return refuse(codes.ResourceExhausted, "SNAPSHOT_PROGRESS_TIMEOUT", "a message was not taken in time")
	case <-x.closing:
		return errClosing
	}
}

// refusal is why a stream is refused or ends, in the contract's words.
type refusal struct {
	code         codes.Code
	reason, text string
}

var errClosing = refuse(codes.Unavailable, "PUBLICATION_UNAVAILABLE", "the relay is closing")

func refuse(code codes.Code, reason, text string) *refusal { return &refusal{code, reason, text} }

// tell sets the trailer of the reason and returns the status.
func (r *refusal) tell(set func(metadata.MD)) error {
	set(metadata.Pairs(reasonKey, "RELAY_ERROR_REASON_"+r.reason))
	return status.Error(r.code, r.text)
}

// decodeRequest decodes a request. expected is the producer that it names; nil: none.
func decodeRequest(message []byte, subscribes bool) (subscriber string, expected *Producer, refused *refusal) {
	var marker uint64
	var producer []byte
	err := eachField(message, func(field int, number uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			subscriber, err = decodeText("subscriber_id", text)
		case 2<<3 | lengths:
			producer = text
		case markerField<<3 | fixed32:
			marker = number
		}
		return err
	})
	switch {
	case err != nil:
	case marker != contractMarker:
		return "", nil, refuse(codes.FailedPrecondition, "CONTRACT_MISMATCH", fmt.Sprintf("marker %#x: want %#x", marker, contractMarker))
	case subscribes && (subscriber == "" || len(subscriber) > maxSubscriber):
		err = fmt.Errorf("a subscriber_id of %d bytes: want 1 to %d", len(subscriber), maxSubscriber)
	case slices.ContainsFunc([]rune(subscriber), unicode.IsControl):
		err = fmt.Errorf("subscriber_id %q has control characters", subscriber)
	case producer != nil:
		var p Producer
		p, err = decodeProducer(producer)
		expected = &p
	}
	if err != nil {
		return "", nil, refuse(codes.InvalidArgument, "INVALID_REQUEST", err.Error())
	}
	return subscriber, expected, nil
}
