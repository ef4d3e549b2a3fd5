package replica

import (
	"bytes"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

const sharedKey = "0123456789abcdef"

// sealed returns both ends of a connection whose clocks a test moves.
func sealed(t *testing.T, key string) (out *seal, in *opener, here, there *time.Time) {
	t.Helper()
	out, err := newSeal(sharedKey)
	if err != nil {
		t.Fatal(err)
	}
	a, b := time.Unix(1_000_000, 0), time.Unix(1_000_000, 0)
	out.now = func() time.Time { return a }
	in = &opener{now: func() time.Time { return b }}
	if key != "" {
		in.key = []byte(key)
	}
	return out, in, &a, &b
}

func TestSealedMessagesAreRead(t *testing.T) {
	out, in, here, there := sealed(t, sharedKey)
	for i, text := range []string{`{"a":1}`, `{}`, ``, strings.Repeat("x", 1<<16)} {
		message := out.close(slotTopic, []byte(text))
		if len(text) > 4 && bytes.Contains(message, []byte(text)) {
			t.Errorf("message %d can be read by all", i)
		}
		if got, err := in.open(slotTopic, message); err != nil || string(got) != text {
			t.Errorf("message %d: %.40q, %v", i, got, err)
		}
	}
	*here, *there = here.Add(-time.Hour), there.Add(20*time.Second) // a clock that is set back, and one that is ahead
	if _, err := in.open(slotTopic, out.close(slotTopic, []byte(`{}`))); err != nil {
		t.Error(err)
	}
	restarted, _, _, _ := sealed(t, sharedKey)
	if _, err := in.open(slotTopic, restarted.close(slotTopic, []byte(`{}`))); err != nil {
		t.Errorf("after a restart of the other: %v", err)
	}
}

func TestForeignMessagesAreRefused(t *testing.T) {
	out, in, _, there := sealed(t, sharedKey)
	message := out.close(slotTopic, []byte(`{"a":1}`))
	for at := range message {
		forged := bytes.Clone(message)
		forged[at] ^= 1
		if _, err := in.open(slotTopic, forged); err == nil {
			t.Errorf("byte %d was changed", at)
		}
	}
	for n := range len(message) {
		if _, err := in.open(slotTopic, message[:n]); err == nil {
			t.Errorf("%d of %d bytes", n, len(message))
		}
	}
	if _, err := in.open(slotTopic, []byte(`{"kind":"add","booking":1,"router":2}`)); !errors.Is(err, errUnsealed) {
		t.Errorf("not sealed: %v", err)
	}
	if _, err := in.open(replicaTopic, message); !errors.Is(err, errUnsealed) {
		t.Errorf("of another topic: %v", err)
	}
	if _, err := in.open(slotTopic, message); err != nil {
		t.Fatal(err)
	}
	if _, err := in.open(slotTopic, message); err == nil {
		t.Error("a message was taken twice")
	}
	*there = there.Add(sealWindow + time.Second)
	if _, err := in.open(slotTopic, out.close(slotTopic, []byte(`{}`))); err == nil || !strings.Contains(err.Error(), "clocks") {
		t.Errorf("an old message: %v", err)
	}
	other, strange, _, _ := sealed(t, "another shared key")
	if _, err := strange.open(slotTopic, other.close(slotTopic, []byte(`{}`))); !errors.Is(err, errUnsealed) {
		t.Errorf("another key: %v", err)
	}
	_, open, _, _ := sealed(t, "")
	if _, err := open.open(slotTopic, message); !errors.Is(err, errSealed) && message[0]&0xf0 != 0x80 {
		t.Errorf("without a key here: %v", err)
	}
	if got, err := open.open(slotTopic, []byte{0x80}); err != nil || string(got) != "\x80" {
		t.Errorf("without keys: %q, %v", got, err)
	}
}

// useKey has a mesh seal its messages; empty: it does not.
func useKey(t *testing.T, m *Mesh, key string) {
	if key == "" {
		return
	}
	var err error
	if m.zmq.seal, err = newSeal(key); err != nil {
		t.Error(err)
	}
}

func TestReplicasWithAKeyHearEachOther(t *testing.T) {
	all := startReplicas(t, 2, func(m *Mesh) {
		useKey(t, m, sharedKey)
	})
	d := all[0].book(t, testkit.PromptTokens(1, 5))
	all[1].sees(t, "a sealed booking", all[0].Loads())
	d.Booking.End()
}

func TestReplicaWithoutTheKeyHearsNothing(t *testing.T) {
	keys := []string{sharedKey, ""}
	all := startAll(t, 2, func(m *Mesh) {
		useKey(t, m, keys[0])
		keys = keys[1:]
	})
	testkit.Eventually(t, 20*time.Second, "both are connected", func() bool { return all[0].zmq.pub.Subscribers() >= 3 && all[1].zmq.pub.Subscribers() >= 3 })
	d := all[0].book(t, testkit.PromptTokens(1, 5))
	defer d.Booking.End()
	own := all[1].book(t, testkit.PromptTokens(2, 5))
	defer own.Booking.End()
	deadline := time.Now().Add(time.Second)
	for time.Now().Before(deadline) {
		if all[0].Received.Load()+all[1].Received.Load() > 0 {
			t.Fatal("one was heard")
		}
		<-time.After(10 * time.Millisecond)
	}
	if all[0].Refused.Load() == 0 || all[1].Refused.Load() == 0 {
		t.Errorf("%+v and %+v", all[0].Counts(), all[1].Counts())
	}
}

// TestForgedMessagesChangeNothing: who can write to the connection of a router cannot
// book, free or eject, and the router's own bookings stay.
func TestForgedMessagesChangeNothing(t *testing.T) {
	peers := testPeers(t, 1)
	forger := testkit.NewTestPublisher(t)
	r := startReplica(t, append(peers, forger.Endpoint()[len("tcp://"):]), 0, func(m *Mesh) {
		useKey(t, m, sharedKey)
		m.timing.silence = time.Minute
	})
	honest, err := newSeal(sharedKey)
	if err != nil {
		t.Fatal(err)
	}
	add := slotMessage(t, fields{"kvrouter": fields{"prompt_tokens": 100, "prefill_tokens": 60}}, fields{"data": fields{"AddRequest": fields{}}})
	one := kv.WorkerKey{Worker: 1}
	testkit.Eventually(t, 20*time.Second, "an honest message counts", func() bool {
		forger.Publish([]byte(slotTopic), honest.close(slotTopic, add))
		return r.Load(one).PrefillTokens == 60
	})
	stranger, err := newSeal("another shared key")
	if err != nil {
		t.Fatal(err)
	}
	free := slotMessage(t, nil, nil)
	sealed := honest.close(slotTopic, free)
	turned := honest.close(slotTopic, free)
	turned[len(turned)-1] ^= 1
	before, loads := r.Refused.Load(), r.Loads()
	for _, frames := range [][][]byte{
		{[]byte(slotTopic), free},
		{[]byte(slotTopic), stranger.close(slotTopic, free)},
		{[]byte(slotTopic), turned},
		{[]byte(sessionTopic), sealed},
		{[]byte(slotTopic)},
		{[]byte(slotTopic), sealed, sealed},
		{[]byte(slotTopic + "x"), sealed},
		{[]byte(replicaTopic), encode(&ownMessage{Router: 9, Kind: kindEjection, Worker: &rank{1, 0}, Milliseconds: 1000})},
		{[]byte(replicaTopic), encode(&ownMessage{Router: 9, Kind: kindHeld, Bucket: bucketOf("r")})},
		{[]byte(slotTopic), honest.close(slotTopic, []byte("malformed"))},
	} {
		before++
		forger.Publish(frames...)
		testkit.Eventually(t, 20*time.Second, "it is refused", func() bool { return r.Refused.Load() == before })
	}
	if got := r.Loads(); !slices.Equal(got, loads) || r.Counts().Peers != 1 || r.Lost.Load() != 0 {
		t.Errorf("%+v, was %+v; %+v", got, loads, r.Counts())
	}
	testkit.Eventually(t, 20*time.Second, "the honest one is still heard", func() bool {
		forger.Publish([]byte(slotTopic), honest.close(slotTopic, free))
		return r.Load(one).InFlight == 0
	})
}

func FuzzOpen(f *testing.F) {
	out, err := newSeal(sharedKey)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(out.close(slotTopic, []byte(`{"a":1}`)), true)
	f.Add([]byte(`{"a":1}`), false)
	f.Add([]byte(nil), true)
	f.Add(make([]byte, saltSize+stampSize), true)
	f.Fuzz(func(t *testing.T, message []byte, keyed bool) {
		in := &opener{now: time.Now}
		if keyed {
			in.key = []byte("a key that is not of the seeds")
		}
		text, err := in.open(slotTopic, message)
		if keyed && err == nil {
			t.Errorf("%q was opened as %q", message, text)
		}
	})
}

// TestReplaysWithSaltsInTurnAreRefused: the messages of a router that has restarted, with
// those of its previous run in between, are each taken once.
func TestReplaysWithSaltsInTurnAreRefused(t *testing.T) {
	first, in, here, there := sealed(t, sharedKey)
	second, _, _, _ := sealed(t, sharedKey)
	old, again := first.close(slotTopic, []byte(`{"a":1}`)), second.close(slotTopic, []byte(`{"b":1}`))
	for _, message := range [][]byte{old, again} {
		if _, err := in.open(slotTopic, message); err != nil {
			t.Fatal(err)
		}
	}
	for range 3 {
		for i, message := range [][]byte{old, again} {
			if _, err := in.open(slotTopic, message); err == nil || !strings.Contains(err.Error(), "replayed") {
				t.Errorf("message %d was taken again: %v", i, err)
			}
		}
	}
	*here, *there = here.Add(sealWindow+time.Second), there.Add(sealWindow+time.Second)
	if _, err := in.open(slotTopic, first.close(slotTopic, []byte(`{}`))); err != nil {
		t.Errorf("a later message: %v", err)
	}
	for i, message := range [][]byte{old, again} {
		if _, err := in.open(slotTopic, message); err == nil {
			t.Errorf("message %d was taken again after the window", i)
		}
	}
}

// TestSendersAreBounded: each restart at an address has a salt of its own, which is
// forgotten with the last message that could be replayed.
func TestSendersAreBounded(t *testing.T) {
	_, in, _, there := sealed(t, sharedKey)
	from := func() error {
		out, err := newSeal(sharedKey)
		if err != nil {
			t.Fatal(err)
		}
		out.now = in.now
		_, err = in.open(slotTopic, out.close(slotTopic, []byte(`{}`)))
		return err
	}
	for i := range maxSenders {
		if err := from(); err != nil {
			t.Fatal(i, err)
		}
	}
	if err := from(); err == nil || len(in.senders) != maxSenders {
		t.Errorf("%d senders are known, the last by %v", len(in.senders), err)
	}
	*there = there.Add(sealWindow + time.Second)
	if err := from(); err != nil || len(in.senders) != 1 {
		t.Errorf("%d senders are known after the window, the last by %v", len(in.senders), err)
	}
}

// TestReplayOverANewConnectionIsRefused: who cuts a connection and poses as the router
// cannot send its last messages again.
func TestReplayOverANewConnectionIsRefused(t *testing.T) {
	peers := testPeers(t, 1)
	forger := testkit.NewTestPublisher(t)
	r := startReplica(t, append(peers, forger.Endpoint()[len("tcp://"):]), 0, func(m *Mesh) {
		useKey(t, m, sharedKey)
		m.timing.silence = 200 * time.Millisecond
	})
	honest, err := newSeal(sharedKey)
	if err != nil {
		t.Fatal(err)
	}
	var sent []byte
	add := slotMessage(t, fields{"kvrouter": fields{"prompt_tokens": 100, "prefill_tokens": 60}}, fields{"data": fields{"AddRequest": fields{}}})
	one := kv.WorkerKey{Worker: 1}
	testkit.Eventually(t, 20*time.Second, "an honest message counts", func() bool {
		sent = honest.close(slotTopic, add)
		forger.Publish([]byte(slotTopic), sent)
		return r.Load(one).PrefillTokens == 60
	})
	testkit.Eventually(t, 20*time.Second, "the connection is given up for its silence", func() bool { return r.Lost.Load() == 1 && r.Load(one).InFlight == 0 })
	refused := r.Refused.Load()
	testkit.Eventually(t, 20*time.Second, "the replay is refused", func() bool {
		forger.Publish([]byte(slotTopic), sent)
		return r.Refused.Load() > refused
	})
	if load := r.Load(one); load.InFlight != 0 {
		t.Errorf("the replay is booked: %+v", load)
	}
}
