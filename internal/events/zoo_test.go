package events

import (
	"bufio"
	"cmp"
	"compress/gzip"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/kv"
	"kvrouter/internal/radix"
	"kvrouter/internal/testkit"
)

// capturedLine is a line of a capture: an event batch, or a request with what the
// engine found.
type capturedLine struct {
	Kind    string   `json:"kind"` // event, request
	Seq     uint64   `json:"seq"`
	Payload []byte   `json:"payload"`
	Prompt  []uint32 `json:"prompt_token_ids"`
	Usage   struct {
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	} `json:"usage"`
}

// replayCapture returns the requests of a capture, those whose prediction from the
// events before was exact, and the most that was promised too much, tokens.
func replayCapture(t *testing.T, name string, block int, traits kv.Traits) (requests, exact, most int) {
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
	index := radix.NewTree()
	s := NewStream(Source{Worker: testkit.EventWorker, BlockSize: block}, index, Options{}, slog.New(slog.DiscardHandler))
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
		lookups := [][]uint64{kv.HashBlocks(nil, line.Prompt, block, "", "")}
		for _, l := range index.Lookaheads() {
			lookups = append(lookups, kv.HashLookaheadBlocks(nil, line.Prompt, block, l.Tokens, "", "", nil))
		}
		found := 0
		for _, local := range lookups {
			for _, m := range index.Match(local, (len(line.Prompt)-1)/block, nil) {
				found = max(found, min(m.Blocks, (len(line.Prompt)-1)/block)*block)
			}
		}
		if requests++; found == line.Usage.Details.Cached {
			exact++
		} else {
			t.Logf("request %d of %d tokens: %d predicted, %d found", requests, len(line.Prompt), found, line.Usage.Details.Cached)
		}
		most = max(most, found-line.Usage.Details.Cached)
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
	return requests, exact, most
}

// form returns the name of a capture: the engine, its version and the model's form.
func form(name string) string { return strings.TrimSuffix(filepath.Base(name), ".jsonl.gz") }

// capturedTraits are what the captures do not say of their engines.
var capturedTraits = map[string]kv.Traits{
	"vllm-0.32.0-eagle":               {DropsLast: true},
	"vllm-0.32.0-engine-eagle":        {DropsLast: true},
	"vllm-0.32.0-engine-eagle-gemma3": {DropsLast: true},
	"vllm-0.32.0-engine-mtp-mamba":    {DropsLast: true},
	"vllm-0.32.0-llama4":              {AttentionChunk: 512},
	"vllm-0.33.0-llama4":              {AttentionChunk: 512},
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
			requests, exact, most := replayCapture(t, name, 32, capturedTraits[form(name)])
			t.Logf("%d of %d predictions were exact; up to %d tokens too many", exact, requests, most)
			if requests == 0 || exact < requests-tolerated[form(name)] {
				t.Errorf("%d of %d predictions were exact; up to %d tokens too many", exact, requests, most)
			}
		})
	}
}
