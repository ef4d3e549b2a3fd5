package events

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
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
	matches := index.Match(local, usable, kv.AllParts, nil)
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
					if m.Lower.Disk > 0 && !m.Doubtful() {
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
		return fmt.Sprint(index.Blocks(testkit.EventWorker), l.Own.Host, l.Doubt != 0)
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
	doubt := index.LowerOf(testkit.EventWorker).Doubt
	if !radixtest.Settle(index, testkit.EventWorker, doubt, true) {
		t.Error("an answer settles nothing")
	}
	apply(18)
	want("loaded again", "15 2 false")
	apply(19) // reset of all, and the prompt is computed again
	want("reset of all", "15 2 true")
	radixtest.Settle(index, testkit.EventWorker, doubt, false)
	want("an answer of before the reset", "15 2 true")
	doubt = index.LowerOf(testkit.EventWorker).Doubt
	radixtest.Settle(index, testkit.EventWorker, doubt, false)
	want("an answer found nothing", "15 0 false")
	apply(20)
	radixtest.Settle(index, testkit.EventWorker, doubt, false)
	want("stored again, and a later answer found nothing, too", "15 15 false")
	if !slices.Equal(index.Workers(), []kv.WorkerKey{testkit.EventWorker}) {
		t.Errorf("workers %v", index.Workers())
	}
}

// Whatever keeps or sends an index keeps its lower tiers: all prompts match the same.
func TestTiersAreKeptAndSent(t *testing.T) {
	for _, name := range []string{"vllm-0.32.0-cpu", "vllm-0.32.0-cpu-fs", "sglang-0.5.23-host"} {
		s, index := tierStream()
		s.Src.Endpoint = "tcp://127.0.0.1:1"
		file := t.TempDir() + "/recording"
		recorded, recording, err := OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 1 << 30}, index, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		s.index, s.history.index = recorded, recorded
		prompts := map[string][]uint32{}
		for _, line := range tierCapture(t, name) {
			switch line.Kind {
			case "prompt":
				prompts[line.Prompt] = line.IDs
			case "event":
				s.Apply(line.Seq, line.Payload, false)
			case "request":
				compareKept(t, name, s, prompts, index)
			}
		}
		recording.Close()
		lines, err := os.Open(file)
		if err != nil {
			t.Fatal(err)
		}
		defer lines.Close()
		replayed := radix.NewTree()
		if r, err := new(ReplayCommand).Replay(lines, replayed); err != nil || r.wrong > 0 {
			t.Errorf("%s: replay of the recording: %d invalid lines, %v", name, r.wrong, err)
		}
		sameTiers(t, name+": recording", prompts, replayed, index)
	}
}

func sameTiers(t *testing.T, what string, prompts map[string][]uint32, got, want radix.Index) {
	t.Helper()
	for name, ids := range prompts {
		if got, want := found(got, ids), found(want, ids); got != want {
			t.Errorf("%s: prompt %s matches %+v, want %+v", what, name, got, want)
		}
	}
}

func compareKept(t *testing.T, what string, s *Stream, prompts map[string][]uint32, index *radix.Tree) {
	t.Helper()
	another := func(name string, fill func(s *Stream, index *radix.Tree)) {
		t.Helper()
		copied, filled := tierStream()
		fill(copied, filled)
		if err := filled.Check(); err != nil {
			t.Fatalf("%s: %s: %v", what, name, err)
		}
		sameTiers(t, what+": "+name, prompts, filled, index)
		got, want := filled.LowerOf(testkit.EventWorker), index.LowerOf(testkit.EventWorker)
		got.Own, got.Shared, want.Own, want.Shared = kv.LowerBlocks{}, kv.LowerBlocks{}, kv.LowerBlocks{}, kv.LowerBlocks{} // blocks behind holes
		if got != want {
			t.Errorf("%s: %s: %+v, want %+v", what, name, got, want)
		}
	}
	another("dump", func(_ *Stream, index *radix.Tree) {
		var text bytes.Buffer
		if err := WriteDump(&text, s.index, tierBlock, func(kv.WorkerKey) int { return tierBlock }, []DumpPart{{"m:g", []kv.WorkerKey{testkit.EventWorker}}}); err != nil {
			t.Fatal(err)
		}
		if found, err := readDump(&text, index); err != nil || found.LeftOut > 0 {
			t.Fatalf("%+v: %v", found, err)
		}
	})
	another("snapshot", func(to *Stream, _ *radix.Tree) {
		var file bytes.Buffer
		if _, _, err := writeSnapshot(t.Context(), &file, tierBlock, []*Stream{s}, nil); err != nil {
			t.Fatal(err)
		}
		ranks, err := parseSnapshot(file.Bytes(), tierBlock)
		if err != nil {
			t.Fatal(err)
		}
		if to.saved = ranks[testkit.EventWorker]; to.saved == nil {
			if s.history.position().next > 0 {
				t.Error("the rank is not in the snapshot")
			}
			return
		}
		to.restore()
	})
	another("peer", func(to *Stream, _ *radix.Tree) { takeAnswer(t, to, s.History().Query(nil, nil, nil)) })
	first := uint64(0)
	if s.next > 0 {
		another("events of a peer", func(to *Stream, _ *radix.Tree) { takeAnswer(t, to, s.History().Query(&first, nil, nil)) })
	}
}

// reread returns an answer as the router that asked reads it.
func reread(t *testing.T, answer Answer, block int) Answer {
	t.Helper()
	answer.BlockSize = block
	var text bytes.Buffer
	if err := answer.Write(&text); err != nil {
		t.Fatal(err)
	}
	read, err := readAnswer(&text)
	if err != nil {
		t.Fatal(err)
	}
	return read
}

func takeAnswer(t *testing.T, to *Stream, answer Answer) {
	t.Helper()
	read := reread(t, answer, tierBlock)
	if read.Last == nil {
		return // nothing was published
	}
	to.layout, to.layoutText = kv.Layout{}, read.Layout
	if !to.take(read) {
		t.Error("the answer is not taken")
	}
}
