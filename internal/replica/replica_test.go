package replica

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/guard"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// testReplica is a router that shares its books with others.
type testReplica struct {
	*router.Router
	*Mesh
	stop func()
}

// startReplicas starts n routers over the same two workers, each of which has
// all of them, itself too, as peers.
func startReplicas(t *testing.T, n int, tweak func(*Mesh)) []*testReplica {
	t.Helper()
	before := goleak.IgnoreCurrent()
	port := testkit.FreePorts(t, n)
	var peers []string
	for i := range n {
		peers = append(peers, fmt.Sprintf("127.0.0.1:%d", port+i))
	}
	var all []*testReplica
	for i := range n {
		all = append(all, startReplica(t, peers, i, tweak))
	}
	t.Cleanup(func() {
		for _, r := range all {
			r.stop()
		}
		goleak.VerifyNone(t, before)
	})
	testkit.Eventually(t, 20*time.Second, "all routers heard", func() bool {
		return !slices.ContainsFunc(all, func(r *testReplica) bool { return r.pub.Subscribers() < n })
	})
	return all
}

func startReplica(t *testing.T, peers []string, i int, tweak func(*Mesh)) *testReplica {
	t.Helper()
	router := routertest.NewTestRouter(t, "kv", 2)
	replicas, err := New(router, peers[i], peers, guard.New(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	replicas.timing.retry, replicas.timing.retryTo = 5*time.Millisecond, 50*time.Millisecond
	if tweak != nil {
		tweak(replicas)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		replicas.Run(ctx)
	}()
	return &testReplica{router, replicas, func() {
		cancel()
		<-done
	}}
}

// sees waits until a router's books are these.
func (r *testReplica) sees(t *testing.T, what string, want []router.WorkerLoad) {
	t.Helper()
	var got []router.WorkerLoad
	defer func() {
		if t.Failed() {
			t.Logf("books are %+v, want %+v", got, want)
		}
	}()
	testkit.Eventually(t, 20*time.Second, what, func() bool {
		got = r.Loads()
		return slices.Equal(got, want)
	})
}

func (r *testReplica) book(t *testing.T, tokens []uint32) router.Decision {
	t.Helper()
	d, err := r.Route(t.Context(), router.Request{Tokens: tokens})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func TestReplicasCountEachOthersRequests(t *testing.T) {
	all := startReplicas(t, 2, nil)
	a, b := all[0], all[1]
	idle := a.Loads()
	prompt := testkit.PromptTokens(1, 5)
	first := a.book(t, prompt)
	b.sees(t, "the other's request", a.Loads())
	second := b.book(t, testkit.PromptTokens(2, 3))
	if first.Target.Key == second.Target.Key {
		t.Errorf("both chose %v", first.Target.Key)
	}
	a.sees(t, "both requests", b.Loads())
	first.Booking.FirstToken()
	b.sees(t, "the prompt computed", a.Loads())
	if load := b.Load(first.Target.Key); load.PrefillTokens != 0 || load.InFlight != 1 || load.ActiveBlocks != 5 {
		t.Errorf("%+v", load)
	}
	first.Booking.End()
	second.Booking.Finish(7)
	for _, r := range all {
		r.sees(t, "nothing in flight", idle)
	}
	// Of its own a router hears nothing: it would count itself twice.
	if a.Received.Load() != 2 || b.Received.Load() != 3 || a.Dropped.Load()+b.Dropped.Load() != 0 {
		t.Errorf("%d and %d changes heard", a.Received.Load(), b.Received.Load())
	}
}

// TestReplicasLearnWhichLegARequestIs: what only decodes is no prompt to be
// computed there, nor is its prompt forgotten.
func TestReplicasLearnWhichLegARequestIs(t *testing.T) {
	all := startReplicas(t, 2, nil)
	prefill, decode := kv.WorkerKey{Worker: 20}, kv.WorkerKey{Worker: 21}
	for _, r := range all {
		for key, role := range map[kv.WorkerKey]kv.Role{prefill: kv.RolePrefill, decode: kv.RoleDecode} {
			r.Up(kv.Target{Key: key, Disagg: kv.Disagg{Role: role, Kind: kv.KindNIXL}})
		}
	}
	pair, err := all[0].RoutePair(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)}, router.PairRule{LeastUncached: 1})
	if err != nil || pair.Prefill.Target.Key != prefill || pair.Decode.Target.Key != decode {
		t.Fatalf("%+v, %v", pair, err)
	}
	same := func(what string) {
		t.Helper()
		for _, w := range []kv.WorkerKey{prefill, decode} {
			testkit.Eventually(t, 20*time.Second, what, func() bool {
				own, told := all[0].Load(w), all[1].Load(w)
				return own.InFlight == told.InFlight && own.PrefillTokens == told.PrefillTokens && own.AwaitedTokens == told.AwaitedTokens
			})
		}
	}
	same("both legs")
	if load := all[1].Load(decode); load.AwaitedTokens == 0 || load.PrefillTokens != 0 || len(load.Prefills) != 0 {
		t.Errorf("the decode worker has %+v", load)
	}
	pair.Prefill.Booking.Finish(1)
	pair.Decode.Booking.FirstToken()
	same("the answer begun")
	pair.End()
	same("nothing")
	if load := all[1].Load(decode); load.InFlight != 0 || load.AwaitedTokens != 0 {
		t.Errorf("the decode worker has %+v", load)
	}
}

func TestReplicasForgetARouterThatIsGone(t *testing.T) {
	all := startReplicas(t, 3, nil)
	idle := all[0].Loads()
	d := all[0].book(t, testkit.PromptTokens(1, 40))
	for _, r := range all {
		r.sees(t, "one request", all[0].Loads())
	}
	own := all[1].book(t, testkit.PromptTokens(2, 40)) // on the other worker
	for _, r := range all {
		r.sees(t, "both requests", all[1].Loads())
	}
	all[0].stop()
	testkit.Eventually(t, 20*time.Second, "its request forgotten", func() bool {
		return all[1].Load(d.Target.Key).InFlight == 0 && all[2].Load(d.Target.Key).InFlight == 0
	})
	if all[1].Load(own.Target.Key).InFlight != 1 || all[2].Load(own.Target.Key).InFlight != 1 {
		t.Error("another router's request was forgotten, too")
	}
	own.Booking.End()
	for _, r := range all[1:] {
		r.sees(t, "nothing in flight", idle)
		if r.Lost.Load() != 1 || r.Held.Load() != 0 {
			t.Errorf("%d lost, %d held", r.Lost.Load(), r.Held.Load())
		}
	}

	// The next one at its address starts with nothing, and is heard.
	again := startReplica(t, all[0].peers, 0, nil)
	defer again.stop()
	testkit.Eventually(t, 20*time.Second, "it is followed", func() bool { return again.pub.Subscribers() == 3 })
	d = again.book(t, testkit.PromptTokens(3, 40))
	for _, r := range all[1:] {
		testkit.Eventually(t, 20*time.Second, "its request known", func() bool { return r.Load(d.Target.Key).InFlight == 1 })
	}
	d.Booking.End()
	for _, r := range all[1:] {
		r.sees(t, "nothing in flight", idle)
	}
}

func TestReplicasForgetARouterThatHangs(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	mute := testkit.NewTestPublisher(t)
	r := startReplica(t, []string{fmt.Sprintf("127.0.0.1:%d", port), mute.Endpoint()[len("tcp://"):]}, 0, func(r *Mesh) { r.timing.silence = 100 * time.Millisecond })
	defer r.stop()
	say := func(text string) { mute.Publish([]byte(replicaTopic), []byte(text)) }
	testkit.Eventually(t, 20*time.Second, "it is heard", func() bool {
		say(`{"router_id":9,"kind":"alive"}`)
		say(`{"router_id":9,"kind":"add","booking":1,"worker_id":1,"isl_tokens":100,"prefill_tokens":60,"sequence_hashes":"AQAAAAAAAAA="}`)
		return r.Load(kv.WorkerKey{Worker: 1}).PrefillTokens == 60
	})
	testkit.Eventually(t, 20*time.Second, "it is forgotten", func() bool { return r.Load(kv.WorkerKey{Worker: 1}).InFlight == 0 && r.Lost.Load() > 0 })
}

func TestReplicasTakeOnlyWhatMakesSense(t *testing.T) {
	rt := routertest.NewTestRouter(t, "kv", 2)
	p := otherRouter{mesh: &Mesh{router: rt, id: 1}, open: map[uint64]heldBooking{}}
	p.take(router.Change{Router: 2, Kind: router.ChangeFree, Booking: 4})
	p.take(router.Change{Router: 2, Kind: router.ChangePrefill, Booking: 4})
	p.take(router.Change{Router: 2, Kind: router.ChangeAdd, Booking: 5, Worker: 7, Tokens: 9}) // no such worker
	p.take(router.Change{Router: 2, Kind: "novel", Booking: 6})
	p.take(router.Change{Router: 2, Kind: router.ChangeAdd, Booking: 8, Worker: 1, Tokens: -9, Uncached: -9, Sequence: []byte("short")})
	p.take(router.Change{Router: 2, Kind: router.ChangeAdd, Booking: 8, Worker: 1, Tokens: 100}) // again
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 1 || load.PrefillTokens != 0 || load.ActiveBlocks != 0 {
		t.Errorf("%+v", load)
	}
	p.take(router.Change{Router: 3, Kind: router.ChangeAlive}) // another router answers now
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || p.mesh.Held.Load() != 0 {
		t.Errorf("%+v", load)
	}
}

// TestReplicasDropBookingsThatCannotBe: one of 2^62 tokens stopped the router.
func TestReplicasDropBookingsThatCannotBe(t *testing.T) {
	rt := routertest.NewTestRouter(t, "work", 2)
	p := otherRouter{mesh: &Mesh{router: rt, id: 1}, open: map[uint64]heldBooking{}}
	for i, change := range []router.Change{
		{Tokens: kv.MaxTokens + 1}, {Tokens: 1 << 62, Uncached: 1 << 62}, {Tokens: 10, Uncached: 11}, {Uncached: 1 << 62}, {Tokens: -1, Uncached: 1},
		{Tokens: 1, Sequence: make([]byte, 16)}, {Sequence: make([]byte, 8)}, {Tokens: 5, Leg: kv.LegDecode + 1},
	} {
		change.Router, change.Kind, change.Booking, change.Worker = 2, router.ChangeAdd, uint64(i+1), 1
		p.take(change)
	}
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || p.mesh.Dropped.Load() != 8 {
		t.Errorf("%+v, %d dropped", load, p.mesh.Dropped.Load())
	}
	// The largest that can be are counted, and cost no time.
	for i := range uint64(100) {
		p.take(router.Change{Router: 2, Kind: router.ChangeAdd, Booking: 100 + i, Worker: i % 2, Tokens: kv.MaxTokens, Uncached: kv.MaxTokens})
	}
	d, err := rt.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)})
	if err != nil {
		t.Fatal(err)
	}
	d.Booking.End()
	p.forget()
	if load := rt.Load(kv.WorkerKey{Worker: 1}); load.InFlight != 0 || load.PrefillTokens != 0 {
		t.Errorf("%+v", load)
	}
}

