// Package extproc is the endpoint picker of the Gateway API Inference Extension
// (protocol 004): a gateway requests the destination of a request over Envoy's
// ext_proc, and passes the answer through the router. Each stream becomes a request
// of net/http and is served like any other.
package extproc

import (
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
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"golang.org/x/net/netutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"

	"kvrouter/internal/guard"
	"kvrouter/internal/proxy"
	"kvrouter/internal/web"
)

const (
	// maxConnections and maxStreams bound the gateways' connections, and the requests on
	// each: Envoy has one connection for each of its threads.
	maxConnections = 512
	maxStreams     = 16 << 10
	// maxMessage bounds one message, bytes: a gateway sends bodies in pieces of at most
	// its own buffer, which is 1 MiB where nothing is said.
	maxMessage = 4 << 20
	// windowSize is how much a gateway may send ahead on a connection, bytes: less would make
	// each large body wait for its window.
	windowSize = 1 << 20
	// idlePing is the idle time of a connection before a keepalive ping.
	idlePing = 30 * time.Second
	// silenceLimit is the time that a stream may be open before its request begins.
	silenceLimit = 30 * time.Second
	// selfSigned is the time that a certificate made at the start is valid.
	selfSigned = 10 * 365 * 24 * time.Hour
)

// Server serves the endpoint picker's ports. Drain ends it.
type Server struct {
	serve      func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway)
	settings   Settings
	objectives map[string]int
	silence    time.Duration // silenceLimit
	edges      *guard.Edges
	log        *slog.Logger
	grpc       *grpc.Server
	health     *grpc.Server // nil: no port of its own
	picker     net.Listener
	checks     net.Listener // of health
	cut        context.CancelCauseFunc
	base       context.Context
	handlers   sync.WaitGroup // goroutines that may outlive their stream's Process: handlers, and readers
	warned     sync.Once      // of a gateway that sends bodies otherwise
	leave      sync.Once
	leaving    chan struct{} // closed when no new request is taken any more
}

// Deps are the picker's listeners and the receiver of its requests.
type Deps struct {
	Host   string      // of both ports
	Secure *tls.Config // for --ext-proc-tls; nil: a certificate is made
	// Serve serves a request that came from a gateway.
	Serve func(w http.ResponseWriter, r *http.Request, via *proxy.Gateway)
	Ready func() (ready bool) // requests can be served
	Edges *guard.Edges
	Log   *slog.Logger
}

// New opens the ports. Serve or Close must follow.
func New(s Settings, deps Deps) (*Server, error) {
	objectives, err := s.objectives()
	if err != nil {
		return nil, err
	}
	p := &Server{serve: deps.Serve, settings: s, objectives: objectives, silence: silenceLimit, edges: deps.Edges, log: deps.Log, leaving: make(chan struct{})}
	p.base, p.cut = context.WithCancelCause(context.Background())
	options := []grpc.ServerOption{
		grpc.MaxConcurrentStreams(maxStreams), grpc.MaxRecvMsgSize(maxMessage), grpc.InitialWindowSize(windowSize), grpc.InitialConnWindowSize(windowSize * 4),
		grpc.WaitForHandlers(true), // Close leaves no handler behind
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: idlePing}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: time.Second, PermitWithoutStream: true}),
	}
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
	if p.picker, err = listen(deps.Host, s.ExtProcPort, "--ext-proc-port"); err != nil {
		return nil, err
	}
	if s.ExtProcHealthPort != 0 {
		if p.checks, err = listen(deps.Host, s.ExtProcHealthPort, "--ext-proc-health-port"); err != nil {
			p.picker.Close()
			return nil, err
		}
		p.health = grpc.NewServer(grpc.MaxConcurrentStreams(64), grpc.MaxRecvMsgSize(4<<10))
		grpc_health_v1.RegisterHealthServer(p.health, checks)
	}
	return p, nil
}

func listen(host string, port int, flag string) (net.Listener, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("%s %d: %w: free the port or choose another", flag, port, err)
	}
	return netutil.LimitListener(listener, maxConnections), nil
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

// cutTime is the time that requests that were cut may take to answer their clients.
const cutTime = 2 * time.Second

// Close stops listening and ends every stream at once.
func (p *Server) Close() {
	p.leave.Do(func() { close(p.leaving) })
	p.cut(web.ErrStopped)
	p.grpc.Stop()
	p.picker.Close() // where Serve was not reached
	if p.health != nil {
		p.health.Stop()
		p.checks.Close()
	}
	p.handlers.Wait()
}

// ownCertificate makes a certificate that is signed by itself.
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
