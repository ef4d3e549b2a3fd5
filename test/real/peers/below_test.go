package peers

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"kvrouter/test"
)

// selected is a cell of Dynamo's: a selection service that chooses among mock workers, and
// a front. The service only chooses, so that the front does what is left: it asks for the
// prompt's tokens, has a worker chosen and reserved, forwards the request to the worker's
// URL, and reports the first byte and the end to the service.
type selected struct {
	t       *testing.T
	workers *test.Workers
	service string // URL
	front   *httptest.Server

	asked  atomic.Uint64     // requests, for ids of reservations
	mu     sync.Mutex        // guards chosen
	chosen map[string]uint64 // worker of the chat that ends with a message
}

const selectedBlock = 64

// startSelected starts a cell of so many workers.
func startSelected(t *testing.T, python string, workers int) *selected {
	t.Helper()
	s := &selected{t: t, workers: test.StartWorkers(t, workers), chosen: map[string]uint64{}}
	s.service = fmt.Sprintf("http://127.0.0.1:%d", testkit.FreePorts(t, 1))
	startPeer(t, s.service+"/health", python, "-m", "dynamo.select_service", "--port", s.service[strings.LastIndex(s.service, ":")+1:])
	for i := range workers {
		post(t, s.service+"/workers", map[string]any{
			"worker_id": i + 1, "model_name": mocker.ModelName, "endpoint": s.workers.URL(i), "block_size": selectedBlock, "max_num_batched_tokens": 8192, "total_kv_blocks": 16384,
			"kv_events_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", s.workers.Settings.Ports.KVEvents+i),
		})
	}
	testkit.Eventually(t, 30*time.Second, "the service is ready", func() bool {
		response, err := http.Get(s.service + "/ready")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	s.front = httptest.NewServer(s)
	t.Cleanup(s.front.Close)
	return s
}

// call sends a request of the front's own, and fails on any answer but a success.
func (s *selected) call(method, url string, query any) (gjson.Result, error) {
	body, err := json.Marshal(query)
	if err != nil {
		return gjson.Result{}, err
	}
	request, err := http.NewRequest(method, url, bytes.NewReader(body))
	if err != nil {
		return gjson.Result{}, err
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return gjson.Result{}, err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err == nil && response.StatusCode >= 300 {
		err = fmt.Errorf("%s %s: %s: %.300s", method, url, response.Status, text)
	}
	return gjson.ParseBytes(text), err
}

// ServeHTTP is the front.
func (s *selected) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	target, end := s.workers.URL(0), func() {}
	first := func() {}
	if r.Method == http.MethodPost && strings.HasSuffix(r.URL.Path, "completions") {
		if target, first, end, err = s.choose(body); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
	}
	defer end()
	request, err := http.NewRequestWithContext(r.Context(), r.Method, target+r.URL.Path, bytes.NewReader(body))
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	request.Header = r.Header.Clone()
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer response.Body.Close()
	for name, values := range response.Header {
		w.Header()[name] = values
	}
	w.WriteHeader(response.StatusCode)
	for piece := make([]byte, 32<<10); ; {
		n, err := response.Body.Read(piece)
		if n > 0 {
			first()
			if _, err := w.Write(piece[:n]); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
		}
		if err != nil {
			return
		}
	}
}

// lastMessage returns the text of a chat's last message.
func lastMessage(body []byte) string {
	all := gjson.GetBytes(body, "messages.#.content").Array()
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1].String()
}

// choose has the service choose and reserve a worker.
func (s *selected) choose(body []byte) (url string, first, end func(), err error) {
	question := map[string]any{"model": gjson.GetBytes(body, "model").Value()}
	for _, name := range []string{"messages", "prompt"} {
		if v := gjson.GetBytes(body, name); v.Exists() {
			question[name] = v.Value()
		}
	}
	tokens, err := s.call(http.MethodPost, s.workers.URL(0)+"/tokenize", question)
	if err != nil {
		return "", nil, nil, err
	}
	id := fmt.Sprintf("below-%d", s.asked.Add(1))
	chosen, err := s.call(http.MethodPost, s.service+"/select_and_reserve", map[string]any{"model_name": mocker.ModelName, "token_ids": tokens.Get("tokens").Value(), "selection_id": id})
	if err != nil {
		return "", nil, nil, err
	}
	s.mu.Lock()
	s.chosen[lastMessage(body)] = chosen.Get("worker_id").Uint()
	s.mu.Unlock()
	first = sync.OnceFunc(func() {
		if _, err := s.call(http.MethodPost, s.service+"/reservations/"+id+"/prefill_complete", map[string]any{}); err != nil {
			s.t.Error(err)
		}
	})
	end = sync.OnceFunc(func() {
		if _, err := s.call(http.MethodDelete, s.service+"/reservations/"+id, nil); err != nil {
			s.t.Error(err)
		}
	})
	return chosen.Get("endpoint").String(), first, end, nil
}

