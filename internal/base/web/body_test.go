package web

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"

	"kvrouter/internal/base/quota"
)

// bodyRequest is a request whose body comes from a reader, with that length
// announced; negative: none.
func bodyRequest(from io.Reader, announced int64) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/", io.NopCloser(from))
	r.ContentLength = announced
	return r
}

func randomBytes(n int) []byte {
	out := make([]byte, n)
	random := rand.New(rand.NewPCG(uint64(n), 1))
	for i := range out {
		out[i] = byte(random.Uint32())
	}
	return out
}

func TestBodiesComeWholeHoweverTheyAreCut(t *testing.T) {
	b := NewBodies(1<<20, quota.New(4<<20))
	for _, size := range []int{0, 1, 100, firstBuffer - 1, firstBuffer, firstBuffer + 1, 4*firstBuffer + 3, 1 << 20} {
		sent := randomBytes(size)
		for name, from := range map[string]io.Reader{"at once": bytes.NewReader(sent), "in halves": iotest.HalfReader(bytes.NewReader(sent)), "end with data": iotest.DataErrReader(bytes.NewReader(sent))} {
			for _, announced := range []int64{int64(size), -1} {
				if announced == int64(size) && name == "end with data" {
					from = bytes.NewReader(sent)
				}
				got, err := b.Read(httptest.NewRecorder(), bodyRequest(from, announced), "a")
				if err != nil || !bytes.Equal(got, sent) {
					t.Errorf("%d bytes %s, announced %d: %d bytes, %v", size, name, announced, len(got), err)
				}
				if held := b.Held(); held < int64(size) || held > int64(max(firstBuffer, growth*size)) {
					t.Errorf("%d bytes take %d", size, held)
				}
				b.Done("a", got)
				from = bytes.NewReader(sent)
			}
		}
	}
	if b.Held() != 0 {
		t.Errorf("%d bytes are held by nobody", b.Held())
	}
}

func TestAnAnnouncedBodyCostsNothingUntilItComes(t *testing.T) {
	b := NewBodies(64<<20, quota.New(1<<30))
	come, send := io.Pipe()
	done := make(chan error)
	go func() { // until the pipe is closed below
		_, err := b.Read(httptest.NewRecorder(), bodyRequest(come, 64<<20), "a")
		done <- err
	}()
	if _, err := send.Write([]byte("{")); err != nil {
		t.Fatal(err)
	}
	if held := b.Held(); held > firstBuffer {
		t.Errorf("one byte of 64 MB takes %d bytes", held)
	}
	send.Close()
	var bad *BodyError
	if err := <-done; !errors.As(err, &bad) || bad.Status != 400 || !strings.Contains(bad.Message, "ended after 1 of 67108864 bytes") {
		t.Error(err)
	}
	if b.Held() != 0 {
		t.Errorf("%d bytes are still held", b.Held())
	}
}

func TestBodiesShareOneBudget(t *testing.T) {
	b := NewBodies(1<<20, quota.New(3<<20))
	var held [][]byte
	clients := []string{"a", "b", "c"}
	for _, client := range clients {
		body, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(randomBytes(1<<20)), 1<<20), client)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, body)
	}
	w := httptest.NewRecorder()
	_, err := b.Read(w, bodyRequest(strings.NewReader("{}"), 2), "a")
	var bad *BodyError
	if !errors.As(err, &bad) || bad.Status != 503 || w.Header().Get("Retry-After") != "1" || !strings.Contains(bad.Message, "--max-inflight-body-bytes") {
		t.Errorf("%v, headers %v", err, w.Header())
	}
	if b.Refused() != 1 || b.Held() != 3<<20 {
		t.Errorf("%d refused, %d bytes held", b.Refused(), b.Held())
	}
	b.Done("a", held[0])
	body, err := b.Read(httptest.NewRecorder(), bodyRequest(strings.NewReader("{}"), -1), "a")
	if err != nil || string(body) != "{}" {
		t.Errorf("%q, %v", body, err)
	}
	b.Done("a", body)
	b.Done("b", held[1])
	b.Done("c", held[2])
	b.Done("a", nil)
	if b.Held() != 0 {
		t.Errorf("%d bytes are still held", b.Held())
	}
}

// TestUploadsOfAClientLeaveRoomForOthers, however many of them never end.
func TestUploadsOfAClientLeaveRoomForOthers(t *testing.T) {
	b := NewBodies(1<<20, quota.New(4<<20))
	for range 8 {
		if body, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(randomBytes(1<<20)), 1<<20), "greedy"); err == nil {
			defer b.Done("greedy", body)
		}
	}
	if b.Refused() == 0 {
		t.Error("one client may have all")
	}
	for _, size := range []int{100, 1 << 20} {
		body, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(randomBytes(size)), int64(size)), "other")
		if err != nil {
			t.Errorf("%d bytes of another client: %v", size, err)
		}
		b.Done("other", body)
	}
}

func TestTooLargeBodiesAreRefused(t *testing.T) {
	b := NewBodies(100, quota.New(1<<30))
	for _, announced := range []int64{101, 1 << 62, -1} {
		_, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(make([]byte, 101)), announced), "a")
		var bad *BodyError
		if !errors.As(err, &bad) || bad.Status != 413 || !strings.Contains(bad.Message, "--max-body-bytes") {
			t.Errorf("announced %d: %v", announced, err)
		}
	}
	if b.Held() != 0 {
		t.Errorf("%d bytes are still held", b.Held())
	}
}

