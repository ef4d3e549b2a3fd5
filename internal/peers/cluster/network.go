package cluster

import (
	"cmp"
	"context"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"kvrouter/internal/peers/replica"
)

const (
	// measureEvery is the pause between two measured round trips to an operator's server.
	measureEvery = 2 * time.Second
	// measureLimit is the longest of them.
	measureLimit = 2 * time.Second
	// nameLimit bounds the name of another server, bytes.
	nameLimit = 64
)

// Network implements replica.Link.
func (l *Link) Network() replica.Network {
	n := replica.Network{
		Kind: replica.KindExisting, Name: l.name, ID: l.id, Connected: l.conn.IsConnected(), Unsent: l.Unsent.Load(), Missed: l.Missed.Load(),
	}
	if l.node != nil {
		n.Kind, n.Routes = replica.KindEmbedded, l.node.routes()
		return n
	}
	if n.Connected {
		n.Server, n.RoundTrip = serverOf(l.conn), known(time.Duration(l.trip.Load()))
	}
	return n
}

// known returns a round trip in seconds; nil: it is not known.
func known(trip time.Duration) *float64 {
	if trip <= 0 {
		return nil
	}
	seconds := trip.Round(time.Microsecond).Seconds()
	return &seconds
}

// serverOf returns the URL of the connected server without user, password and token.
func serverOf(c *nats.Conn) string {
	u, err := url.Parse(c.ConnectedUrl())
	if err != nil || u.Host == "" {
		return ""
	}
	return u.Scheme + "://" + u.Host
}

// measure measures round trips to an operator's server until ctx is done.
func (l *Link) measure(ctx context.Context) {
	ticker := time.NewTicker(measureEvery)
	defer ticker.Stop()
	for {
		l.trip.Store(int64(l.roundTrip(ctx)))
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// roundTrip returns the time until the server answers; 0: it does not.
func (l *Link) roundTrip(ctx context.Context) time.Duration {
	if !l.conn.IsConnected() {
		return 0
	}
	ctx, end := context.WithTimeout(ctx, measureLimit)
	defer end()
	began := time.Now()
	if l.conn.FlushWithContext(ctx) != nil {
		return 0
	}
	return time.Since(began)
}

// routes returns the connections to other servers, by id and address.
func (n *node) routes() (list []replica.Route) {
	found, err := n.Routez(nil)
	if err != nil {
		return nil
	}
	for _, r := range found.Routes {
		trip, _ := time.ParseDuration(r.RTT) // what does not parse is unknown
		id := strings.TrimPrefix(r.RemoteName, member+"-")
		list = append(list, replica.Route{
			ID:        strings.ToValidUTF8(id[:min(len(id), nameLimit)], ""),
			Address:   net.JoinHostPort(r.IP, strconv.Itoa(r.Port)),
			RoundTrip: known(trip), PendingBytes: r.Pending, MessagesIn: r.InMsgs, MessagesOut: r.OutMsgs,
		})
	}
	slices.SortFunc(list, func(a, b replica.Route) int {
		return cmp.Or(cmp.Compare(a.ID, b.ID), cmp.Compare(a.Address, b.Address))
	})
	return list[:min(len(list), replica.MaxPeers)]
}
