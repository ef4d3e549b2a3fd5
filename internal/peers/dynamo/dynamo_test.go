package dynamo

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-zeromq/zmq4"
	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/decide/health"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
	"kvrouter/internal/testkit/routertest"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// testRouter is a router that shares its books over a Link.
type testRouter struct {
	*router.Router
	mesh *replica.Mesh
	link *Link
	stop func()
}

// addresses returns n free addresses.
func addresses(t *testing.T, n int) (all []string) {
	port := testkit.FreePorts(t, n)
	for i := range n {
		all = append(all, fmt.Sprintf("127.0.0.1:%d", port+i))
	}
	return all
}

// start starts a router at an address that follows peers.
func start(t *testing.T, at string, tweak func(*timing), peers ...string) *testRouter {
	t.Helper()
	host, port, _ := net.SplitHostPort(at)
	number, _ := strconv.Atoi(port)
	log := slog.New(slog.DiscardHandler)
	link, err := Open(Settings{ReplicaSyncHost: host, ReplicaSyncPort: number, ReplicaPeers: peers}, Deps{Edges: guard.New(), Log: log})
	if err != nil {
		t.Fatal(err)
	}
	link.timing.retry, link.timing.retryTo = 5*time.Millisecond, 50*time.Millisecond
	if tweak != nil {
		tweak(&link.timing)
	}
	rt := routertest.New(t, "kv", 2)
	mesh := replica.New(replica.Deps{Router: rt, Link: link, Log: log})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		mesh.Run(ctx)
	}()
	stop := func() {
		cancel()
		<-done
	}
	t.Cleanup(stop)
	return &testRouter{rt, mesh, link, stop}
}

// hear waits until all hear all others.
func hear(t *testing.T, all ...*testRouter) {
	t.Helper()
	for i, r := range all {
		d := r.book(t, i)
		for _, other := range all {
			other.sees(t, 1)
		}
		d.Booking.End()
		for _, other := range all {
			other.sees(t, 0)
		}
	}
}

func (r *testRouter) book(t *testing.T, seed int) router.Decision {
	t.Helper()
	d, err := r.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(seed, 5)})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// inFlight is the number of requests that a router knows.
func (r *testRouter) inFlight() (n int) {
	for _, load := range r.Loads() {
		n += load.ActiveRequests
	}
	return n
}

// sees waits until a router knows of that many requests.
func (r *testRouter) sees(t *testing.T, want int) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d in flight", want), func() bool { return r.inFlight() == want })
	if err := r.Check(); err != nil {
		t.Error(err)
	}
}

func TestRoutersCountEachOthersRequests(t *testing.T) {
	at := addresses(t, 2)
	a, b := start(t, at[0], nil, at...), start(t, at[1], nil, at...) // each follows itself, too
	hear(t, a, b)
	d := a.book(t, 1)
	b.sees(t, 1)
	d.Booking.FirstToken()
	d.Booking.Finish(7)
	b.sees(t, 0)
	a.book(t, 2)
	b.sees(t, 1)
	a.stop()
	b.sees(t, 0)
}

// TestOneThatComesLateIsToldAll: Dynamo does not ask for what is in flight.
func TestOneThatComesLateIsToldAll(t *testing.T) {
	at := addresses(t, 2)
	a := start(t, at[0], nil)
	for i := range 20 {
		a.book(t, i)
	}
	b := start(t, at[1], nil, at[0])
	b.sees(t, 20)
}

func TestARouterOfTwoAddressesIsHeardOnce(t *testing.T) {
	at := addresses(t, 2)
	a, b := start(t, at[0], nil, at...), start(t, at[1], nil, at...)
	_, port, _ := net.SplitHostPort(at[0])
	if added, err := b.link.Register("tcp://localhost:" + port); err != nil || !added {
		t.Fatal(added, err)
	}
	testkit.Eventually(t, 20*time.Second, "both connections are there", func() bool { return a.link.pub.Subscribers() >= 4 })
	hear(t, a, b)
	a.book(t, 1)
	b.sees(t, 1)
	if removed, err := b.link.Deregister("tcp://" + at[0]); err != nil || !removed {
		t.Fatal(removed, err)
	}
	if got := b.link.Peers(); !slices.Equal(got, []string{"tcp://" + at[1], "tcp://localhost:" + port}) {
		t.Errorf("%v", got)
	}
}

// TestARouterThatHangsIsForgotten: its connection stays, but it says nothing.
func TestARouterThatHangsIsForgotten(t *testing.T) {
	add, err := msgpack.Marshal(map[string]any{"model_name": "default", "routing_group": "default", "block_size": testkit.BlockSize, "event": map[string]any{
		"request_id": "r", "worker": map[string]any{"worker_id": 1, "dp_rank": 0}, "data": map[string]any{"AddRequest": map[string]any{}}, "router_id": 9,
	}})
	if err != nil {
		t.Fatal(err)
	}
	mute := testkit.NewTestPublisher(t)
	r := start(t, addresses(t, 1)[0], func(w *timing) { w.silence = 100 * time.Millisecond }, strings.TrimPrefix(mute.Endpoint(), "tcp://"))
	testkit.Eventually(t, 20*time.Second, "it is heard", func() bool {
		mute.Publish([]byte(replica.SlotTopic), add)
		return r.inFlight() == 1
	})
	r.sees(t, 0)
	if counts := r.mesh.Counts(); counts.Lost == 0 || counts.Refused != 0 {
		t.Errorf("%+v", counts)
	}
}

// TestForeignMessagesChangeNothing has a peer that publishes whatever was subscribed to: a message between
// kvrouters, which NATS alone carries, one of three frames, and some without their shape.
func TestForeignMessagesChangeNothing(t *testing.T) {
	own, err := msgpack.Marshal(map[string]any{"router_id": 9, "kind": "ejection", "worker": map[string]any{"worker_id": 1, "dp_rank": 0}, "milliseconds": 60_000})
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := zmq.Listen("127.0.0.1:0", zmq4.Pub, func(c *zmq.Conn) {
		for _, frames := range [][]string{{"kvrouter.v1", string(own)}, {replica.SlotTopic, "x", "y"}, {"", "x"}, {replica.SlotTopic + "x", "x"}, {replica.SessionTopic, "x"}} {
			var message [][]byte
			for _, frame := range frames {
				message = append(message, []byte(frame))
			}
			if err := c.Send(message...); err != nil {
				return
			}
		}
		for {
			if _, err := c.Recv(); err != nil {
				return
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer foreign.Close()
	r := start(t, addresses(t, 1)[0], nil, strings.TrimPrefix(foreign.Endpoint(), "tcp://"))
	testkit.Eventually(t, 20*time.Second, "they are refused", func() bool { return r.mesh.Counts().Refused >= 5 })
	records, _ := r.Health.Records()
	held := slices.ContainsFunc(records, func(w health.Record) bool { return w.State == health.StateHeld })
	if held || r.inFlight() != 0 || r.mesh.Counts().Peers != 0 {
		t.Errorf("%+v, %+v", r.mesh.Counts(), records)
	}
}

func TestATakenPortIsNamed(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	port := taken.Addr().(*net.TCPAddr).Port
	_, err = Open(Settings{ReplicaSyncHost: "127.0.0.1", ReplicaSyncPort: port}, Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)})
	if want := fmt.Sprintf("--replica-sync-port %d: ", port); err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}