// TestTheBudgetIsKept reads and releases bodies at random.
func TestTheBudgetIsKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := NewBodies(1<<17, quota.New(1<<18))
		var held [][]byte
		t.Repeat(map[string]func(*rapid.T){
			"read": func(t *rapid.T) {
				size := rapid.IntRange(0, 1<<17).Draw(t, "size")
				announced := int64(size)
				if rapid.Bool().Draw(t, "unknown") {
					announced = -1
				}
				body, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(make([]byte, size)), announced), "a")
				if err == nil {
					held = append(held, body)
				}
			},
			"done": func(t *rapid.T) {
				if len(held) > 0 {
					b.Done("a", held[0])
					held = held[1:]
				}
			},
			"": func(t *rapid.T) {
				var sum int64
				for _, body := range held {
					sum += int64(cap(body))
				}
				if b.Held() != sum || sum > 1<<18 {
					t.Fatalf("%d bytes are held, %d are told", sum, b.Held())
				}
			},
		})
	})
}

// FuzzBodies holds what is read against what was sent, whatever is announced.
func FuzzBodies(f *testing.F) {
	f.Add([]byte(`{"a":1}`), int64(7), int64(64))
	f.Add([]byte(`{"a":1}`), int64(-1), int64(3))
	f.Add([]byte(``), int64(0), int64(1))
	f.Add(make([]byte, 100_000), int64(1<<40), int64(1<<20))
	f.Add(make([]byte, 100_000), int64(99_999), int64(1<<20))
	f.Fuzz(func(t *testing.T, sent []byte, announced, largest int64) {
		if largest < 1 || largest > 1<<24 {
			return
		}
		b := NewBodies(largest, quota.New(1<<30))
		body, err := b.Read(httptest.NewRecorder(), bodyRequest(bytes.NewReader(sent), announced), "a")
		var bad *BodyError
		switch {
		case err != nil && !errors.As(err, &bad):
			t.Fatalf("%T is no *BodyError", err)
		case err == nil && (int64(len(body)) > largest || !bytes.HasPrefix(sent, body) || announced < 0 && len(body) != len(sent)):
			t.Fatalf("%d bytes of %d, announced %d", len(body), len(sent), announced)
		}
		b.Done("a", body)
		if b.Held() != 0 {
			t.Fatalf("%d bytes are still held", b.Held())
		}
	})
}

func TestHeadersOfOneConnectionAreDropped(t *testing.T) {
	h := http.Header{"Connection": {"X-Foo, keep-alive", " x-bar"}, "X-Foo": {"1"}, "X-Bar": {"2"}, "X-Baz": {"3"}, "Upgrade": {"h2c"}, "Keep-Alive": {"5"}}
	DropHopByHop(h)
	if len(h) != 1 || h.Get("X-Baz") != "3" {
		t.Error(h)
	}
}

func TestBodySettings(t *testing.T) {
	for _, test := range []struct {
		given, memory, want int64
		wrong               bool
	}{
		{0, 0, 0, false},
		{0, 4 << 30, 1 << 30, false},
		{0, 1 << 20, 64 << 20, false},
		{1 << 30, 4 << 30, 1 << 30, false},
		{1 << 20, 4 << 30, 1 << 20, true},
		{-1, 4 << 30, -1, true},
	} {
		s := BodySettings{MaxInflightBodyBytes: test.given}
		s.SetDefault(64<<20, test.memory)
		if err := s.Validate(64 << 20); s.MaxInflightBodyBytes != test.want || (err != nil) != test.wrong {
			t.Errorf("%+v: %d, %v", test, s.MaxInflightBodyBytes, err)
		}
	}
}

// BenchmarkBody reads a chat of usual size.
func BenchmarkBody(b *testing.B) {
	sent := randomBytes(5000)
	bodies := NewBodies(64<<20, quota.New(1<<30))
	b.SetBytes(int64(len(sent)))
	for b.Loop() {
		body, err := bodies.read(bytes.NewReader(sent), int64(len(sent)), "a", 0)
		if err != nil || len(body) != len(sent) {
			b.Fatal(strconv.Itoa(len(body)), err)
		}
		bodies.Done("a", body)
	}
}

// TestAReaderSaysWhyABodyIsRefused: a body's reader may have a status of its own.
func TestAReaderSaysWhyABodyIsRefused(t *testing.T) {
	for status, again := range map[int]string{http.StatusBadRequest: "", http.StatusServiceUnavailable: "1"} {
		b, w := NewBodies(1<<20, quota.New(4<<20)), httptest.NewRecorder()
		_, err := b.Read(w, bodyRequest(iotest.ErrReader(&BodyError{status, "why"}), 7), "a")
		var bad *BodyError
		if !errors.As(err, &bad) || bad.Status != status || bad.Message != "why" || w.Header().Get("Retry-After") != again {
			t.Errorf("%v, headers %v; want %d", err, w.Header(), status)
		}
		if b.Held() != 0 {
			t.Errorf("%d bytes are still held", b.Held())
		}
	}
}
