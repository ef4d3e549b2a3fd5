package events

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
)

// tierLine is a line of a capture of an engine with tiers: a prompt, an event batch, or a
// request with the tokens that the engine found.
type tierLine struct {
	Kind    string   `json:"kind"` // prompt, event, request
	Prompt  string   `json:"prompt"`
	IDs     []uint32 `json:"prompt_token_ids"`
	Seq     uint64   `json:"seq"`
	Payload []byte   `json:"payload"`
	Tokens  int      `json:"tokens"` // of the prompt
	Device  int      `json:"device"`
	Lower   int      `json:"lower"`
	Host    int      `json:"host"`    // of Lower, SGLang
	Storage int      `json:"storage"` // the rest of Lower, SGLang
}

const tierBlock = 64 // tokens, of all captures

func tierCapture(t testing.TB, name string) (lines []tierLine) {
	t.Helper()
	file, err := os.Open("testdata/tiers/" + name + ".jsonl.gz")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	zip, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	scanner := bufio.NewScanner(zip)
	scanner.Buffer(nil, 1<<24)
	for scanner.Scan() {
		var line tierLine
		if err := json.Unmarshal(scanner.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	if err := scanner.Err(); err != nil {
		t.Fatal(err)
	}
	return lines
}

// tierStream returns a stream that has begun, over an empty index.
func tierStream() (*Stream, *radix.Tree) {
	index := radix.NewTree()
	s := NewStream(Source{Worker: testkit.EventWorker, BlockSize: tierBlock}, index, Options{}, slog.New(slog.DiscardHandler))
	s.Begin(0)
	return s, index
}

// found returns the match of the event worker for a prompt.
func found(index radix.Index, ids []uint32) kv.Match {
	local := kv.HashBlocks(nil, ids, tierBlock, "", "")
	usable := (len(ids) - 1) / tierBlock
	matches := index.Match(local, usable, nil)
	if len(matches) == 0 {
		return kv.Match{}
	}
	matches[0].Blocks = min(matches[0].Blocks, usable)
	return matches[0]
}

// The captures are of real engines; the requests say what these found.
func TestTiersPredictWhatTheEnginesFind(t *testing.T) {
	for _, c := range []struct {
		name            string
		requests, exact int
	}{
		{"vllm-0.32.0-cpu", 5, 5}, // events with the hash only
		{"vllm-0.32.0-cpu-fs", 9, 9},
		{"sglang-0.5.23-host", 12, 12},
		{"sglang-0.5.23-host-file", 8, 5}, // no event names what its storage holds
	} {
		t.Run(c.name, func(t *testing.T) {
			s, index := tierStream()
			prompts := map[string][]uint32{}
			requests, exact := 0, 0
			for _, line := range tierCapture(t, c.name) {
				switch line.Kind {
				case "prompt":
					prompts[line.Prompt] = line.IDs
				case "event":
					s.Apply(line.Seq, line.Payload, false)
					if err := index.Check(); err != nil {
						t.Fatal(err)
					}
				case "request":
					requests++
					m := found(index, prompts[line.Prompt][:line.Tokens])
					device, lower := m.Blocks*tierBlock, m.Lower.Total()*tierBlock
					text := fmt.Sprintf("%s:%d: predicted %d and %+v, the engine found %d and %d", line.Prompt, line.Tokens, device, m.Lower, line.Device, line.Lower)
					if device+lower > line.Device+line.Lower {
						t.Errorf("too much: %s", text)
					}
					if device == line.Device && lower == line.Lower && (line.Host == 0 || int(m.Lower.Host)*tierBlock == line.Host) {
						exact++
					} else {
						t.Log(text)
					}
					if m.Lower.Disk > 0 && !m.Doubtful {
						t.Errorf("files do not make it doubtful: %s", text)
					}
				}
			}
			if requests != c.requests || exact != c.exact {
				t.Errorf("%d of %d predictions are exact, want %d of %d", exact, requests, c.exact, c.requests)
			}
			for name, n := range map[string]uint64{"decode_errors": 0, "unknown_parent": 0, "invalid_stored": 0, "unknown_media": 0} {
				if got := s.Stats().Counts()[name]; got != n {
					t.Errorf("%d %s, want %d", got, name, n)
				}
			}
			if waiting := index.LowerOf(testkit.EventWorker).Waiting; waiting > 0 {
				t.Errorf("%d blocks wait for their place", waiting)
			}
		})
	}
}

// vLLM sends the same event for a reset of the device and for one of all its tiers.
func TestTiersAreDoubtfulAfterAReset(t *testing.T) {
	s, index := tierStream()
	var batches []tierLine
	for _, line := range tierCapture(t, "vllm-0.32.0-cpu-reset") {
		if line.Kind == "event" {
			batches = append(batches, line)
		}
	}
	from := batches[0].Seq
	s.Begin(from)
	apply := func(seqs ...uint64) {
		for _, seq := range seqs {
			s.Apply(seq, batches[seq-from].Payload, false)
			if err := index.Check(); err != nil {
				t.Fatal(err)
			}
		}
	}
	state := func() string {
		l := index.LowerOf(testkit.EventWorker)
		return fmt.Sprint(index.Blocks(testkit.EventWorker), l.Own.Host, l.Doubtful)
	}
	want := func(when, want string) {
		t.Helper()
		if got := state(); got != want {
			t.Errorf("%s: %s, want %s", when, got, want)
		}
	}
	apply(15, 16)
	want("stored", "2 2 false")
	apply(17) // reset of the device
	want("reset", "0 2 true")
	if !index.SettleLower(testkit.EventWorker, true) {
		t.Error("an answer settles nothing")
	}
	apply(18)
	want("loaded again", "15 2 false")
	apply(19) // reset of all, and the prompt is computed again
	want("reset of all", "15 2 true")
	index.SettleLower(testkit.EventWorker, false)
	want("an answer found nothing", "15 0 false")
	apply(20)
	want("stored again", "15 15 false")
	if !slices.Equal(index.Workers(), []kv.WorkerKey{testkit.EventWorker}) {
		t.Errorf("workers %v", index.Workers())
	}
}
