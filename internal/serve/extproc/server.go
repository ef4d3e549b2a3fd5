// Package extproc is the endpoint picker of the Gateway API Inference Extension
// (protocol 004): a gateway requests the destination of a request over Envoy's
// ext_proc, and passes the answer through the router. Each stream becomes a request
// of net/http and is served like any other.
package extproc

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/tap"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

const (
	// maxConnections and maxStreams limit the gateways' connections, and the requests on
	// each: Envoy has one connection per thread. maxChecks limits the connections to the
	// port of health checks.
	maxConnections = 512
	maxStreams     = 16 << 10
	maxChecks      = 64
	// maxStreamHeaders is the maximum size of the headers of a gRPC stream, bytes, plus 32
	// for each. The headers of the request arrive in a message.
	maxStreamHeaders = 64 << 10
	// maxMessage is the maximum size of a message, bytes: a gateway sends bodies in pieces
	// of at most its own buffer, 1 MiB by default.
	maxMessage = 4 << 20
	// windowSize is the flow-control window of a connection, bytes: a smaller one would
	// delay each large body.
	windowSize = 1 << 20
	// idlePing is the idle time of a connection before a keepalive ping.
	idlePing = 30 * time.Second
	// idleLimit is the time after which a connection without a stream is closed.
	idleLimit = 2 * time.Minute
	// silenceLimit is the maximum time from the start of a stream to its request headers.
	silenceLimit = 30 * time.Second
	// overTime is the same for a health check when the memory of all streams is used up.
	overTime = 20 * time.Millisecond
	// selfSigned is the validity of a certificate generated at startup.
	selfSigned = 10 * 365 * 24 * time.Hour
)

// Server serves the endpoint picker's ports. Drain ends it.
type Server struct {
	serve      func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway)
	settings   Settings
	objectives map[string]int
	tokens     *proxy.SessionTokens
	limits     limits
	memory     memory // of all streams
	refused    [reasons]atomic.Uint64
	edges      *guard.Edges
	log        *slog.Logger
	grpc       *grpc.Server
	health     *grpc.Server // nil: no port of its own
	picker     net.Listener
	checks     net.Listener // of health
	cut        context.CancelCauseFunc
	base       context.Context
	handlers   sync.WaitGroup // goroutines that may outlive their stream's Process: handlers, and readers
	warned     sync.Once      // about a gateway that sends bodies in another mode
	leave      sync.Once
	leaving    chan struct{} // closed when new requests are refused
}

// Deps are the picker's listeners and the receiver of its requests.
type Deps struct {
	Host   string      // of both ports
	Secure *tls.Config // for --ext-proc-tls; nil: a certificate is generated
	// Serve serves a request that came from a gateway.
	Serve func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway)
	Ready func() (ready bool) // requests can be served
	// Secret is shared by the routers of the same workers. Without --session-token-key, the
	// key of session tokens is derived from it; empty: there is none.
	Secret string
	// SessionTTL is the validity of a session token.
	SessionTTL time.Duration
	// Connections is the maximum number of connections of the picker's port, at most
	// maxConnections.
	Connections int
	Edges       *guard.Edges
	Log         *slog.Logger
}

// limits are the maximum times of inactivity of a gateway.
type limits struct {
	idle    time.Duration // of a connection without a stream
	silence time.Duration // of a stream before its request begins
	stall   time.Duration // without progress of a request's body, or of a message to the gateway
}

// New opens the ports. Serve or Close must follow.
func New(s Settings, deps Deps) (*Server, error) {
	return open(s, deps, limits{idle: idleLimit, silence: silenceLimit, stall: web.Stall})
}

