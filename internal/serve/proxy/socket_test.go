package proxy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// frameOf is a frame of a server with the first byte of its head.
func frameOf(first byte, payload string) []byte {
	head := []byte{first}
	switch n := len(payload); {
	case n < 126:
		head = append(head, byte(n))
	case n < 1<<16:
		head = binary.BigEndian.AppendUint16(append(head, 126), uint16(n))
	default:
		head = binary.BigEndian.AppendUint64(append(head, 127), uint64(n))
	}
	return append(head, payload...)
}

// TestMessagesAreReadHoweverTheyAreCut into frames, with others between, and into writes.
func TestMessagesAreReadHoweverTheyAreCut(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var sent []byte
		var want []string
		for range rapid.IntRange(0, 5).Draw(t, "messages") {
			text := strings.Repeat("x", rapid.SampledFrom([]int{0, 1, 125, 126, 1000, 65_536}).Draw(t, "length"))
			opcode := rapid.SampledFrom([]byte{1, 2}).Draw(t, "opcode")
			if opcode == 1 {
				want = append(want, text)
			}
			for parts := rapid.IntRange(0, 3).Draw(t, "parts"); parts > 0; parts-- {
				n := rapid.IntRange(0, len(text)).Draw(t, "part")
				sent = append(sent, frameOf(opcode, text[:n])...)
				sent = append(sent, frameOf(0x89, "ping")...)
				opcode, text = 0, text[n:]
			}
			sent = append(sent, frameOf(0x80|opcode, text)...)
		}
		var f frames
		var got []string
		for rest := sent; len(rest) > 0; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "write")
			if err := f.take(rest[:n], func(m []byte) error { got = append(got, string(m)); return nil }); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if !slices.Equal(got, want) || f.Within() {
			t.Fatalf("%d messages of %d, within a frame: %v", len(got), len(want), f.Within())
		}
	})
}

// TestALongMessageIsNotKept, whatever length its frames state.
func TestALongMessageIsNotKept(t *testing.T) {
	for _, length := range []uint64{maxMessage, 1 << 40, math.MaxUint64} {
		var f frames
		sent := append(frameOf(0x01, "a"), binary.BigEndian.AppendUint64([]byte{0x80, 127}, length)...)
		if err := f.take(append(sent, make([]byte, 100)...), func([]byte) error { return nil }); err != nil || f.reads || len(f.message) > 0 {
			t.Errorf("length %d: %d bytes are kept, %v", length, len(f.message), err)
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(frameOf(0x81, "a"), 1)
	f.Add([]byte{0x81, 127, 255, 255, 255, 255, 255, 255, 255, 255, 1}, 3)
	f.Fuzz(func(t *testing.T, b []byte, cut int) {
		var s frames
		cut = min(max(cut, 0), len(b))
		for _, part := range [][]byte{b[:cut], b[cut:]} {
			_ = s.take(part, func(m []byte) error {
				if len(m) > maxMessage {
					t.Fatalf("a message of %d bytes", len(m))
				}
				return nil
			})
		}
	})
}

// TestTheRouterClosesAConnectionBetweenTwoFrames: within one, the client could not read it.
func TestTheRouterClosesAConnectionBetweenTwoFrames(t *testing.T) {
	for name, test := range map[string]struct {
		written []byte
		told    func([]byte) error
		want    []byte
	}{
		"between":     {frameOf(0x81, "ab"), nil, frameOf(0x88, "\x03\xe9bye")},
		"within":      {frameOf(0x81, "ab")[:3], nil, nil},
		"by a reader": {frameOf(0x81, "ab"), func([]byte) error { return errors.New("no") }, frameOf(0x88, "\x03\xf0no")},
	} {
		client, server := net.Pipe()
		got := make(chan []byte)
		go func() { // until the server closes
			all, _ := io.ReadAll(client)
			got <- all
		}()
		c := &socketConn{Conn: server, told: test.told}
		if _, err := c.Write(test.written); (err != nil) != (test.told != nil) {
			t.Error(err)
		}
		c.leave(goingAway, "bye")
		c.leave(goingAway, "again")
		if _, err := c.Write([]byte("x")); err == nil {
			t.Errorf("%s: it can be written to after its end", name)
		}
		server.Close()
		if all := <-got; !bytes.Equal(all, slices.Concat(test.written, test.want)) {
			t.Errorf("%s: %q", name, all)
		}
	}
}
