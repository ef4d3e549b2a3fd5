// Package peers measures the router beside other routers: its tests are parts of
// scripts/peers.sh, and its engine is that of the gateway's measurements, too.
package peers

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
	"kvrouter/internal/testkit/tokenstest"
)

// blockSize is the block size of the backends in tokens, and Blocks how
// many each of them caches.
const (
	blockSize = 64
	Blocks    = 32 << 10
)

// Backend is an engine that answers at once and publishes the KV events of the prompts
// that it has answered. A full cache is emptied at once.
type Backend struct {
	id        string
	model     *tokens.Model
	publisher *testkit.FakePublisher
	prompts   chan []byte // computed, and not yet published
	limit     int         // blocks that it caches at most

	mu     sync.Mutex      // guards all below
	seen   map[uint64]bool // prompts that are or will be cached, by the hash of their body
	blocks map[uint64]bool // blocks that are cached, by sequence hash
	behind int             // prompts not yet published
}

// NewBackend returns the engine of that number, which caches limit blocks at most. Its
// event port ends with the test.
func NewBackend(t *testing.T, id string, model *tokens.Model, limit int) *Backend {
	return &Backend{
		id: id, model: model, publisher: testkit.NewFakePublisher(t), limit: limit,
		prompts: make(chan []byte, 1<<16), seen: map[uint64]bool{}, blocks: map[uint64]bool{},
	}
}

// Headers of a request that asks what the engine really has cached of it, and of
// the answer. Such a request changes nothing.
const (
	headerPeersCheck  = "X-Peers-Check"
	headerPeersEngine = "X-Peers-Engine"
	headerPeersCached = "X-Peers-Cached"
)

// promptIDs is about the length of the prompts of peersCorpus in tokens.
const promptIDs = 2_200

// withTokenIDs returns the events of a chat as vLLM sends them if the request has
// return_token_ids: the first one has the ids of the prompt, too. The ids are made up:
// no router compares them before an answer moves.
func withTokenIDs(events [][]byte) [][]byte {
	ids := make([]string, promptIDs)
	for i := range ids {
		ids[i] = strconv.Itoa(1_000 + i*7_919%40_000)
	}
	out := make([][]byte, len(events))
	for i, event := range events {
		event = bytes.Replace(event, []byte(`"finish_reason":null`), fmt.Appendf(nil, `"finish_reason":null,"token_ids":[%s]`, ids[i]), 1)
		if i == 0 {
			event = bytes.Replace(event, []byte(`}]}`), fmt.Appendf(nil, `}],"prompt_token_ids":[%s]}`, strings.Join(ids, ",")), 1)
		}
		out[i] = event
	}
	return out
}

// Handler serves the engine's HTTP API, as far as a router needs it, and GET
// /peers_blocks: how many blocks it has published, or 503 while prompts are waiting.
func (b *Backend) Handler() http.Handler {
	var answer [][]byte
	for i := range 32 {
		answer = append(answer, fmt.Appendf(nil,
			`data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,"finish_reason":null}]}`+"\n\n", i))
	}
	end := []byte("data: [DONE]\n\n")
	withIDs := withTokenIDs(answer)
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		var usage []byte
		if r.Header.Get(headerPeersCheck) != "" {
			tokens, cached, err := b.truth(body)
			if err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			w.Header().Set(headerPeersEngine, b.id)
			w.Header().Set(headerPeersCached, strconv.Itoa(cached))
			usage = fmt.Appendf(nil,
				`data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":32,"prompt_tokens_details":{"cached_tokens":%d}}}`+"\n\n", tokens,
				cached)
		}
		chunks := answer
		if bytes.Contains(body, []byte(`"return_token_ids":true`)) {
			chunks = withIDs
		}
		for _, chunk := range append(slices.Clip(chunks), append(usage, end...)) {
			_, _ = w.Write(chunk)
			w.(http.Flusher).Flush()
		}
		if usage != nil {
			return
		}
		b.Note(body)
	})
	mux.HandleFunc("GET /peers_blocks", func(w http.ResponseWriter, _ *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.behind > 0 {
			http.Error(w, "prompts are not published yet", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "[%d]", len(b.blocks))
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"peers","max_model_len":8192}]}`)
	})
	mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		source := eventstest.SourceOf(b.publisher)
		fmt.Fprintf(w, `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, source.Endpoint,
			source.Replay)
	})
	mux.HandleFunc("POST /tokenize", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		out, err := b.model.Tokenize(body)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		_, _ = w.Write(out)
	})
	for _, path := range []string{"GET /health", "GET /metrics", "GET /version"} {
		mux.HandleFunc(path, func(http.ResponseWriter, *http.Request) {})
	}
	return mux
}

