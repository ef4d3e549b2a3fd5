package replica

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

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
		message := out.close([]byte(text))
		if len(text) > 4 && bytes.Contains(message, []byte(text)) {
			t.Errorf("message %d can be read by all", i)
		}
		if got, err := in.open(message); err != nil || string(got) != text {
			t.Errorf("message %d: %.40q, %v", i, got, err)
		}
	}
	*here, *there = here.Add(-time.Hour), there.Add(20*time.Second) // a clock that is set back, and one that is ahead
	if _, err := in.open(out.close([]byte(`{}`))); err != nil {
		t.Error(err)
	}
	restarted, _, _, _ := sealed(t, sharedKey)
	if _, err := in.open(restarted.close([]byte(`{}`))); err != nil {
		t.Errorf("after a restart of the other: %v", err)
	}
}

func TestForeignMessagesAreRefused(t *testing.T) {
	out, in, _, there := sealed(t, sharedKey)
	message := out.close([]byte(`{"a":1}`))
	for at := range message {
		forged := bytes.Clone(message)
		forged[at] ^= 1
		if _, err := in.open(forged); err == nil {
			t.Errorf("byte %d was changed", at)
		}
	}
	for n := range len(message) {
		if _, err := in.open(message[:n]); err == nil {
			t.Errorf("%d of %d bytes", n, len(message))
		}
	}
	if _, err := in.open([]byte(`{"kind":"add","booking":1,"router":2}`)); !errors.Is(err, errUnsealed) {
		t.Errorf("not sealed: %v", err)
	}
	if _, err := in.open(message); err != nil {
		t.Fatal(err)
	}
	if _, err := in.open(message); err == nil {
		t.Error("a message was taken twice")
	}
	*there = there.Add(sealWindow + time.Second)
	if _, err := in.open(out.close([]byte(`{}`))); err == nil || !strings.Contains(err.Error(), "clocks") {
		t.Errorf("an old message: %v", err)
	}
	other, strange, _, _ := sealed(t, "another shared key")
	if _, err := strange.open(other.close([]byte(`{}`))); !errors.Is(err, errUnsealed) {
		t.Errorf("another key: %v", err)
	}
	_, open, _, _ := sealed(t, "")
	if _, err := open.open(message); !errors.Is(err, errSealed) && message[0] != '{' {
		t.Errorf("without a key here: %v", err)
	}
	if got, err := open.open([]byte(`{}`)); err != nil || string(got) != `{}` {
		t.Errorf("without keys: %q, %v", got, err)
	}
}

func TestReplicasWithAKeyHearEachOther(t *testing.T) {
	all := startReplicas(t, 2, func(m *Mesh) {
		if err := m.UseKey(sharedKey); err != nil {
			t.Error(err)
		}
	})
	d := all[0].book(t, testkit.PromptTokens(1, 5))
	all[1].sees(t, "a sealed booking", all[0].Loads())
	d.Booking.End()
}

func TestReplicaWithoutTheKeyHearsNothing(t *testing.T) {
	keys := []string{sharedKey, ""}
	all := startReplicas(t, 2, func(m *Mesh) {
		if err := m.UseKey(keys[0]); err != nil {
			t.Error(err)
		}
		keys = keys[1:]
	})
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
}

func FuzzOpen(f *testing.F) {
	out, err := newSeal(sharedKey)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(out.close([]byte(`{"a":1}`)), true)
	f.Add([]byte(`{"a":1}`), false)
	f.Add([]byte(nil), true)
	f.Add(make([]byte, saltSize+stampSize), true)
	f.Fuzz(func(t *testing.T, message []byte, keyed bool) {
		in := &opener{now: time.Now}
		if keyed {
			in.key = []byte("a key that is not of the seeds")
		}
		text, err := in.open(message)
		if keyed && err == nil {
			t.Errorf("%q was opened as %q", message, text)
		}
	})
}