func open(s Settings, deps Deps, l limits) (*Server, error) {
	objectives, err := s.objectives()
	if err != nil {
		return nil, err
	}
	tokens, err := proxy.NewSessionTokens(cmp.Or(s.SessionTokenKey, deps.Secret), deps.SessionTTL)
	if err != nil {
		return nil, err
	}
	p := &Server{tokens: tokens, serve: deps.Serve, settings: s, objectives: objectives, limits: l, edges: deps.Edges, log: deps.Log,
		leaving: make(chan struct{})}
	p.memory.most = cmp.Or(s.ExtProcMaxInflightBytes, unsetInflight)
	p.base, p.cut = context.WithCancelCause(context.Background())
	bounds := []grpc.ServerOption{
		grpc.MaxHeaderListSize(maxStreamHeaders), grpc.InTapHandle(p.admit), grpc.ConnectionTimeout(web.HeaderTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: idlePing, MaxConnectionIdle: l.idle}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	}
	options := append([]grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxStreams), grpc.MaxRecvMsgSize(maxMessage), grpc.InitialWindowSize(windowSize),
		grpc.InitialConnWindowSize(windowSize * 4),
		grpc.ForceServerCodecV2(newCodec()),
		grpc.WaitForHandlers(true), // Close waits for all handlers
	}, bounds...)
	if s.ExtProcTLS {
		config := deps.Secure
		if config == nil {
			if config, err = ownCertificate(); err != nil {
				return nil, fmt.Errorf("--ext-proc-tls: %w", err)
			}
		}
		options = append(options, grpc.Creds(credentials.NewTLS(config)))
	}
	p.grpc = grpc.NewServer(options...)
	checks := &health{ready: deps.Ready, leaving: p.leaving}
	extprocv3.RegisterExternalProcessorServer(p.grpc, p)
	grpc_health_v1.RegisterHealthServer(p.grpc, checks)
	if p.picker, err = listen(deps.Host, s.ExtProcPort, "--ext-proc-port", min(deps.Connections, maxConnections)); err != nil {
		return nil, err
	}
	if s.ExtProcHealthPort != 0 {
		if p.checks, err = listen(deps.Host, s.ExtProcHealthPort, "--ext-proc-health-port", maxChecks); err != nil {
			p.picker.Close()
			return nil, err
		}
		p.health = grpc.NewServer(append([]grpc.ServerOption{grpc.MaxConcurrentStreams(maxChecks), grpc.MaxRecvMsgSize(4 << 10)}, bounds...)...)
		grpc_health_v1.RegisterHealthServer(p.health, checks)
	}
	return p, nil
}

func listen(host string, port int, flag string, most int) (net.Listener, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	return web.BoundMultiplexed(listener, most), nil
}

// admit counts the memory of a stream that begins; Process refuses one that does not fit. A
// health check without a request ends after the silence, or after overTime if it does not
// fit. admit runs in the connection's goroutine. An error here would leak the stream's
// context until the connection is closed.
func (p *Server) admit(ctx context.Context, info *tap.Info) (context.Context, error) {
	n, silence := streamMemory+memoryOf(info.Header), p.limits.silence
	fits := p.memory.take(n)
	if fits {
		context.AfterFunc(ctx, func() { p.memory.give(n) })
	}
	if info.FullMethodName == extprocv3.ExternalProcessor_Process_FullMethodName {
		return context.WithValue(ctx, fitsKey{}, fits), nil
	}
	if !fits {
		silence = overTime
	}
	ctx, cancel := context.WithCancel(ctx)
	return context.WithValue(ctx, silentKey{}, time.AfterFunc(silence, cancel)), nil
}

// fitsKey is the context key of whether a stream of Process fits into the memory.
type fitsKey struct{}

// silentKey is the context key of the timer that ends a health check.
type silentKey struct{}

// heard stops the timer that ends a health check without a request.
func heard(ctx context.Context) {
	if silent, ok := ctx.Value(silentKey{}).(*time.Timer); ok {
		silent.Stop()
	}
}

// Address returns the address of the picker's port.
func (p *Server) Address() string { return p.picker.Addr().String() }

// Serve answers gateways until Drain or Close; then it returns nil.
func (p *Server) Serve() error {
	var health sync.WaitGroup
	defer health.Wait()
	if p.health != nil {
		health.Go(func() { p.health.Serve(p.checks) })
	}
	if err := p.grpc.Serve(p.picker); err != nil {
		return fmt.Errorf("--ext-proc-port: %w", err)
	}
	return nil
}

// Drain refuses new requests and waits up to limit until all have ended. It cancels
// the contexts of the remaining ones with the cause web.ErrStopped.
func (p *Server) Drain(limit time.Duration) (whole bool) {
	defer p.Close()
	p.leave.Do(func() { close(p.leaving) })
	ended := make(chan struct{})
	go func() { // until Close at the latest
		p.grpc.GracefulStop()
		close(ended)
	}()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-ended:
		return true
	case <-timer.C:
	}
	p.cut(web.ErrStopped)
	timer.Reset(cutTime)
	select {
	case <-ended:
	case <-timer.C:
	}
	return false
}

// cutTime is the time for canceled requests to answer their clients.
const cutTime = 2 * time.Second

// Close stops listening and ends every stream at once.
func (p *Server) Close() {
	p.leave.Do(func() { close(p.leaving) })
	p.cut(web.ErrStopped)
	p.grpc.Stop()
	p.picker.Close() // if Serve was not called
	if p.health != nil {
		p.health.Stop()
		p.checks.Close()
	}
	p.handlers.Wait()
}

// ownCertificate generates a self-signed certificate.
func ownCertificate() (*tls.Config, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: "kvrouter"}, DNSNames: []string{"kvrouter", "localhost"},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(selfSigned),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	signed, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{signed}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}, nil
}
