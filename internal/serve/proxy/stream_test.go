package proxy

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

const (
	oneToken   = `data: {"choices":[{"delta":{"content":"a"}}]}`
	usageOnly  = `data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`
	streamEnd  = "data: [DONE]\n\n"
	namedEvent = "event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":2}}}\n\n"
)

// scanned is what a scanner made of a stream.
type scanned struct {
	shown  string
	events int
	usage  Usage
	done   bool
	status int
	finish string
}

// scanIn scans a stream in pieces, each as long as size says.
func scanIn(stream []byte, hide bool, size func() int) scanned {
	s := eventScanner{HideUsage: hide}
	var shown bytes.Buffer
	events := 0
	for rest := stream; len(rest) > 0; {
		n := min(max(1, size()), len(rest))
		shown.Write(s.Scan(rest[:n]))
		events += s.Count
		rest = rest[n:]
	}
	shown.Write(s.End())
	return scanned{shown.String(), events, s.Usage, s.done, s.status, s.finish}
}

// FuzzEventScanner scans a stream in pieces of many sizes: all must read the same
// as one piece, and nothing is lost or made up.
func FuzzEventScanner(f *testing.F) {
	for _, stream := range []string{
		oneToken + "\n\n: comment\n\n" + oneToken + "\r\n\r\n" + usageOnly + "\n\n" + streamEnd,
		usageOnly + "\n\n" + oneToken, namedEvent + "event: message_stop\ndata: {}\n\n", "\n\n\n\n\r\n\r\n\r\n\n", "data: {\"error\":{\"code\":1e300}}\n\n",
		"data: {\"choices\":[0,0],\"usage\":{\"prompt_tokens\":-1}}\n\n", "\r\n\n\r\n", oneToken + "\n\r\n" + oneToken + "\r\r\n\n",
	} {
		f.Add([]byte(stream), uint64(1))
	}
	f.Fuzz(func(t *testing.T, stream []byte, seed uint64) {
		for _, hide := range []bool{true, false} {
			want := scanIn(stream, hide, func() int { return len(stream) })
			if !hide && want.shown != string(stream) || len(want.shown) > len(stream) {
				t.Fatalf("%q became %q", stream, want.shown)
			}
			random := rand.New(rand.NewPCG(seed, 0))
			for name, size := range map[string]func() int{"bytes": func() int { return 1 }, "pairs": func() int { return 2 }, "random": func() int { return random.IntN(9) }} {
				if got := scanIn(stream, hide, size); got != want {
					t.Fatalf("%q in %s, hide %v:\n got %+v\nwant %+v", stream, name, hide, got, want)
				}
			}
		}
	})
}

func TestAnEventThatIsTooLongGoesOnUnseen(t *testing.T) {
	for _, test := range []struct {
		name  string
		event string
		done  bool
	}{
		{"a token", `data: {"choices":[{"delta":{"content":"` + strings.Repeat("x", maxEvent) + `"}}]}`, false},
		{"exactly the longest", "data: " + strings.Repeat("x", maxEvent-len("data: \n\n")), false},
		{"one longer", "data: " + strings.Repeat("x", maxEvent-len("data: \n\n")+1), false},
		{"an event that ends a response", "event: response.completed\ndata: " + strings.Repeat("x", maxEvent), true},
		{"many times the longest", "data: " + strings.Repeat("x", 5*maxEvent), false},
	} {
		for _, end := range []string{"\n\n", "\r\n\r\n"} {
			stream := []byte(test.event + end + usageOnly + "\n\n" + oneToken + "\n\n")
			for _, hide := range []bool{true, false} {
				want := scanIn(stream, hide, func() int { return len(stream) })
				for _, size := range []int{1 << 10, 100_003, maxEvent, maxEvent + 1} {
					if got := scanIn(stream, hide, func() int { return size }); got != want {
						t.Errorf("%s: in pieces of %d: %d events and %d bytes, want %d and %d", test.name, size, got.events, len(got.shown), want.events, len(want.shown))
					}
				}
				shown := len(stream)
				if hide {
					shown -= len(usageOnly) + 2
				}
				if len(want.shown) != shown || want.done != test.done || want.usage.CachedTokens != 4 {
					t.Errorf("%s, hide %v: %d bytes of %d, done %v, usage %+v", test.name, hide, len(want.shown), shown, want.done, want.usage)
				}
			}
		}
	}
}

// TestStreamsAreScannedInLinearTime would take half a minute if each piece made the
// scanner look at the whole event again.
func TestStreamsAreScannedInLinearTime(t *testing.T) {
	for name, stream := range map[string]string{
		"an event without an end": "data: " + strings.Repeat("x", 2*maxEvent),
		"lines without an end":    strings.Repeat("data: x\r\n", maxEvent/5),
		"comments":                strings.Repeat(": keepalive\n\n", maxEvent/5),
	} {
		began := time.Now()
		for _, hide := range []bool{true, false} {
			s := eventScanner{HideUsage: hide}
			for rest := []byte(stream); len(rest) > 0; {
				n := min(64, len(rest))
				s.Scan(rest[:n])
				rest = rest[n:]
			}
			if held := cap(s.pending) + cap(s.out); held > 3*maxEvent {
				t.Errorf("%s: %d bytes are held", name, held)
			}
		}
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("%s: %v for 2 x %d bytes", name, took, len(stream))
		}
	}
}

