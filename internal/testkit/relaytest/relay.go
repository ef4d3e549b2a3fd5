// Package relaytest is a relay of Dynamo's contract dynamo.kvrelay.v1, as far as followers see
// it.
package relaytest

import (
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"
)

// Methods of the contract.
const (
	Info        = "GetRelayInfo"
	CatalogOf   = "WatchKvPoolCatalog"
	ReadinessOf = "SubscribeServingReadiness"
	PoolOf      = "SubscribeKvPool"
)

// Relay is a relay with at most one pool.
type Relay struct {
	Address  string
	Identity Identity
	stop     func()

	mu       sync.Mutex // guards the rest
	messages map[string][][]byte
	open     map[string]int // streams
	more     chan struct{}  // closed at the next message
}

// Serve starts a relay, which answers nothing yet, until the test ends. Port 0 is any port.
// With secure it serves TLS.
func Serve(t testing.TB, port int, secure *tls.Config) *Relay {
	t.Helper()
	listener, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		t.Fatal(err)
	}
	r := &Relay{
		Address: listener.Addr().String(), Identity: Identity{7, rand.Uint64()},
		messages: map[string][][]byte{}, open: map[string]int{}, more: make(chan struct{}),
	}
	options := []grpc.ServerOption{grpc.UnknownServiceHandler(r.serve), grpc.WaitForHandlers(true)}
	if secure != nil {
		options = append(options, grpc.Creds(credentials.NewTLS(secure)))
	}
	server := grpc.NewServer(options...)
	ended := make(chan struct{})
	go func() { // until stop
		defer close(ended)
		_ = server.Serve(listener)
	}()
	r.stop = sync.OnceFunc(func() {
		server.Stop()
		<-ended
	})
	t.Cleanup(r.stop)
	return r
}

// Stop ends the relay.
func (r *Relay) Stop() { r.stop() }

// Send sends messages on the streams of a method, on those that are open and, from the first
// message on, on later ones.
func (r *Relay) Send(method string, messages ...[]byte) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.messages[method] = append(r.messages[method], messages...)
	close(r.more)
	r.more = make(chan struct{})
}

// Announce sends the relay's identity and a catalog of those pools.
func (r *Relay) Announce(pools ...Pool) {
	r.Send(Info, r.Identity.Info())
	r.Send(CatalogOf, r.Identity.Catalog(pools...))
}

// State sends the state of a pool's model: 1 for unavailable, 2 for ready.
func (r *Relay) State(p Pool, state uint64) { r.Send(ReadinessOf, r.Identity.Readiness(p, state)) }

// Hold sends a snapshot of a pool that has the blocks of those sequence hashes.
func (r *Relay) Hold(p Pool, sequence ...uint64) {
	r.mu.Lock()
	at := uint64(len(r.messages[PoolOf]))
	r.mu.Unlock()
	r.Send(PoolOf, r.Identity.Update(p, Snapshot, at, at, p.Snapshot(at, p.Words(sequence...), 0)))
}

// Streams returns how many streams of a method are open.
func (r *Relay) Streams(method string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.open[method]
}

func (r *Relay) count(method string, change int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.open[method] += change
}

// serve answers a call. A message of an empty type keeps its fields as unknown ones.
func (r *Relay) serve(_ any, stream grpc.ServerStream) error {
	name, _ := grpc.MethodFromServerStream(stream)
	method, ours := strings.CutPrefix(name, "/dynamo.kvrelay.v1.KvEventRelay/")
	if !ours {
		return status.Error(codes.Unimplemented, name)
	}
	r.count(method, 1)
	defer r.count(method, -1)
	for sent := 0; ; {
		r.mu.Lock()
		messages, more := r.messages[method], r.more
		r.mu.Unlock()
		for ; sent < len(messages); sent++ {
			message := new(emptypb.Empty)
			message.ProtoReflect().SetUnknown(messages[sent])
			if err := stream.SendMsg(message); err != nil || method == Info {
				return err
			}
		}
		select {
		case <-more:
		case <-stream.Context().Done():
			return nil
		}
	}
}
