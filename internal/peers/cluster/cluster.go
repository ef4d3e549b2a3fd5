// Package cluster carries the messages between several routers by NATS: by a server in each
// process, or by the servers of an operator.
package cluster

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nkeys"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/peers/replica"
)

// Settings holds the settings of a cluster of routers.
type Settings struct {
	Cluster            string   `group:"Cluster" placeholder:"NAME" help:"Share in-flight load, sessions and ejections with the other routers of the same workers over NATS: the name of a cluster, which the routers form by themselves, or the comma-separated URLs of existing NATS servers, nats://HOST:PORT or tls://HOST:PORT."`
	ClusterPort        int      `group:"Cluster" default:"6222" help:"Port for the other routers of the cluster. 0 selects a free port."`
	ClusterHost        string   `group:"Cluster" placeholder:"HOST" help:"Listen address of that port. Default: that of --host."`
	ClusterAdvertise   string   `group:"Cluster" hidden:"" placeholder:"HOST[:PORT]" help:"Address of that port as other routers reach it. Default: the address from which this router connects to them."`
	ClusterPeers       []string `group:"Cluster" placeholder:"HOST:PORT" help:"Comma-separated --cluster-port addresses of other routers. One is enough: routers tell each other of the rest."`
	ClusterDiscovery   string   `group:"Cluster" placeholder:"WHERE" help:"Service discovery of the other routers: dns://NAME:PORT (all addresses of a name), or service://NAME:PORT or service://NAMESPACE/NAME:PORT (endpoints of a headless Kubernetes Service). May include this router."`
	ClusterKey         string   `group:"Cluster" placeholder:"KEY" help:"Key shared by all routers of the cluster, at least 16 characters. Both sides of a connection prove by TLS that they have it. Prefer the environment variable or the configuration file."`
	ClusterPrefix      string   `group:"Cluster" placeholder:"SUBJECT" default:"kvrouter" help:"First part of all subjects in existing NATS servers. Routers of one fleet have the same, other fleets another."`
	ClusterCredentials string   `group:"Cluster" placeholder:"FILE" help:"Credentials file (JWT and NKey seed) for existing NATS servers."`
	ClusterCA          string   `group:"Cluster" placeholder:"FILE" name:"cluster-ca" help:"Certificate authorities of existing NATS servers (PEM). Default: those of the system."`
	ClusterCert        string   `group:"Cluster" placeholder:"FILE" help:"Client certificate for existing NATS servers (PEM)."`
	ClusterCertKey     string   `group:"Cluster" placeholder:"FILE" help:"Private key of --cluster-cert (PEM)."`
}

// Existing reports whether the servers are those of an operator.
func (c Settings) Existing() bool { return strings.Contains(c.Cluster, "://") }

// Own reports whether this process has a server with a port.
func (c Settings) Own() bool { return c.Cluster != "" && !c.Existing() }

