package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"kvrouter/internal/base/kv"
)

// Limits of the server in the process.
const (
	// maxPayload is the largest message, bytes.
	maxPayload = 8 << 20
	// maxPending bounds what waits for one other member, bytes. One that is further behind is
	// disconnected, and connects again.
	maxPending = 64 << 20
	// maxPeers bounds the addresses of other members.
	maxPeers = 128
	// routeRetries bounds the attempts, one a second, to reach again a member that another one has
	// named. Those of the settings and of discovery are tried for ever.
	routeRetries = 600
	// pingEvery and maxPings give up a route that is silent for 4 s.
	pingEvery, maxPings = time.Second, 3
	// writeLimit is the longest wait for a member that does not read.
	writeLimit = 3 * time.Second
	// startLimit is the longest wait for the server to start.
	startLimit = 10 * time.Second
	startLook  = 50 * time.Millisecond
)

// node is the NATS server in the process. Its only client is the Link, and its port is for other
// members.
type node struct {
	*server.Server
	log *serverLog

	mu      sync.Mutex // guards the rest
	options *server.Options
	named   []*url.URL // of the settings
}

// startNode starts a server for a client, which proves itself by its public NKey. Errors name the flag.
func startNode(settings Settings, id, client string, log *slog.Logger) (*node, error) {
	name := settings.Cluster
	options := &server.Options{
		ServerName: member + "-" + id, NoLog: true, NoSigs: true, NoSystemAccount: true,
		MaxPayload: maxPayload, MaxPending: maxPending, WriteDeadline: writeLimit,
		// Without a port for clients the server opens none for routes. This one takes nobody: the
		// connection in the process is the only one, so others are closed before they are read.
		Host: "127.0.0.1", Port: server.RANDOM_PORT, MaxConn: 1,
		// Not Username and Password: each change of the routes would disconnect that client.
		Nkeys: []*server.NkeyUser{{Nkey: client}},
		Cluster: server.ClusterOpts{
			Name: member + "-" + name, Host: settings.ClusterHost, Port: settings.ClusterPort, Advertise: settings.ClusterAdvertise,
			PoolSize: -1, ConnectRetries: routeRetries, PingInterval: pingEvery, MaxPingsOut: maxPings,
			Compression: server.CompressionOpts{Mode: server.CompressionOff},
		},
	}
	if options.Cluster.Port == 0 {
		options.Cluster.Port = server.RANDOM_PORT
	}
	if settings.ClusterKey != "" {
		var err error
		if options.Cluster.TLSConfig, err = keyTLS(name, settings.ClusterKey); err != nil {
			return nil, err
		}
		options.Cluster.TLSTimeout = 2
	}
	n := &node{log: &serverLog{log: log}, options: options}
	for _, peer := range settings.ClusterPeers {
		n.named = append(n.named, route(peer))
	}
	options.Routes = n.named
	var err error
	if n.Server, err = server.NewServer(options.Clone()); err != nil {
		return nil, fmt.Errorf("--cluster: %w", err)
	}
	n.SetLoggerV2(n.log, false, false, false)
	n.Start()
	if !n.ready() {
		n.stop()
		return nil, fmt.Errorf("--cluster-port %d: %w: free the port or choose another", settings.ClusterPort, n.log.failure())
	}
	return n, nil
}

// ready waits until the server has opened its port. It returns false if it cannot.
func (n *node) ready() bool {
	for began := time.Now(); time.Since(began) < startLimit; {
		if n.ReadyForConnections(startLook) {
			return true
		}
		if n.log.failed() {
			return false
		}
	}
	return false
}

// route returns the address of a member in the form of the server.
func route(address string) *url.URL { return &url.URL{Scheme: "nats-route", Host: address} }

// use has the server connect to the members at these addresses, in place of those found before.
func (n *node) use(addresses []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	routes, left := slices.Clone(n.named), 0
	for _, address := range addresses {
		switch {
		case !validAddress(address) || len(routes) >= maxPeers:
			left++
		case !slices.ContainsFunc(routes, func(u *url.URL) bool { return u.Host == address }):
			routes = append(routes, route(address))
		}
	}
	if left > 0 {
		n.log.log.Warn("discovered routers ignored: too many, or without an address", "found", len(addresses), "left_out", left, "most", maxPeers)
	}
	n.options.Routes = routes
	if err := n.ReloadOptions(n.options.Clone()); err != nil {
		n.log.log.Warn("addresses of the cluster's members not changed", "error", err)
	}
}

// stop ends the server and all of its connections.
func (n *node) stop() {
	n.Shutdown()
	n.WaitForShutdown()
}

// validAddress checks an address of a member.
func validAddress(address string) bool {
	host, port, err := net.SplitHostPort(address)
	_, ok := kv.ParsePort(port)
	return err == nil && ok && host != ""
}

// serverLog passes on the server's warnings and errors, each kind of line once in logEvery.
type serverLog struct {
	log *slog.Logger

	mu    sync.Mutex // guards the rest
	said  map[string]time.Time
	fatal string
}

const (
	logEvery = time.Minute
	// mostSaid bounds the kinds of lines that are remembered.
	mostSaid = 256
)

// failed reports whether the server has said that it cannot start.
func (l *serverLog) failed() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fatal != ""
}

// failure returns why the server did not start.
func (l *serverLog) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fatal == "" {
		return errors.New("NATS server not started")
	}
	return errors.New(l.fatal)
}

// line logs a line at a level.
func (l *serverLog) line(level slog.Level, format string, v []any) {
	kind := format
	if _, after, ok := strings.Cut(format, " - rid:"); ok { // it begins with the connection
		_, kind, _ = strings.Cut(after, " - ")
	}
	now := time.Now()
	l.mu.Lock()
	if now.Sub(l.said[kind]) < logEvery {
		l.mu.Unlock()
		return
	}
	if l.said == nil || len(l.said) >= mostSaid {
		l.said = map[string]time.Time{}
	}
	l.said[kind] = now
	l.mu.Unlock()
	l.log.Log(context.Background(), level, "NATS: "+strings.TrimSpace(fmt.Sprintf(format, v...)))
}

// Fatalf implements server.Logger.
func (l *serverLog) Fatalf(format string, v ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fatal = fmt.Sprintf(format, v...)
}

// Errorf implements server.Logger.
func (l *serverLog) Errorf(format string, v ...any) { l.line(slog.LevelWarn, format, v) }

// Warnf implements server.Logger.
func (l *serverLog) Warnf(format string, v ...any) { l.line(slog.LevelWarn, format, v) }

// Noticef implements server.Logger.
func (l *serverLog) Noticef(format string, v ...any) { l.line(slog.LevelDebug, format, v) }

// Debugf implements server.Logger.
func (l *serverLog) Debugf(string, ...any) {}

// Tracef implements server.Logger.
func (l *serverLog) Tracef(string, ...any) {}
