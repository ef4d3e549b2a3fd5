package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/eventstest"
	"kvrouter/internal/tokens"
	"kvrouter/internal/web"
)

// peersBlock is the block size of the backends in tokens, and peersBlocks how
// many each of them caches.
const (
	peersBlock  = 64
	peersBlocks = 32 << 10
)

// TestPeersBackends is a part of scripts/peers.sh proxy: engines that answer at
// once and publish KV events, on the ports in $KVROUTER_PEERS_BACKENDS, until
// stdin ends. A full cache is emptied at once.
func TestPeersBackends(t *testing.T) {
	ports := os.Getenv("KVROUTER_PEERS_BACKENDS")
	if ports == "" {
		t.Skip("run scripts/peers.sh proxy")
	}
	model := testModel(t)
	for id, port := range strings.Split(ports, ",") {
		b := newPeersBackend(t, strconv.Itoa(id), model, peersBlocks)
		go b.publish() // ends with the process
		server := &http.Server{Addr: "127.0.0.1:" + port, Handler: b.handler()}
		go func() {
			if err := server.ListenAndServe(); err != http.ErrServerClosed {
				fmt.Fprintln(os.Stderr, err)
			}
		}()
		defer server.Close()
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// peersBackend is one engine of TestPeersBackends.
type peersBackend struct {
	id        string
	model     *tokens.Model
	publisher *testkit.FakePublisher
	prompts   chan []byte // computed, and not yet told of
	limit     int         // blocks that it caches at most

	mu     sync.Mutex      // guards all below
	seen   map[uint64]bool // prompts that are or will be cached, by the hash of their body
	blocks map[uint64]bool // blocks that are cached, by sequence hash
	behind int             // prompts not yet told of
}

func newPeersBackend(t *testing.T, id string, model *tokens.Model, limit int) *peersBackend {
	return &peersBackend{
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

func (b *peersBackend) handler() http.Handler {
	var answer [][]byte
	for i := range 32 {
		answer = append(answer, fmt.Appendf(nil, `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,"finish_reason":null}]}`+"\n\n", i))
	}
	end := []byte("data: [DONE]\n\n")
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
			usage = fmt.Appendf(nil, `data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":32,"prompt_tokens_details":{"cached_tokens":%d}}}`+"\n\n", tokens, cached)
		}
		for _, chunk := range append(slices.Clip(answer), append(usage, end...)) {
			_, _ = w.Write(chunk)
			w.(http.Flusher).Flush()
		}
		if usage != nil {
			return
		}
		b.note(body)
	})
	mux.HandleFunc("GET /peers_blocks", func(w http.ResponseWriter, _ *http.Request) {
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.behind > 0 {
			http.Error(w, "prompts are still to be told of", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintf(w, "[%d]", len(b.blocks))
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"peers","max_model_len":8192}]}`)
	})
	mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		source := eventstest.SourceOf(b.publisher)
		fmt.Fprintf(w, `{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":%q,"replay_endpoint":%q,"topic":"kv"}}`, source.Endpoint, source.Replay)
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

// note has a prompt cached that is new.
func (b *peersBackend) note(body []byte) {
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
func (b *peersBackend) chain(body []byte) (tokens []uint32, chain []uint64, err error) {
	tokens, err = b.model.ChatTokens(body)
	return tokens, kv.SequenceHashes(nil, kv.HashBlocks(nil, tokens, peersBlock, "", "")), err
}

// truth returns a prompt's length and how much of it an engine would find cached
// now, in tokens. An engine always computes the last token.
func (b *peersBackend) truth(body []byte) (length, cached int, err error) {
	tokens, chain, err := b.chain(body)
	if err != nil {
		return 0, 0, err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for cached < len(chain) && b.blocks[chain[cached]] {
		cached++
	}
	return len(tokens), min(cached, (len(tokens)-1)/peersBlock) * peersBlock, nil
}

// publish tells of the blocks of new prompts, as an engine does after it has
// computed them.
func (b *peersBackend) publish() {
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

// store caches a prompt and returns the event that tells of it; nil: all of it
// was cached.
func (b *peersBackend) store(body []byte) (testkit.Event, error) {
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
	event := testkit.Event{"stored": chain[first:], "tokens": tokens[first*peersBlock : len(chain)*peersBlock], "block_size": peersBlock}
	if first > 0 {
		event["parent"] = chain[first-1]
	}
	return event, nil
}

func (b *peersBackend) send(e testkit.Event) {
	payload, err := msgpack.Marshal([]any{float64(time.Now().UnixNano()) / 1e9, []any{e.Wire()}, 0})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	b.publisher.Payload(false, payload)
}

// TestPeersBare is a part of scripts/peers.sh proxy: what the least a proxy in Go
// can do costs. It listens on the first port in $KVROUTER_PEERS_BARE, hands requests
// to those on the others in turn, and ends with stdin.
func TestPeersBare(t *testing.T) {
	ports := strings.Split(os.Getenv("KVROUTER_PEERS_BARE"), ",")
	if len(ports) < 2 {
		t.Skip("run scripts/peers.sh proxy")
	}
	transport := web.NewTransport(nil)
	var turn atomic.Uint64
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		body := make([]byte, r.ContentLength)
		if _, err := io.ReadFull(r.Body, body); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		engine := "http://127.0.0.1:" + ports[1+turn.Add(1)%uint64(len(ports)-1)]
		request, err := http.NewRequestWithContext(r.Context(), r.Method, engine+r.URL.Path, bytes.NewReader(body))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		request.Header = r.Header
		answer, err := transport.RoundTrip(request)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadGateway)
			return
		}
		defer answer.Body.Close()
		maps.Copy(w.Header(), answer.Header)
		w.WriteHeader(answer.StatusCode)
		chunk := make([]byte, 8<<10)
		for err == nil {
			var n int
			n, err = answer.Body.Read(chunk)
			_, _ = w.Write(chunk[:n])
			w.(http.Flusher).Flush()
		}
	})
	server := &http.Server{Addr: "127.0.0.1:" + ports[0], Handler: mux}
	go func() { _ = server.ListenAndServe() }() // ends with Close
	defer server.Close()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// peersLoad is what TestPeersLoad is to do.
type peersLoad struct {
	URLs        []string // used in turn
	Corpus      string   // hot, cold or shared
	Concurrency int
	Requests    int
	Warm        int    // requests before the measured ones
	Seed        uint64 // of a corpus whose prompts must be new
	Check       int    // send so many of its last requests again, asking the engines what they have cached
}

// TestPeersLoad is a part of scripts/peers.sh proxy: it reads a peersLoad a line
// from stdin, sends it, and writes a line with what it measured. Between the
// warm-up and the measured requests it writes {} and waits for a line.
func TestPeersLoad(t *testing.T) {
	if os.Getenv("KVROUTER_PEERS_LOAD") == "" {
		t.Skip("run scripts/peers.sh proxy")
	}
	words := englishWords(testModel(t))
	in := json.NewDecoder(os.Stdin)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	for {
		var load peersLoad
		if in.Decode(&load) != nil {
			return
		}
		bodies := peersCorpus(load, words)
		if load.Check > 0 {
			wrong, overlap := checkPeersLoad(client, load.URLs[0], bodies[len(bodies)-load.Check:])
			list, _ := json.Marshal(wrong)
			fmt.Printf(`{"wrong":%s,"overlap":%d}`+"\n", list, overlap)
			continue
		}
		sendPeersLoad(client, load, bodies[:load.Warm])
		fmt.Println("{}")
		var start struct{}
		if in.Decode(&start) != nil {
			return
		}
		firsts, failed := sendPeersLoad(client, load, bodies[load.Warm:])
		slices.Sort(firsts)
		if len(firsts) == 0 {
			firsts = []time.Duration{0}
		}
		fmt.Printf(`{"ttft_ms":%.4f,"failed":%d}`+"\n", float64(firsts[len(firsts)/2])/float64(time.Millisecond), failed)
	}
}

// peersCorpus returns the request bodies of a load: prompts of 1,500 words.
func peersCorpus(load peersLoad, words []string) [][]byte {
	bodies := make([][]byte, load.Warm+load.Requests)
	switch load.Corpus {
	case "hot": // 64 prompts, the same in every run
		r := rand.New(rand.NewPCG(1, 1))
		for i := range bodies {
			if i < 64 {
				bodies[i] = chatBody(proseOf(r, words, 1500))
			} else {
				bodies[i] = bodies[i%64]
			}
		}
	case "cold":
		r := rand.New(rand.NewPCG(2, load.Seed))
		for i := range bodies {
			bodies[i] = chatBody(proseOf(r, words, 1500))
		}
	case "shared": // 1,400 words in common, 100 of one's own
		prefix := proseOf(rand.New(rand.NewPCG(3, 3)), words, 1400)
		r := rand.New(rand.NewPCG(3, load.Seed))
		for i := range bodies {
			bodies[i] = chatBody(prefix, "I see.", proseOf(r, words, 100))
		}
	}
	return bodies
}

// sendPeersLoad sends bodies and returns the times to the first byte of their
// streams.
func sendPeersLoad(client *http.Client, load peersLoad, bodies [][]byte) (firsts []time.Duration, failed int) {
	var mu sync.Mutex // guards next and the results
	next := 0
	var wait sync.WaitGroup
	for range load.Concurrency {
		wait.Go(func() {
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= len(bodies) {
					return
				}
				first, _, err := sendPeersRequest(client, load.URLs[i%len(load.URLs)], bodies[i], "", "")
				mu.Lock()
				if err != nil {
					failed++
				} else {
					firsts = append(firsts, first)
				}
				mu.Unlock()
			}
		})
	}
	wait.Wait()
	return firsts, failed
}

// checkPeersLoad sends bodies in turn and returns what the router's headers have
// wrong about what the engines really hold, and the sum of the overlaps in tokens.
func checkPeersLoad(client *http.Client, url string, bodies [][]byte) (wrong []string, overlap int) {
	wrong = []string{}
	for _, body := range bodies {
		_, header, err := sendPeersRequest(client, url, body, headerPeersCheck, "yes")
		if err != nil {
			wrong = append(wrong, err.Error())
			continue
		}
		worker, said := header.Get(web.HeaderWorker), header.Get(web.HeaderOverlap)
		engine, cached := header.Get(headerPeersEngine), header.Get(headerPeersCached)
		if worker != engine || said != cached || cached == "" {
			wrong = append(wrong, fmt.Sprintf("the router said %q tokens are cached on worker %q, engine %q had %q", said, worker, engine, cached))
		}
		tokens, _ := strconv.Atoi(cached)
		overlap += tokens
	}
	return wrong, overlap
}

// sendPeersRequest sends a streamed request with a header, if one is named, and
// returns the time to the stream's first byte and the answer's headers.
func sendPeersRequest(client *http.Client, url string, body []byte, name, value string) (first time.Duration, header http.Header, err error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	request.Header.Set("Content-Type", "application/json")
	if name != "" {
		request.Header.Set(name, value)
	}
	began := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	var one [512]byte
	n, err := response.Body.Read(one[:])
	first = time.Since(began)
	if n == 0 {
		return 0, nil, err
	}
	rest, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n"))) {
		err = fmt.Errorf("answered %s without an end", response.Status)
	}
	return first, response.Header, err
}
