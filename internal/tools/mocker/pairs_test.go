package mocker

import (
	"fmt"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// prefillParams asks a prefill worker to keep a prompt, in vLLM's protocol.
const prefillParams = `{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`

// vllmPair starts a prefill worker and so many decode workers of vLLM's API, which
// hand prompts over by the protocol of a kind.
func vllmPair(t *testing.T, kind kv.Kind, decodes int, tweak func(*Settings)) []*Worker {
	t.Helper()
	return vllmWorkers(t, 1+decodes, func(s *Settings) {
		s.Protocol = kind.String()
		s.Parts[0] = kv.Disagg{Role: kv.RolePrefill, Kind: kind}
		for i := range decodes {
			s.Parts[1+i] = kv.Disagg{Role: kv.RoleDecode, Kind: kind}
		}
		if tweak != nil {
			tweak(s)
		}
	})
}

// idle reports whether the workers have no request, block or transfer in use.
func idle(workers []*Worker) func() bool {
	return func() bool {
		for _, w := range workers {
			if w.Transfers() > 0 || w.Ranks[0].CurrentLoad() != (Load{}) {
				return false
			}
		}
		return true
	}
}

// longChat is the messages of a chat of some 500 tokens of its own.
func longChat(i int) []byte {
	return MustJSON([]map[string]string{{"role": "user", "content": fmt.Sprint("topic ", i, strings.Repeat(fmt.Sprint(" words about ", i), 120))}})
}

// TestMockNIXLWorkersKeepAndFetchPrompts speaks vLLM's protocol to the workers.
func TestMockNIXLWorkersKeepAndFetchPrompts(t *testing.T) {
	pair := vllmPair(t, kv.KindNIXL, 2, func(s *Settings) { s.KVLease = 3 * time.Second })
	prefill := func(i int) (params string, tokens int64) {
		t.Helper()
		status, answer := pair[0].ask(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":1,"kv_transfer_params":%s}`, longChat(i), prefillParams))
		if status != http.StatusOK {
			t.Fatalf("%d: %s", status, answer)
		}
		return gjson.Get(answer, "kv_transfer_params").Raw, gjson.Get(answer, "usage.prompt_tokens").Int()
	}
	decode := func(worker, i int, params string) (cached int64) {
		t.Helper()
		status, answer := pair[worker].ask(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":5,"kv_transfer_params":%s}`, longChat(i), params))
		if status != http.StatusOK || gjson.Get(answer, "usage.completion_tokens").Int() != 5 {
			t.Fatalf("%d: %s", status, answer)
		}
		return gjson.Get(answer, "usage.prompt_tokens_details.cached_tokens").Int()
	}
	usage := func() float64 { return pair[0].Ranks[0].CurrentLoad().Usage }

	params, tokens := prefill(1)
	for _, name := range []string{"remote_engine_id", "remote_request_id", "remote_host", "remote_port", "tp_size"} {
		if IsNull(gjson.Get(params, name)) {
			t.Errorf("%s is missing in %s", name, params)
		}
	}
	if blocks := gjson.Get(params, "remote_block_ids.0.#").Int(); blocks != (tokens+63)/64 || !gjson.Get(params, "do_remote_prefill").Bool() {
		t.Errorf("%d blocks of %d tokens in %s", blocks, tokens, params)
	}
	testkit.Eventually(t, 10*time.Second, "the blocks are kept", func() bool { return usage() > 0 })
	if cached := decode(1, 1, params); cached != tokens {
		t.Errorf("%d of %d tokens counted as cached", cached, tokens)
	}
	testkit.Eventually(t, 10*time.Second, "fetched, they are kept no longer", func() bool { return usage() == 0 })
	if cached := decode(2, 1, params); cached != 0 {
		t.Errorf("%d tokens cached though another worker had fetched them", cached)
	}

	params, _ = prefill(2)
	testkit.Eventually(t, 10*time.Second, "the next blocks are kept", func() bool { return usage() > 0 }) // until its load is told, none are known
	testkit.Eventually(t, 10*time.Second, "the lease ends", func() bool { return usage() == 0 })
	if cached := decode(1, 2, params); cached != 0 {
		t.Errorf("%d tokens cached though the lease has ended", cached)
	}
	if cached := decode(1, 3, `{"do_remote_prefill":true}`); cached != 0 {
		t.Errorf("%d tokens cached though nobody said where they are", cached)
	}
}

func TestMockNIXLWorkersFailWhereTold(t *testing.T) {
	pair := vllmPair(t, kv.KindNIXL, 1, func(s *Settings) { s.KVLoadFailure = loadFailureFail })
	const params = `{"do_remote_prefill":true,"remote_block_ids":[[1]],"remote_engine_id":"x","remote_request_id":"x","remote_host":"127.0.0.1","remote_port":1}`
	for _, stream := range []bool{false, true} {
		status, answer := pair[1].ask(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"stream":%v,"kv_transfer_params":%s}`, longChat(1), stream, params))
		if stream && (status != http.StatusOK || !strings.Contains(answer, `data: {"error":`)) || !stream && status != http.StatusInternalServerError {
			t.Errorf("stream %v: %d %s", stream, status, answer)
		}
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", idle(pair))
}

// TestMockSGLangWorkersMeet speaks SGLang's protocol to the workers: neither
// answers alone.
func TestMockSGLangWorkersMeet(t *testing.T) {
	pair := vllmPair(t, kv.KindSGLang, 1, func(s *Settings) { s.BootstrapTimeout = 500 * time.Millisecond })
	port := pair[0].part.Bootstrap.Port
	ask := func(worker, room int, more string) (status int, answer string) {
		return pair[worker].ask(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"max_tokens":5,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":%d%s}`, longChat(room), port, room, more))
	}
	for worker := range 2 {
		if status, answer := ask(worker, 1+worker, ""); status != http.StatusInternalServerError {
			t.Errorf("worker %d answered alone: %d %s", worker, status, answer)
		}
	}
	for first := range 2 { // whoever comes first
		room := 10 + first
		var legs sync.WaitGroup
		legs.Go(func() {
			if status, answer := ask(first, room, ""); status != http.StatusOK {
				t.Errorf("worker %d: %d %s", first, status, answer)
			}
		})
		if status, answer := ask(1-first, room, ""); status != http.StatusOK {
			t.Errorf("worker %d: %d %s", 1-first, status, answer)
		}
		legs.Wait()
	}
	if got := pair[0].Ranks[0].Counts.GenerationTokens.Load(); got != 2 {
		t.Errorf("the prefill worker made %d tokens, want 2", got)
	}
	if _, info := pair[0].ask(t, "/server_info", ""); gjson.Get(info, "disaggregation_mode").Str != "prefill" || gjson.Get(info, "disaggregation_bootstrap_port").Int() != int64(port) {
		t.Errorf("server_info: %s", info)
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", idle(pair))
}

// TestMockPromptsOfOneNameStayApart: both attempts at a request have its id, and
// a client may use a room twice.
func TestMockPromptsOfOneNameStayApart(t *testing.T) {
	t.Run("nixl", func(t *testing.T) {
		pair := vllmPair(t, kv.KindNIXL, 1, func(s *Settings) { s.KVLease = 200 * time.Millisecond })
		names := map[string]bool{}
		for range 3 {
			_, answer := pair[0].ask(t, testkit.ChatPath, fmt.Sprintf(`{"messages":%s,"max_tokens":1,"kv_transfer_params":%s}`, longChat(1), prefillParams), web.HeaderRequest, "the-same")
			names[gjson.Get(answer, "kv_transfer_params.remote_request_id").Str] = true
		}
		if len(names) != 3 {
			t.Errorf("3 prompts are kept as %v", names)
		}
		testkit.Eventually(t, 10*time.Second, "nothing is in flight", idle(pair))
	})
	t.Run("sglang", func(t *testing.T) {
		pair := vllmPair(t, kv.KindSGLang, 1, func(s *Settings) { s.BootstrapTimeout = 5 * time.Second })
		ask := func(worker int) {
			body := fmt.Sprintf(`{"messages":%s,"max_tokens":5,"bootstrap_host":"127.0.0.1","bootstrap_port":%d,"bootstrap_room":7}`, longChat(1), pair[0].part.Bootstrap.Port)
			if status, answer := pair[worker].ask(t, testkit.ChatPath, body); status != http.StatusOK {
				t.Errorf("worker %d: %d %s", worker, status, answer)
			}
		}
		ended := make(chan bool, 2)
		for range cap(ended) {
			go func() {
				ask(0)
				ended <- true
			}()
		}
		<-ended // the one without a room; a decode leg before it would leave the room free for both
		ask(1)
		<-ended
		testkit.Eventually(t, 10*time.Second, "nothing is in flight", idle(pair))
	})
}

func TestMockSGLangWorkersAbortByName(t *testing.T) {
	pair := vllmPair(t, kv.KindSGLang, 1, nil)
	ended := make(chan int, 1)
	go func() {
		status, _ := pair[0].ask(t, "/v1/chat/completions", fmt.Sprintf(`{"messages":%s,"rid":"abc-1","bootstrap_host":"127.0.0.1","bootstrap_room":1}`, longChat(1)))
		ended <- status
	}()
	w := pair[0]
	testkit.Eventually(t, 10*time.Second, "it waits", func() bool { return w.Running() == 1 })
	pair[0].ask(t, "/abort_request", `{"rid":"abc"}`)
	select {
	case status := <-ended:
		if status != http.StatusInternalServerError {
			t.Errorf("status %d", status)
		}
	case <-time.After(10 * time.Second):
		t.Error("it was not aborted")
	}
	testkit.Eventually(t, 10*time.Second, "nothing is in flight", idle(pair))
}

// Running returns the number of requests that /abort_request can name.
func (w *Worker) Running() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.running)
}
