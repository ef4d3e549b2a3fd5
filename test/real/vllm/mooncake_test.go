package vllm

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// TestMooncakeWorkersOnRealVLLM attaches two vLLM workers with MooncakeConnector,
// which hand prompts over by TCP. In the end it kills the one that computes them
// and starts it again. `make test-mooncake` names the folder of Mooncake's
// engine.
func TestMooncakeWorkersOnRealVLLM(t *testing.T) {
	folder := os.Getenv("KVROUTER_MOONCAKE")
	if folder == "" {
		t.Skip("make test-mooncake runs it")
	}
	const limit = 10 * time.Minute // of a worker's start beside other work
	ports := testkit.FreePorts(t, 2)
	workers := newMooncakeWorkers(t, folder)
	started := time.Now()
	kill := workers.start(test.Prefill)
	workers.start(test.Decode)
	s := &test.Pair{Router: test.StartAt(t, test.Program, ports, nil, "--engine=none", "--model="+test.ModelFolder(),
		fmt.Sprintf("--worker=url=%s,id=0,role=prefill,kind=mooncake,bootstrap=127.0.0.1:%d", workers.url(test.Prefill), workers.bootstrap),
		fmt.Sprintf("--worker=url=%s,id=1,role=decode,kind=mooncake", workers.url(test.Decode)))}
	s.WaitReady(2, limit)
	t.Logf("both workers ready after %.0f s", time.Since(started).Seconds())
	random := rand.New(rand.NewPCG(8, 8))
	shared := func(result string) float64 { return s.Shared(kv.KindMooncake, result) }

	// The first of an incarnation also introduces the workers to each other.
	if a := s.Send(test.Question(test.Words(random, 280)), true, 16); a.Prefill != "0" || !strings.Contains(a.Text, "Paris") {
		t.Errorf("the first chat: %+v", a)
	}

	// Four clients, whose prompts begin with two blocks or more of their own.
	const chats, clients, shortest = 100, 4, 280
	fetched := func() float64 {
		return s.Engine(test.Decode, fmt.Sprintf(`vllm:prompt_tokens_by_source_total{engine="0",model_name=%q,source="external_kv_transfer"}`, filepath.Base(test.ModelFolder())))
	}
	reused := func() float64 { return s.Engine(test.Prefill, "vllm:prefix_cache_hits_total") }
	exact := func() float64 {
		return test.SumOf(s.Get(s.OpenAI+"/metrics"), `kvrouter_predictions_total{result="exact"`)
	}
	fetchedBefore, reusedBefore, exactBefore, first := fetched(), reused(), exact(), shared(proxy.SharedOK)
	began, tokens := time.Now(), 0
	for _, a := range s.Traffic(chats, clients, 16, func(random *rand.Rand) func() []map[string]string {
		own := test.Words(random, 140)
		return func() []map[string]string { return test.Question(own + " " + test.Words(random, shortest)) }
	}) {
		if !strings.Contains(a.Text, "Paris") {
			t.Errorf("a wrong answer: %+v", a)
		}
		tokens += a.Prompt
	}
	took := time.Since(began)
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared(proxy.SharedOK)-first == chats })
	testkit.Eventually(t, 20*time.Second, "the prompts in the engines' own counts", func() bool {
		return fetched()-fetchedBefore >= chats*shortest && reused()-reusedBefore >= (chats-clients)*2*64
	})
	t.Logf("%d chats in %.1f s: of %d prompt tokens the prefill worker had %v and the decode worker fetched %v; %v overlaps predicted exactly", chats, took.Seconds(),
		tokens, reused()-reusedBefore, fetched()-fetchedBefore, exact()-exactBefore)
	nothingHeld(s)

	// An answer that its first token ends: the prefill worker must not end there, or
	// it would keep nothing.
	for _, stream := range []bool{false, true} {
		const endOfText = 2 // of SmolLM2: <|im_end|>
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"max_tokens":8,"stream":%v,"logit_bias":{"%d":100}}`, proxy.Quoted(test.Words(random, 300)), stream, endOfText)
		first, began := shared(proxy.SharedOK), time.Now()
		status, answer := test.Post(t, s.OpenAI+testkit.ChatPath, body)
		if status != http.StatusOK || !strings.Contains(string(answer), `"finish_reason":"stop"`) || strings.Contains(string(answer), `"error":`) {
			t.Errorf("an answer of no token, streamed %v: %d %s", stream, status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "an answer of no token counted as shared", func() bool { return shared(proxy.SharedOK) == first+1 })
		t.Logf("an answer of no token, streamed %v: after %.2f s", stream, time.Since(began).Seconds())
	}
	nothingHeld(s)

	// Clients that leave while their prompts are computed leave nothing behind.
	const leaving = 20
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var left sync.WaitGroup
	abandoned := shared(proxy.SharedAbandoned)
	for range leaving {
		text := test.Words(random, 1500)
		left.Go(func() {
			if a, err := s.Chat(ctx, []map[string]string{test.Message("user", text)}, true, 200); err == nil {
				t.Errorf("a client that was to leave was answered: %+v", a)
			}
		})
	}
	testkit.Eventually(t, time.Minute, "the prefill worker at work and most of them with it", func() bool {
		running, waiting := s.Engine(test.Prefill, "vllm:num_requests_running"), s.Engine(test.Prefill, "vllm:num_requests_waiting")
		return running > 0 && running+waiting > leaving/2
	})
	leave()
	left.Wait()
	testkit.Eventually(t, 10*time.Second, "the clients seen to have left", func() bool { return shared(proxy.SharedAbandoned)-abandoned == leaving })
	nothingHeld(s)

	// Without the prefill worker the decode worker does all of it.
	kill()
	began = time.Now()
	if a := s.Send(test.Question(test.Words(random, 280)), true, 16); a.Prefill != "" || !strings.Contains(a.Text, "Paris") {
		t.Errorf("the chat after the kill: %+v", a)
	}
	t.Logf("the chat after the kill: %.2f s", time.Since(began).Seconds())
	testkit.Eventually(t, time.Minute, "the prefill worker seen dead", func() bool { return s.Workers()[test.Prefill].Lifecycle != "schedulable" })

	// It comes back to the same ports, and the decode worker fetches from it again.
	began = time.Now()
	workers.start(test.Prefill)
	s.WaitReady(2, limit)
	t.Logf("ready again after %.0f s", time.Since(began).Seconds())
	for _, stream := range []bool{false, true} {
		if a := s.Send(test.Question(test.Words(random, 280)), stream, 16); a.Prefill != "0" || !strings.Contains(a.Text, "Paris") {
			t.Errorf("a chat after the restart: %+v", a)
		}
	}
	nothingHeld(s)
}

// mooncakeWorkers starts a prefill and a decode worker, each by a router of its own,
// with MooncakeConnector in place of NIXL.
type mooncakeWorkers struct {
	t         *testing.T
	ports     [2]int // of each worker's router, its own port being the third
	bootstrap int    // port of the prefill worker's bootstrap server
	env       []string
}

// newMooncakeWorkers prepares them.
func newMooncakeWorkers(t *testing.T, folder string) *mooncakeWorkers {
	t.Helper()
	plugin, err := filepath.Abs("testdata/mooncake")
	if err != nil {
		t.Fatal(err)
	}
	first := testkit.FreePorts(t, 13)
	return &mooncakeWorkers{t, [2]int{first, first + 6}, first + 12, []string{
		"PYTHONPATH=" + folder + ":" + plugin, "PYTHONDONTWRITEBYTECODE=1", "VLLM_HOST_IP=127.0.0.1", fmt.Sprintf("VLLM_MOONCAKE_BOOTSTRAP_PORT=%d", first+12),
		fmt.Sprintf("OMP_NUM_THREADS=%d", max(1, runtime.NumCPU()/2)), // the two share the machine
	}}
}

func (m *mooncakeWorkers) url(i int) string {
	return fmt.Sprintf("http://127.0.0.1:%d", m.ports[i]+2)
}

// start starts worker i. kill kills it with all of its processes, as the end of the
// test does.
func (m *mooncakeWorkers) start(i int) (kill func()) {
	m.t.Helper()
	port := m.ports[i]
	transfer := fmt.Sprintf(`{"kv_connector":"MooncakeConnector","kv_role":%q,"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"mooncake_protocol":"tcp"}}`,
		[]string{test.Prefill: "kv_producer", test.Decode: "kv_consumer"}[i])
	host := test.StartAt(m.t, test.Program, port, m.env, "--num-workers=1", fmt.Sprintf("--base-worker-port=%d", port+2), fmt.Sprintf("--base-kv-events-port=%d", port+3),
		fmt.Sprintf("--base-kv-replay-port=%d", port+4), fmt.Sprintf("--base-metrics-port=%d", port+5), "--", "--kv-transfer-config", transfer)
	return func() { host.KillFamily(2) }
}
