package events

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
)

// capturedLine is a line of a capture: an event batch, or a request with what the
// engine found.
type capturedLine struct {
	Kind    string   `json:"kind"` // event, request
	Seq     uint64   `json:"seq"`
	Payload []byte   `json:"payload"`
	Adapter string   `json:"lora_name"`
	Prompt  []uint32 `json:"prompt_token_ids"`
	Usage   struct {
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// replayed is what became of a capture.
type replayed struct {
	stream                *Stream
	index                 *radix.Tree
	prompts               [][]uint32
	requests, exact, most int // those whose prediction from the events before was exact; the most promised too much, tokens
}

// replayCapture applies the events of a capture and compares its requests.
func replayCapture(t *testing.T, name string, block int, traits kv.Traits) (r replayed) {
	t.Helper()
	index := radix.NewTree()
	return replayCaptureInto(t, name, block, traits, index, index)
}

// replayCaptureInto is replayCapture into an index that the events change through changed.
func replayCaptureInto(t *testing.T, name string, block int, traits kv.Traits, index *radix.Tree, changed radix.Index) (r replayed) {
	t.Helper()
	file, err := os.Open(name)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	zip, err := gzip.NewReader(file)
	if err != nil {
		t.Fatal(err)
	}
	s := NewStream(Source{Worker: testkit.EventWorker, BlockSize: block}, changed, Options{}, slog.New(slog.DiscardHandler))
	s.SetTraits(traits)
	s.Begin(0)
	lines := bufio.NewScanner(zip)
	lines.Buffer(nil, 1<<24)
	// An answer comes after the events of its own prompt: they are applied after it.
	var pending []capturedLine
	apply := func() {
		for _, line := range pending {
			s.Apply(line.Seq, line.Payload, false)
		}
		pending = pending[:0]
	}
	for lines.Scan() {
		var line capturedLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			t.Fatal(err)
		}
		if line.Kind == "event" {
			pending = append(pending, line)
			continue
		}
		r.prompts = append(r.prompts, line.Prompt)
		lookups := [][]uint64{kv.HashBlocks(nil, line.Prompt, block, line.Adapter, "")}
		for _, l := range index.Lookaheads() {
			lookups = append(lookups, kv.HashLookaheadBlocks(nil, line.Prompt, block, l.Tokens, line.Adapter, "", nil))
		}
		found := 0
		for _, local := range lookups {
			for _, m := range index.Match(local, (len(line.Prompt)-1)/block, kv.AllParts, nil) {
				found = max(found, min(m.Blocks, (len(line.Prompt)-1)/block)*block)
			}
		}
		if r.requests++; found == line.Usage.Details.Cached {
			r.exact++
		} else {
			t.Logf("request %d of %d tokens: %d predicted, %d found", r.requests, len(line.Prompt), found, line.Usage.Details.Cached)
		}
		r.most = max(r.most, found-line.Usage.Details.Cached)
		apply()
	}
	apply()
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	if err := index.Check(); err != nil {
		t.Fatal(err)
	}
	t.Logf("layout %s", s.Stats().Layout())
	r.stream, r.index = s, index
	return r
}

// form returns the name of a capture: the engine, its version and the model's form.
func form(name string) string { return strings.TrimSuffix(filepath.Base(name), ".jsonl.gz") }

// capturedTraits are what the captures do not say of their engines.
var capturedTraits = map[string]kv.Traits{
	"vllm-0.32.0-eagle":                   {DropsLast: true},
	"vllm-0.32.0-engine-eagle-gemma3":     {DropsLast: true},
	"vllm-0.32.0-engine-mtp-mamba":        {DropsLast: true},
	"vllm-0.32.0-engine-sliding-interval": {Retention: 512},
	"vllm-0.32.0-llama4":                  {AttentionChunk: 512},
	"vllm-0.33.0-llama4":                  {AttentionChunk: 512},
}

// tolerated are predictions that cannot be exact: the events of a model with sliding
// windows only do not say that a prompt ends with a block.
var tolerated = map[string]int{"vllm-0.32.0-mistralsw": 1}

func TestPredictionsOfCapturedModelsAreExact(t *testing.T) {
	folder := cmp.Or(os.Getenv("KVROUTER_CAPTURES"), "testdata/zoo")
	files, err := filepath.Glob(filepath.Join(folder, "*.jsonl.gz"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no captures: %v", err)
	}
	for _, name := range files {
		t.Run(form(name), func(t *testing.T) {
			r := replayCapture(t, name, 32, capturedTraits[form(name)])
			t.Logf("%d of %d predictions were exact; up to %d tokens too many", r.exact, r.requests, r.most)
			if r.requests == 0 || r.exact < r.requests-tolerated[form(name)] {
				t.Errorf("%d of %d predictions were exact; up to %d tokens too many", r.exact, r.requests, r.most)
			}
		})
	}
}

// TestCopiesOfAnIndexHaveAllCacheGroups: a dump, a snapshot and another router's answer
// give the same predictions as the events.
func TestCopiesOfAnIndexHaveAllCacheGroups(t *testing.T) {
	const block = 32
	for _, name := range []string{"vllm-0.32.0-gemma3", "vllm-0.32.0-lfm2", "vllm-0.32.0-engine-wide", "vllm-0.32.0-eagle"} {
		original := replayCapture(t, filepath.Join("testdata/zoo", name+".jsonl.gz"), block, capturedTraits[name])
		another := func() (*Stream, *radix.Tree) {
			index := radix.NewTree()
			return NewStream(Source{Worker: testkit.EventWorker, Endpoint: "tcp://127.0.0.1:1", BlockSize: block}, index, Options{}, slog.New(slog.DiscardHandler)), index
		}
		equal := func(t *testing.T, index *radix.Tree) {
			t.Helper()
			if err := index.Check(); err != nil {
				t.Fatal(err)
			}
			found := 0
			for _, prompt := range original.prompts {
				local := kv.HashBlocks(nil, prompt, block, "", "")
				got, want := index.Match(local, len(local), kv.AllParts, nil), original.index.Match(local, len(local), kv.AllParts, nil)
				if !slices.Equal(got, want) {
					t.Fatalf("a prompt of %d blocks matches %+v, want %+v", len(local), got, want)
				}
				if len(want) > 0 && want[0].Blocks > 0 {
					found++
				}
			}
			if found == 0 {
				t.Error("no prompt matches anything")
			}
			if got, want := index.AllBlocks(testkit.EventWorker), original.index.AllBlocks(testkit.EventWorker); got != want {
				t.Errorf("%d blocks, want %d", got, want)
			}
		}
		t.Run(name+"/dump", func(t *testing.T) {
			var text bytes.Buffer
			if err := WriteDump(&text, original.index, block, func(kv.WorkerKey) int { return block }, []DumpPart{{"m:g", []kv.WorkerKey{testkit.EventWorker}}}); err != nil {
				t.Fatal(err)
			}
			_, index := another()
			if found, err := readDump(&text, index); err != nil || found.LeftOut > 0 {
				t.Fatalf("%+v: %v", found, err)
			}
			equal(t, index)
		})
		t.Run(name+"/snapshot", func(t *testing.T) {
			var file bytes.Buffer
			original.stream.Src.Endpoint = "tcp://127.0.0.1:1"
			if _, _, err := writeSnapshot(t.Context(), &file, block, []*Stream{original.stream}, nil); err != nil {
				t.Fatal(err)
			}
			ranks, err := parseSnapshot(file.Bytes(), block)
			if err != nil || ranks[testkit.EventWorker] == nil {
				t.Fatalf("%v: %v", ranks, err)
			}
			s, index := another()
			s.saved = ranks[testkit.EventWorker]
			s.restore()
			equal(t, index)
			if s.layout.String() != original.stream.layout.String() {
				t.Errorf("layout %s, want %s", s.layout, original.stream.layout)
			}
		})
		t.Run(name+"/peer", func(t *testing.T) {
			read := reread(t, original.stream.History().Query(nil, nil, nil), block)
			s, index := another()
			if !s.take(read) {
				t.Fatal("the answer is not taken")
			}
			equal(t, index)
		})
	}
}