func TestReportedNumbersAreClamped(t *testing.T) {
	for answer, want := range map[string]Usage{
		`{"usage":{"prompt_tokens":-5,"completion_tokens":2}}`:                                                              {Known: true, OutputTokens: 2, CachedUntold: true},
		`{"usage":{"prompt_tokens":5,"completion_tokens":-2}}`:                                                              {Known: true, PromptTokens: 5},
		`{"usage":{"prompt_tokens":1e300,"completion_tokens":1e300}}`:                                                       {Known: true, PromptTokens: maxReportedPrompt, Partial: true, OutputTokens: maxReportedOutput, CachedUntold: true},
		`{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":-7}}}`:                  {Known: true, PromptTokens: 5, OutputTokens: 2, CachedKnown: true},
		`{"usage":{"prompt_tokens":"x","completion_tokens":[]}}`:                                                            {Known: true},
		`{"usage":{"prompt_tokens":"nan","completion_tokens":"inf"}}`:                                                       {Known: true, OutputTokens: maxReportedOutput, CachedUntold: true},
		`{"usage":{"prompt_tokens":9223372036854775807,"completion_tokens":1000000000000000000}}`:                           {Known: true, PromptTokens: maxReportedPrompt, Partial: true, OutputTokens: maxReportedOutput, CachedUntold: true},
		`{"usage":{"input_tokens":1e9,"cache_read_input_tokens":1e9,"cache_creation_input_tokens":1e9,"output_tokens":-1}}`: {Known: true, PromptTokens: maxReportedPrompt, Partial: true, CachedKnown: true, CachedTokens: maxReportedPrompt},
		`{"usage":{"input_tokens":3,"cache_read_input_tokens":4,"cache_creation_input_tokens":-1,"output_tokens":6}}`:       {Known: true, PromptTokens: 7, OutputTokens: 6, CachedKnown: true, CachedTokens: 4},
	} {
		if got := ReadUsage([]byte(answer)); got != want {
			t.Errorf("%s: %+v, want %+v", answer, got, want)
		}
	}
}

// FuzzReadUsage reads what workers may report.
func FuzzReadUsage(f *testing.F) {
	for _, answer := range []string{`{"usage":{"prompt_tokens":-5,"completion_tokens":1e300}}`, `{"response":{"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":4}}}}`,
		`{"usage":{"cache_read_input_tokens":1,"input_tokens":"nan"}}`, `{"usage":[`, `{"usage":{"prompt_tokens":{"a":[1]}}}`, ``} {
		f.Add([]byte(answer))
	}
	f.Fuzz(func(t *testing.T, answer []byte) {
		u := ReadUsage(answer)
		for _, n := range []int{u.PromptTokens, u.OutputTokens, u.CachedTokens} {
			if n < 0 || n > maxReportedPrompt {
				t.Fatalf("%+v", u)
			}
		}
	})
}

func BenchmarkScanTokens(b *testing.B) {
	chunk := []byte(strings.Repeat(oneToken+"\n\n", 20))
	b.SetBytes(int64(len(chunk)))
	b.ReportAllocs()
	s := eventScanner{HideUsage: true}
	for b.Loop() {
		s.Scan(chunk)
	}
}

// TestEventsSplitAnywhereReadTheSame feeds a stream to the scanner in pieces of
// every size.
func TestEventsSplitAnywhereReadTheSame(t *testing.T) {
	const usageEvent = `{"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":4}}}`
	stream := "data: " + testkit.TokenEvent + "\n\n: comment\n\ndata: " + testkit.TokenEvent + "\r\n\r\ndata: " + usageEvent + "\n\ndata: [DONE]\n\n"
	shown := "data: " + testkit.TokenEvent + "\n\n: comment\n\ndata: " + testkit.TokenEvent + "\r\n\r\ndata: [DONE]\n\n"
	for size := 1; size <= len(stream); size++ {
		for _, hide := range []bool{true, false} {
			s := eventScanner{HideUsage: hide}
			var got bytes.Buffer
			events := 0
			for rest := []byte(stream); len(rest) > 0; {
				n := min(size, len(rest))
				got.Write(s.Scan(rest[:n]))
				events += s.Count
				rest = rest[n:]
			}
			got.Write(s.End())
			want := stream
			if hide {
				want = shown
			}
			if got.String() != want || events != 3 || s.Usage.CachedTokens != 4 {
				t.Fatalf("pieces of %d, hide %v: %d events, usage %+v\n%s", size, hide, events, s.Usage, got.String())
			}
		}
	}
}
