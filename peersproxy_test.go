package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/zeebo/xxh3"
)

// peersBlock is the block size of the backends in tokens, and peersBlocks how
// many each of them caches.
const (
	peersBlock  = 64
	peersBlocks = 32 << 10
)

// TestPeersBackends is a part of scripts/peers_proxy.sh: engines that answer at
// once and publish KV events, on the ports in $KVROUTER_PEERS_BACKENDS, until
// stdin ends. A full cache is emptied at once.
func TestPeersBackends(t *testing.T) {
	ports := os.Getenv("KVROUTER_PEERS_BACKENDS")
	if ports == "" {
		t.Skip("run scripts/peers_proxy.sh")
	}
	model := testModel(t)
	for _, port := range strings.Split(ports, ",") {
		b := &peersBackend{model: model, publisher: newFakePublisher(t), seen: map[uint64]bool{}, prompts: make(chan []byte, 1<<16)}
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
	model     *Model
	publisher *fakePublisher
	prompts   chan []byte

	mu   sync.Mutex      // guards seen
	seen map[uint64]bool // prompts and blocks that are cached, by hash
}

func (b *peersBackend) handler() http.Handler {
	var answer [][]byte
	for i := range 32 {
		answer = append(answer, fmt.Appendf(nil, `data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"m","choices":[{"index":0,"delta":{"content":" word%d"},"logprobs":null,"finish_reason":null}]}`+"\n\n", i))
	}
	answer = append(answer, []byte("data: [DONE]\n\n"))
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, chunk := range answer {
			_, _ = w.Write(chunk)
			w.(http.Flusher).Flush()
		}
		key := xxh3.Hash(body)
		b.mu.Lock()
		known := b.seen[key]
		b.seen[key] = true
		b.mu.Unlock()
		if !known {
			b.prompts <- body
		}
	})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, `{"object":"list","data":[{"id":"m","object":"model","owned_by":"peers","max_model_len":8192}]}`)
	})
	mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		source := b.publisher.source()
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

// publish tells of the blocks of new prompts, as an engine does after it has
// computed them.
func (b *peersBackend) publish() {
	cached := 0 // blocks of the prompts since the cache was empty
	for body := range b.prompts {
		tokens, err := b.model.ChatTokens(body)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			continue
		}
		chain := SequenceHashes(nil, HashBlocks(nil, tokens, peersBlock, "", ""))
		if cached += len(chain); cached > peersBlocks {
			cached = len(chain)
			b.mu.Lock()
			clear(b.seen)
			b.mu.Unlock()
			b.send(testEvent{"cleared": true})
		}
		first := slices.IndexFunc(chain, func(h uint64) bool { return !b.cache(h) })
		if first < 0 {
			continue
		}
		for _, h := range chain[first+1:] {
			b.cache(h)
		}
		e := testEvent{"stored": chain[first:], "tokens": tokens[first*peersBlock : len(chain)*peersBlock], "block_size": peersBlock}
		if first > 0 {
			e["parent"] = chain[first-1]
		}
		b.send(e)
	}
}

func (b *peersBackend) send(e testEvent) {
	payload, err := msgpack.Marshal([]any{float64(time.Now().UnixNano()) / 1e9, []any{e.wire()}, 0})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return
	}
	b.publisher.payload(false, payload)
}

// cache tells whether a block is cached, and caches it.
func (b *peersBackend) cache(block uint64) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	known := b.seen[block]
	b.seen[block] = true
	return known
}

// peersLoad is what TestPeersLoad is to do.
type peersLoad struct {
	URLs        []string // used in turn
	Corpus      string   // hot, cold or shared
	Concurrency int
	Requests    int
	Warm        int    // requests before the measured ones
	Seed        uint64 // of a corpus whose prompts must be new
}

// TestPeersLoad is a part of scripts/peers_proxy.sh: it reads a peersLoad a line
// from stdin, sends it, and writes a line with what it measured. Between the
// warm-up and the measured requests it writes "ready" and waits for a line.
func TestPeersLoad(t *testing.T) {
	if os.Getenv("KVROUTER_PEERS_LOAD") == "" {
		t.Skip("run scripts/peers_proxy.sh")
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
		sendPeersLoad(client, load, bodies[:load.Warm])
		fmt.Println("ready")
		var start struct{}
		if in.Decode(&start) != nil {
			return
		}
		began := time.Now()
		firsts, failed := sendPeersLoad(client, load, bodies[load.Warm:])
		took := time.Since(began)
		slices.Sort(firsts)
		if len(firsts) == 0 {
			firsts = []time.Duration{0}
		}
		fmt.Printf(`{"ttft_ms":%.4f,"ttft_p99_ms":%.4f,"failed":%d,"seconds":%.3f}`+"\n", ms(firsts[len(firsts)/2]), ms(firsts[len(firsts)*99/100]), failed, took.Seconds())
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
				first, err := sendPeersRequest(client, load.URLs[i%len(load.URLs)], bodies[i])
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

func sendPeersRequest(client *http.Client, url string, body []byte) (first time.Duration, err error) {
	request, err := http.NewRequestWithContext(context.Background(), http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	request.Header.Set("Content-Type", "application/json")
	began := time.Now()
	response, err := client.Do(request)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	var one [512]byte
	n, err := response.Body.Read(one[:])
	first = time.Since(began)
	if n == 0 {
		return 0, err
	}
	rest, err := io.ReadAll(response.Body)
	if err == nil && (response.StatusCode != http.StatusOK || !bytes.HasSuffix(rest, []byte("data: [DONE]\n\n"))) {
		err = fmt.Errorf("answered %s without an end", response.Status)
	}
	return first, err
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