func TestReplicasBoundWhatTheyKeepOfAnother(t *testing.T) {
	rt := routertest.NewTestRouter(t, "random", 2) // which counts no blocks: that would take long
	p := otherRouter{mesh: &Mesh{router: rt, id: 1}, open: map[uint64]heldBooking{}}
	sequence := make([]byte, hashLimit/4*8)
	add := func(number uint64) {
		p.take(router.Change{Router: 2, Kind: router.ChangeAdd, Booking: number, Worker: 1, Tokens: kv.MaxTokens, Sequence: sequence})
	}
	for number := range uint64(5) {
		add(number)
	}
	if len(p.open) != 4 || p.hashes != hashLimit || p.mesh.Dropped.Load() != 1 {
		t.Errorf("%d bookings with %d hashes, %d dropped", len(p.open), p.hashes, p.mesh.Dropped.Load())
	}
	p.take(router.Change{Router: 2, Kind: router.ChangeFree, Booking: 1})
	add(9)
	if len(p.open) != 4 || p.hashes != hashLimit {
		t.Errorf("%d bookings with %d hashes after one has gone", len(p.open), p.hashes)
	}
	p.forget()
	if p.hashes != 0 || p.mesh.Held.Load() != 0 {
		t.Errorf("%d hashes, %d held", p.hashes, p.mesh.Held.Load())
	}
}

