package peers

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

	"kvrouter/internal/base/web"
	"kvrouter/test"
)

func TestMain(m *testing.M) { test.Main(m) }

// TestPeersBackends is a part of scripts/peers.sh proxy: engines that answer at
// once and publish KV events, on the ports in $KVROUTER_PEERS_BACKENDS, until
// stdin ends. A full cache is emptied at once.
func TestPeersBackends(t *testing.T) {
	ports := os.Getenv("KVROUTER_PEERS_BACKENDS")
	if ports == "" {
		t.Skip("run scripts/peers.sh proxy")
	}
	model := test.OpenModel(t)
	var running sync.WaitGroup
	defer running.Wait()
	for id, port := range strings.Split(ports, ",") {
		b := NewBackend(t, strconv.Itoa(id), model, Blocks)
		server := &http.Server{Addr: "127.0.0.1:" + port, Handler: b.Handler()}
		running.Go(b.Publish)
		running.Go(func() {
			if err := server.ListenAndServe(); err != http.ErrServerClosed {
				fmt.Fprintln(os.Stderr, err)
			}
		})
		defer func() {
			ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
			defer cancel()
			if err := server.Shutdown(ctx); err != nil {
				t.Fatal(err)
			}
			b.Close() // no request is left that could follow
		}()
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
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
	words := EnglishWords(test.OpenModel(t))
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
				bodies[i] = ChatBody(Prose(r, words, 1500))
			} else {
				bodies[i] = bodies[i%64]
			}
		}
	case "cold":
		r := rand.New(rand.NewPCG(2, load.Seed))
		for i := range bodies {
			bodies[i] = ChatBody(Prose(r, words, 1500))
		}
	case "shared": // 1,400 words in common, 100 of one's own
		prefix := Prose(rand.New(rand.NewPCG(3, 3)), words, 1400)
		r := rand.New(rand.NewPCG(3, load.Seed))
		for i := range bodies {
			bodies[i] = ChatBody(prefix, "I see.", Prose(r, words, 100))
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