// names are those of clusters, and the parts of a prefix: tokens of a subject.
var (
	names    = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)
	prefixes = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}(\.[A-Za-z0-9_-]{1,64}){0,7}$`)
)

// Validate checks the settings; its errors name the flag.
func (c Settings) Validate() error {
	own := map[string]bool{
		"--cluster-peers": len(c.ClusterPeers) > 0, "--cluster-discovery": c.ClusterDiscovery != "", "--cluster-key": c.ClusterKey != "",
		"--cluster-advertise": c.ClusterAdvertise != "",
	}
	existing := map[string]bool{
		"--cluster-credentials": c.ClusterCredentials != "", "--cluster-ca": c.ClusterCA != "",
		"--cluster-cert": c.ClusterCert != "", "--cluster-cert-key": c.ClusterCertKey != "",
	}
	for flag, set := range own {
		if set && !c.Own() {
			return fmt.Errorf("%s requires --cluster NAME", flag)
		}
	}
	for flag, set := range existing {
		if set && !c.Existing() {
			return fmt.Errorf("%s requires --cluster nats://HOST:PORT", flag)
		}
	}
	switch {
	case c.Existing():
		for text := range strings.SplitSeq(c.Cluster, ",") {
			u, err := url.Parse(strings.TrimSpace(text))
			if err != nil || u.Scheme != "nats" && u.Scheme != "tls" || u.Hostname() == "" {
				return errors.New("--cluster: want a name, or nats://HOST:PORT or tls://HOST:PORT, comma-separated")
			}
		}
	case c.Own() && !names.MatchString(c.Cluster):
		return fmt.Errorf("--cluster %.80s: want 1 to 64 letters, digits, - and _", c.Cluster)
	}
	switch {
	case c.ClusterKey != "" && len(c.ClusterKey) < keySize:
		return fmt.Errorf("--cluster-key: %d characters, at least %d required", len(c.ClusterKey), keySize)
	case len(c.ClusterPeers) > maxPeers:
		return fmt.Errorf("--cluster-peers: %d peers exceed the limit of %d", len(c.ClusterPeers), maxPeers)
	case c.ClusterPrefix != "" && !prefixes.MatchString(c.ClusterPrefix):
		return fmt.Errorf("--cluster-prefix %.80s: want letters, digits, - and _ in up to 8 parts with a . between", c.ClusterPrefix)
	case (c.ClusterCert == "") != (c.ClusterCertKey == ""):
		return errors.New("--cluster-cert and --cluster-cert-key require each other")
	}
	for _, peer := range c.ClusterPeers {
		if !validAddress(peer) {
			return fmt.Errorf("--cluster-peers %s: want HOST:PORT", peer)
		}
	}
	return nil
}

// leastPayload is the largest message that NATS servers take by default, bytes.
const leastPayload = 1 << 20

// Limits of what waits here to be taken. What comes beyond is lost.
const (
	inboxMessages = 100_000
	inboxBytes    = 64 << 20
)

// errorPause is the wait after an error, which may stay.
const errorPause = 20 * time.Millisecond

// Deps are the parts that a Link works with.
type Deps struct {
	Edges *guard.Edges // counts panics of message parsers
	Log   *slog.Logger
	// Find calls use with the addresses, host:port, of the other routers at each
	// change until ctx is done; they may include this router. nil: no discovery.
	Find func(ctx context.Context, use func(addresses []string))
}

// Link is a replica.Link over NATS. Messages go to the subject PREFIX.ID, where ID is the router's,
// drawn at its start.
type Link struct {
	deps    Deps
	prefix  string
	name    string // of the cluster, or the prefix
	id      string
	node    *node // nil: the servers are those of an operator
	conn    *nats.Conn
	inbox   *nats.Subscription
	outbox  batch
	warning warning
	trip    atomic.Int64 // round trip to an operator's server, ns; 0: unknown

	Unsent atomic.Uint64 // batches that were not sent, as no server is connected, and messages that are too large
	Missed atomic.Uint64 // batches that were lost because this router was behind
}

// Open starts the server, or connects to those of the settings. A server that is not there is
// no error: it is tried again. Errors name the flag.
func Open(settings Settings, deps Deps) (*Link, error) {
	var random [8]byte
	rand.Read(random[:])
	l := &Link{deps: deps, id: hex.EncodeToString(random[:]), prefix: settings.ClusterPrefix, name: settings.ClusterPrefix}
	l.outbox.limit, l.outbox.send = l.Limit, l.send
	options := []nats.Option{
		nats.Name(member + "-" + l.id), nats.NoEcho(), nats.MaxReconnects(-1), nats.ReconnectWait(time.Second),
		nats.ReconnectBufSize(-1), // what cannot be sent now is sent again when a digest shows that it is missing
		nats.PingInterval(2 * time.Second), nats.MaxPingsOutstanding(2), nats.FlusherTimeout(writeLimit), nats.RetryOnFailedConnect(true),
		nats.IgnoreAuthErrorAbort(),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { l.failed(err) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				l.deps.Log.Warn("NATS connection lost: this router goes on alone", "error", err)
			}
		}),
		nats.ReconnectHandler(func(c *nats.Conn) { l.deps.Log.Info("NATS connected", "server", serverOf(c)) }),
	}
	urls := settings.Cluster
	if settings.Own() {
		user, err := nkeys.CreateUser()
		if err != nil {
			return nil, fmt.Errorf("--cluster: %w", err)
		}
		client, err := user.PublicKey()
		if err != nil {
			return nil, fmt.Errorf("--cluster: %w", err)
		}
		if l.node, err = startNode(settings, l.id, client, deps.Log); err != nil {
			return nil, err
		}
		urls, l.prefix, l.name = "", member+"."+settings.Cluster, settings.Cluster
		options = append(options, nats.InProcessServer(l.node.Server), nats.Nkey(client, user.Sign))
	} else if files, err := credentials(settings); err != nil {
		return nil, err
	} else {
		options = append(options, files...)
	}
	var err error
	if l.conn, err = nats.Connect(urls, options...); err == nil {
		l.inbox, err = l.conn.SubscribeSync(l.prefix + ".*")
	}
	if err == nil {
		err = l.inbox.SetPendingLimits(inboxMessages, inboxBytes)
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("--cluster: %w", err)
	}
	return l, nil
}

// credentials returns the options for existing servers.
func credentials(settings Settings) (options []nats.Option, err error) {
	files := map[string]string{
		"--cluster-credentials": settings.ClusterCredentials, "--cluster-ca": settings.ClusterCA, "--cluster-cert": settings.ClusterCert,
		"--cluster-cert-key": settings.ClusterCertKey,
	}
	for flag, file := range files {
		if file == "" {
			continue
		}
		if _, err := os.Stat(file); err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
	}
	if settings.ClusterCredentials != "" {
		options = append(options, nats.UserCredentials(settings.ClusterCredentials))
	}
	if settings.ClusterCA != "" {
		options = append(options, nats.RootCAs(settings.ClusterCA))
	}
	if settings.ClusterCert != "" {
		options = append(options, nats.ClientCert(settings.ClusterCert, settings.ClusterCertKey))
	}
	return options, nil
}

// failed takes an error of the connection.
func (l *Link) failed(err error) {
	if errors.Is(err, nats.ErrSlowConsumer) {
		if dropped, dropErr := l.inbox.Dropped(); dropErr == nil {
			l.Missed.Store(uint64(dropped))
		}
	}
	l.warning.log(l.deps.Log, "NATS", err)
}

// Publish implements replica.Link.
func (l *Link) Publish(topic string, text []byte) {
	if !l.outbox.add(topic, text) {
		l.Unsent.Add(1)
	}
}

// send sends a batch.
func (l *Link) send(text []byte) {
	if err := l.conn.Publish(l.prefix+"."+l.id, text); err != nil {
		l.Unsent.Add(1)
	}
}

// Followed implements replica.Link.
func (l *Link) Followed() bool { return true }

// Joined implements replica.Link: nobody is known to hear this router but by what it says.
func (l *Link) Joined() uint64 { return 0 }

// Limit implements replica.Link. A server that is not there yet says nothing of its limit.
func (l *Link) Limit() int {
	if limit := l.conn.MaxPayload(); limit > 0 {
		return int(min(limit, maxPayload))
	}
	return leastPayload
}

// Run implements replica.Link.
func (l *Link) Run(ctx context.Context, ears replica.Ears) {
	var beside sync.WaitGroup
	defer beside.Wait()
	switch {
	case l.node == nil:
		beside.Go(func() { l.measure(ctx) })
	case l.deps.Find != nil:
		beside.Go(func() { l.deps.Find(ctx, l.node.use) })
	}
	for ctx.Err() == nil {
		_ = l.deps.Edges.Do(guard.Replica, l.deps.Log, func() error {
			l.hear(ctx, ears)
			return nil
		})
	}
}

// hear hands on what comes until ctx is done.
func (l *Link) hear(ctx context.Context, ears replica.Ears) {
	for {
		m, err := l.inbox.NextMsgWithContext(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			l.failed(err)
			select {
			case <-ctx.Done():
			case <-time.After(errorPause):
			}
			continue
		}
		from := strings.TrimPrefix(m.Subject, l.prefix+".")
		if from == l.id || len(from) > 2*len(l.id) {
			continue
		}
		take := func(topic string, text []byte) error { return ears.Take(from, topic, text) }
		if err := split(m.Data, take); err != nil {
			if errors.Is(err, errBatch) {
				_ = take("", nil) // counted as a message without a topic
			}
			l.warning.log(l.deps.Log, "message of a peer router rejected", fmt.Errorf("%s: %w", from, err))
		}
	}
}

// Close implements replica.Link. What was published before is sent, if that goes at once.
func (l *Link) Close() {
	if l.conn != nil {
		l.outbox.sendNow()
		_ = l.conn.FlushTimeout(100 * time.Millisecond)
		l.conn.Close()
	}
	if l.node != nil {
		l.node.stop()
	}
}

// warning logs a fault at most once in logEvery.
type warning struct {
	mu   sync.Mutex // guards last
	last time.Time
}

func (w *warning) log(log *slog.Logger, what string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if now := time.Now(); now.Sub(w.last) >= logEvery {
		w.last = now
		log.Warn(what+"; further ones are not logged for a minute", "error", err)
	}
}
