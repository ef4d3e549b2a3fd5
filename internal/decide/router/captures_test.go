package router_test

import (
	"bufio"
	"compress/gzip"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/testkit/routertest"
)

// captureLine is a line of a capture of a real server: what it is, an event batch, or a
// request with what was found of it, after the events that it caused.
type captureLine struct {
	Kind   string
	Server json.RawMessage `json:"server_info"`

	Seq     uint64
	Payload []byte

	Prompt []uint32 `json:"prompt_token_ids"`
	Usage  struct {
		Details struct {
			Cached int `json:"cached_tokens"`
		} `json:"prompt_tokens_details"`
	}
}

// TestPredictionsOfCapturedSGLangServers feeds the KV events of real servers, with small
// caches and prompts that branch, return and are evicted, and compares the overlap of
// each prompt with the cached tokens of its answer.
func TestPredictionsOfCapturedSGLangServers(t *testing.T) {
	for _, test := range []struct {
		name     string
		requests int
		over     int // predicted too high, where the events do not tell enough; never too low
	}{
		{"full", 50, 0},   // Llama
		{"gemma3", 50, 0}, // windows in five of six layers, which SGLang keeps whole
		{"window", 50, 7}, // of 256 tokens in three of four layers
		// SGLang's own tree, driven without a server as its scheduler does.
		{"eagle", 50, 0},  // keys of pairs of tokens
		{"state", 50, 25}, // a state every 64 tokens of a prefill, 24 states
	} {
		t.Run(test.name, func(t *testing.T) {
			file, err := os.Open(filepath.Join("testdata/sglang", test.name+".jsonl.gz"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = file.Close() }()
			unzipped, err := gzip.NewReader(file)
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(unzipped)
			lines.Buffer(nil, 1<<24)
			var (
				info           *probe.ServerInfo
				r              *router.Router
				stream         *events.Stream
				caused         []captureLine
				requests, over int
			)
			for lines.Scan() {
				var line captureLine
				if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
					t.Fatal(err)
				}
				switch line.Kind {
				case "server":
					info = probe.ParseServerInfo(line.Server)
					r = routertest.New(t, "round-robin", 1, func(_ *router.Settings, deps *router.Deps) { deps.BlockSize = info.BlockSize() })
					stream = events.NewStream(events.Source{BlockSize: info.BlockSize()}, routertest.Index(r), events.Options{}, slog.New(slog.DiscardHandler))
					stream.Begin(0)
				case "event":
					caused = append(caused, line)
				case "request":
					requests++
					predicted := routertest.MustRoute(t, r, router.Request{Tokens: line.Prompt, QueryOnly: true}).OverlapTokens
					switch cached := line.Usage.Details.Cached; {
					case predicted > cached:
						over++
					case predicted < cached:
						t.Errorf("request %d, %d tokens: predicted %d, cached %d", requests, len(line.Prompt), predicted, cached)
					}
					for _, e := range caused {
						stream.Apply(e.Seq, e.Payload, true)
					}
					caused = caused[:0]
				}
			}
			if err := lines.Err(); err != nil {
				t.Fatal(err)
			}
			if requests != test.requests || over != test.over {
				t.Errorf("%d of %d predictions are too high, want %d of %d", over, requests, test.over, test.requests)
			}
			if exact := info.Predictions() == ""; exact != (test.over == 0) {
				t.Errorf("its predictions: %q", info.Predictions())
			}
			if r.Index().Blocks(kv.WorkerKey{}) == 0 {
				t.Error("the index is empty")
			}
		})
	}
}