// FuzzChange books what another router may say. Afterwards the books are right, and
// a request is routed.
func FuzzChange(f *testing.F) {
	for _, text := range []string{
		`{"router_id":9,"kind":"alive"}`,
		`{"router_id":9,"kind":"add","booking":1,"worker_id":1,"isl_tokens":100,"prefill_tokens":60,"sequence_hashes":"AQAAAAAAAAA="}`,
		`{"router_id":77,"kind":"add","booking":1,"worker_id":0,"isl_tokens":4611686018427387904,"prefill_tokens":4611686018427387904}`,
		`{"router_id":77,"kind":"add","booking":2,"worker_id":1,"isl_tokens":-1,"prefill_tokens":-9223372036854775808,"silent":true,"leg":"decode"}`,
		`{"router_id":77,"kind":"add","leg":"none"}`, `{"isl_tokens":1e3}`, `[]`, `null`, ``,
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var change router.Change
		if json.Unmarshal(text, &change) != nil {
			return // the connection ends
		}
		rt := routertest.NewTestRouter(t, "work", 2)
		p := otherRouter{mesh: &Mesh{router: rt, id: change.Router + 1}, open: map[uint64]heldBooking{}}
		p.take(change)
		change.Booking++
		p.take(change)
		d, err := rt.Route(t.Context(), router.Request{Tokens: testkit.PromptTokens(1, 5)})
		if err != nil {
			t.Fatal(err)
		}
		for worker := range uint64(2) {
			if load := rt.Load(kv.WorkerKey{Worker: worker}); load.InFlight > 3 || load.PrefillTokens < 0 || load.ContextTokens < 0 || load.PrefillTokens > 3*kv.MaxTokens {
				t.Errorf("worker %d: %+v", worker, load)
			}
		}
		if err := rt.Check(); err != nil {
			t.Error(err)
		}
		d.Booking.End()
		change.Kind = router.ChangePrefill
		p.take(change)
		change.Kind = router.ChangeFree
		p.take(change)
		p.forget()
		for worker := range uint64(2) {
			if load := rt.Load(kv.WorkerKey{Worker: worker}); load.InFlight != 0 || load.PrefillTokens != 0 || load.ContextTokens != 0 {
				t.Errorf("worker %d in the end: %+v", worker, load)
			}
		}
	})
}