// held returns the number of requests that the service counts.
func (s *selected) held() (n int64) {
	for _, load := range post(s.t, s.service+"/potential_loads", map[string]any{"model_name": mocker.ModelName, "token_ids": []int{1}}).Array() {
		n += load.Get("active_requests").Int()
	}
	return n
}

// settled waits until the service knows of the blocks of a prompt of so many tokens.
func (s *selected) settled(messages []map[string]string, prompt int) {
	s.t.Helper()
	tokens, err := s.call(http.MethodPost, s.workers.URL(0)+"/tokenize", map[string]any{"model": mocker.ModelName, "messages": messages})
	if err != nil {
		s.t.Fatal(err)
	}
	testkit.Eventually(s.t, 20*time.Second, "the service has the blocks of the last prompt", func() bool {
		best := int64(0)
		for _, row := range post(s.t, s.service+"/overlap_scores", map[string]any{"model_name": mocker.ModelName, "token_ids": tokens.Get("tokens").Value()}).Get("workers").Array() {
			best = max(best, row.Get("device_blocks").Int())
		}
		return best >= int64(prompt/selectedBlock)
	})
}

// TestSelectionServicesBelowAKvrouter puts two cells, each of a Dynamo selection service
// and two workers, below one kvrouter. Conversations stay in their cell and on their
// worker, all load is returned, and a cell that is gone costs no request.
func TestSelectionServicesBelowAKvrouter(t *testing.T) {
	python := os.Getenv("KVROUTER_PEERS_DYNAMO")
	if python == "" {
		t.Skip("run `make test-relay`")
	}
	cells := []*selected{startSelected(t, python, 2), startSelected(t, python, 2)}
	r := test.Start(t, "--engine=none", fmt.Sprintf("--block-size=%d", selectedBlock), "--no-kv-events", "--policy=kv", "--model="+test.BuiltinModel(t), "--served-model-name="+mocker.ModelName,
		"--worker=url="+cells[0].front.URL+",id=0", "--worker=url="+cells[1].front.URL+",id=1")
	r.WaitReady(2, 30*time.Second)
	random := rand.New(rand.NewPCG(1, 1))
	type conversation struct {
		messages []map[string]string
		cell     uint64
		worker   uint64
	}
	var talks []*conversation
	prompt, possible, cached := 0, 0, 0
	say := func(talk *conversation) {
		t.Helper()
		talk.messages = append(talk.messages, test.Message("user", test.Words(random, 300)))
		a, err := r.Chat(t.Context(), talk.messages, true, 8)
		if err != nil || !a.Finished || a.Broken {
			t.Fatalf("%+v, %v", a, err)
		}
		cell := cells[a.Worker]
		cell.mu.Lock()
		worker := cell.chosen[talk.messages[len(talk.messages)-1]["content"]]
		cell.mu.Unlock()
		if len(talk.messages) > 1 {
			if a.Worker != talk.cell || worker != talk.worker {
				t.Errorf("a conversation of worker %d of cell %d goes to worker %d of cell %d", talk.worker, talk.cell, worker, a.Worker)
			}
			possible += prompt / selectedBlock * selectedBlock
			cached += a.Cached
		}
		talk.cell, talk.worker, prompt = a.Worker, worker, a.Prompt
		cell.settled(talk.messages, a.Prompt)
		talk.messages = append(talk.messages, test.Message("assistant", a.Text))
	}
	used := map[[2]uint64]bool{}
	for range 16 { // with fewer, chance leaves workers out
		talk := &conversation{}
		talks = append(talks, talk)
		for range 3 {
			say(talk)
		}
		used[[2]uint64{talk.cell, talk.worker}] = true
	}
	if share := float64(cached) / float64(possible); share < 0.95 {
		t.Errorf("%.0f%% of what later prompts could find was cached, want 95%%", 100*share)
	}
	if len(used) < 3 {
		t.Errorf("%d conversations went to %d workers of 4", len(talks), len(used))
	}

	// Many at once.
	var all sync.WaitGroup
	failures := make(chan error, 32)
	for i := range cap(failures) {
		messages := test.Say(fmt.Sprintf("request %d: %s", i, test.Words(random, 100)))
		all.Go(func() {
			if a, err := r.Chat(t.Context(), messages, true, 16); err != nil || !a.Finished {
				failures <- errors.Join(err, fmt.Errorf("%+v", a))
			}
		})
	}
	all.Wait()
	close(failures)
	for err := range failures {
		t.Error(err)
	}
	for i, cell := range cells {
		testkit.Eventually(t, 10*time.Second, fmt.Sprintf("cell %d has nothing reserved", i), func() bool { return cell.held() == 0 })
	}
	if n := r.InFlight(); n != 0 {
		t.Errorf("%d requests are in flight at the end", n)
	}

	// A cell that is gone.
	cells[0].front.CloseClientConnections()
	cells[0].front.Close()
	for _, talk := range talks {
		talk.messages = append(talk.messages, test.Message("user", "go on"))
		if a, err := r.Chat(t.Context(), talk.messages, true, 8); err != nil || !a.Finished || a.Worker != 1 {
			t.Errorf("after cell 0 is gone: %+v, %v", a, err)
		}
	}
}