// Note has a prompt cached that is new.
func (b *Backend) Note(body []byte) {
	key := xxh3.Hash(body)
	b.mu.Lock()
	known := b.seen[key]
	b.seen[key] = true
	if !known {
		b.behind++
	}
	b.mu.Unlock()
	if !known {
		b.prompts <- body
	}
}

// chain returns a prompt's length in tokens and its blocks.
func (b *Backend) chain(body []byte) (tokens []uint32, chain []uint64, err error) {
	tokens, err = tokenstest.Chat(b.model, body)
	return tokens, kv.SequenceHashes(nil, kv.HashBlocks(nil, tokens, blockSize, "", "")), err
}

// truth returns a prompt's length and how much of it an engine would find cached
// now, in tokens. An engine always computes the last token.
func (b *Backend) truth(body []byte) (length, cached int, err error) {
	tokens, chain, err := b.chain(body)
	if err != nil {
		return 0, 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for cached < len(chain) && b.blocks[chain[cached]] {
		cached++
	}
	return len(tokens), min(cached, (len(tokens)-1)/blockSize) * blockSize, nil
}

// Publish publishes the blocks of new prompts, as an engine does after it has
// computed them.
func (b *Backend) Publish() {
	for body := range b.prompts {
		if event, err := b.store(body); err != nil {
			fmt.Fprintln(os.Stderr, err)
		} else if event != nil {
			b.send(event)
		}
		b.mu.Lock()
		b.behind--
		b.mu.Unlock()
	}
}

// store caches a prompt and returns its event; nil: all of it
// was cached.
func (b *Backend) store(body []byte) (testkit.Event, error) {
	tokens, chain, err := b.chain(body)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.blocks)+len(chain) > b.limit {
		clear(b.blocks)
		clear(b.seen)
		b.send(testkit.Event{"cleared": true})
	}
	first := slices.IndexFunc(chain, func(h uint64) bool { return !b.blocks[h] })
	if first < 0 {
		return nil, nil
	}
	for _, h := range chain[first:] {
		b.blocks[h] = true
	}
	event := testkit.Event{"stored": chain[first:], "tokens": tokens[first*blockSize : len(chain)*blockSize], "block_size": blockSize}
	if first > 0 {
		event["parent"] = chain[first-1]
	}
	return event, nil
}

// Close ends Publish. No request may follow.
func (b *Backend) Close() { close(b.prompts) }

func (b *Backend) send(e testkit.Event) {
	payload, err := msgpack.Marshal([]any{float64(time.Now().UnixNano()) / 1e9, []any{e.Wire()}, 0})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	b.publisher.Payload(false, payload)
}

// EnglishWords are the tokenizer's own words, which are common English ones, by
// falling frequency.
func EnglishWords(m *tokens.Model) []string {
	var words []string
	for _, name := range m.Vocabulary() {
		word, starts := strings.CutPrefix(name, "Ġ")
		if starts && len(word) > 1 && strings.Trim(word, "abcdefghijklmnopqrstuvwxyz") == "" {
			words = append(words, word)
		}
	}
	return words
}

// Prose returns n words as prose has them: few are frequent, one in 25 is
// made up, and there are sentences and paragraphs.
func Prose(r *rand.Rand, words []string, n int) string {
	var b strings.Builder
	for i := range n {
		switch {
		case i%90 == 89:
			b.WriteString(".\n\n")
		case i%12 == 11:
			b.WriteString(", ")
		case i > 0:
			b.WriteByte(' ')
		}
		x := r.Float64()
		word := words[int(x*x*x*float64(len(words)))]
		if r.IntN(25) == 0 {
			word = words[r.IntN(len(words))] + words[r.IntN(len(words))]
		}
		b.WriteString(word)
	}
	return b.String()
}

// ChatBody is a streamed chat request with the given contents in turn.
func ChatBody(contents ...string) []byte {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	messages := []message{{"system", "You are a helpful assistant."}}
	for i, c := range contents {
		messages = append(messages, message{[]string{"user", "assistant"}[i%2], c})
	}
	body, _ := json.Marshal(map[string]any{"model": "m", "messages": messages, "stream": true, "max_tokens": 32})
	return body
}
