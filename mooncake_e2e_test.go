package main

import (
	"context"
	"fmt"
	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/vllm"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
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
	ports := testkit.FreePorts(t, 11)
	workers := startMooncakeWorkers(t, folder, ports+2)
	started := time.Now()
	kill := workers.start(prefill)
	workers.start(decode)
	s := &pairSite{startProgram(t, ports, nil, "--engine=none", "--model="+workers.cfg.Model,
		fmt.Sprintf("--worker=url=%s,id=0,role=prefill,kind=mooncake,bootstrap=127.0.0.1:%d", workers.cfg.workerPorts().URL(prefill), workers.bootstrap),
		fmt.Sprintf("--worker=url=%s,id=1,role=decode,kind=mooncake", workers.cfg.workerPorts().URL(decode)))}
	s.waitReady(2, limit)
	t.Logf("both workers ready after %.0f s", time.Since(started).Seconds())
	random := rand.New(rand.NewPCG(8, 8))
	shared := func(result string) float64 { return s.shared(kv.KindMooncake, result) }

	// The first of an incarnation also introduces the workers to each other.
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the first chat: %+v", a)
	}

	// Four clients, whose prompts begin with two blocks or more of their own.
	const chats, clients, shortest = 100, 4, 280
	fetched := func() float64 {
		return s.engine(decode, fmt.Sprintf(`vllm:prompt_tokens_by_source_total{engine="0",model_name=%q,source="external_kv_transfer"}`, workers.cfg.ServedModelName))
	}
	reused := func() float64 { return s.engine(prefill, "vllm:prefix_cache_hits_total") }
	exact := func() float64 { return sumOf(s.get(s.openAI+"/metrics"), `kvrouter_predictions_total{result="exact"}`) }
	fetchedBefore, reusedBefore, exactBefore, first := fetched(), reused(), exact(), shared(proxy.SharedOK)
	began, tokens := time.Now(), 0
	for _, a := range s.traffic(chats, clients, 16, func(random *rand.Rand) func() []map[string]string {
		own := words(random, 140)
		return func() []map[string]string { return question(own + " " + words(random, shortest)) }
	}) {
		if !strings.Contains(a.text, "Paris") {
			t.Errorf("a wrong answer: %+v", a)
		}
		tokens += a.prompt
	}
	took := time.Since(began)
	testkit.Eventually(t, 10*time.Second, "all chats counted as shared", func() bool { return shared(proxy.SharedOK)-first == chats })
	testkit.Eventually(t, 20*time.Second, "the prompts in the engines' own counts", func() bool {
		return fetched()-fetchedBefore >= chats*shortest && reused()-reusedBefore >= (chats-clients)*2*64
	})
	t.Logf("%d chats in %.1f s: of %d prompt tokens the prefill worker had %v and the decode worker fetched %v; %v overlaps predicted exactly", chats, took.Seconds(),
		tokens, reused()-reusedBefore, fetched()-fetchedBefore, exact()-exactBefore)
	s.nothingHeld()

	// An answer that its first token ends: the prefill worker must not end there, or
	// it would keep nothing.
	for _, stream := range []bool{false, true} {
		const endOfText = 2 // of SmolLM2: <|im_end|>
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":%s}],"max_tokens":8,"stream":%v,"logit_bias":{"%d":100}}`, proxy.Quoted(words(random, 300)), stream, endOfText)
		first, began := shared(proxy.SharedOK), time.Now()
		status, answer := post(t, s.openAI+testkit.ChatPath, body)
		if status != http.StatusOK || !strings.Contains(string(answer), `"finish_reason":"stop"`) || strings.Contains(string(answer), `"error":`) {
			t.Errorf("an answer of no token, streamed %v: %d %s", stream, status, answer)
		}
		testkit.Eventually(t, 10*time.Second, "an answer of no token counted as shared", func() bool { return shared(proxy.SharedOK) == first+1 })
		t.Logf("an answer of no token, streamed %v: after %.2f s", stream, time.Since(began).Seconds())
	}
	s.nothingHeld()

	// Clients that leave while their prompts are computed leave nothing behind.
	const leaving = 20
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	var left sync.WaitGroup
	abandoned := shared(proxy.SharedAbandoned)
	for range leaving {
		text := words(random, 1500)
		left.Go(func() {
			if a, err := s.chat(ctx, []map[string]string{message("user", text)}, true, 200); err == nil {
				t.Errorf("a client that was to leave was answered: %+v", a)
			}
		})
	}
	testkit.Eventually(t, time.Minute, "the prefill worker at work and most of them with it", func() bool {
		running, waiting := s.engine(prefill, "vllm:num_requests_running"), s.engine(prefill, "vllm:num_requests_waiting")
		return running > 0 && running+waiting > leaving/2
	})
	leave()
	left.Wait()
	testkit.Eventually(t, 10*time.Second, "the clients seen to have left", func() bool { return shared(proxy.SharedAbandoned)-abandoned == leaving })
	s.nothingHeld()

	// Without the prefill worker the decode worker does all of it.
	kill()
	began = time.Now()
	if a := s.send(question(words(random, 280)), true, 16); a.prefill != "" || !strings.Contains(a.text, "Paris") {
		t.Errorf("the chat after the kill: %+v", a)
	}
	t.Logf("the chat after the kill: %.2f s", time.Since(began).Seconds())
	testkit.Eventually(t, time.Minute, "the prefill worker seen dead", func() bool { return s.workers()[prefill].Lifecycle != "schedulable" })

	// It comes back to the same ports, and the decode worker fetches from it again.
	began = time.Now()
	workers.start(prefill)
	s.waitReady(2, limit)
	t.Logf("ready again after %.0f s", time.Since(began).Seconds())
	for _, stream := range []bool{false, true} {
		if a := s.send(question(words(random, 280)), stream, 16); a.prefill != "0" || !strings.Contains(a.text, "Paris") {
			t.Errorf("a chat after the restart: %+v", a)
		}
	}
	s.nothingHeld()
}

// mooncakeWorkers starts a prefill and a decode worker as the router starts its
// own, with MooncakeConnector in place of NIXL.
type mooncakeWorkers struct {
	t         *testing.T
	cfg       Config
	bootstrap int // port of the prefill worker's bootstrap server
	environ   []string
}

// startMooncakeWorkers prepares them; they take nine ports from the given one
// on.
func startMooncakeWorkers(t *testing.T, folder string, port int) *mooncakeWorkers {
	t.Helper()
	cfg, _, err := ParseConfig([]string{"--num-workers=2", fmt.Sprintf("--base-worker-port=%d", port), fmt.Sprintf("--base-kv-events-port=%d", port+2),
		fmt.Sprintf("--base-kv-replay-port=%d", port+4), fmt.Sprintf("--base-metrics-port=%d", port+6)})
	if err != nil {
		t.Fatal(err)
	}
	plugin, err := filepath.Abs("testdata/mooncake")
	if err != nil {
		t.Fatal(err)
	}
	return &mooncakeWorkers{t, cfg, port + 8, append(os.Environ(), "PYTHONPATH="+folder+":"+plugin, "PYTHONDONTWRITEBYTECODE=1",
		"VLLM_HOST_IP=127.0.0.1", fmt.Sprintf("VLLM_MOONCAKE_BOOTSTRAP_PORT=%d", port+8))}
}

// start starts worker i. kill kills it with all of its processes, as the end of
// the test does.
func (m *mooncakeWorkers) start(i int) (kill func()) {
	m.t.Helper()
	plugins, err := filepath.Abs("internal/vllm/plugin")
	if err != nil {
		m.t.Fatal(err)
	}
	spec, err := vllm.Command(m.cfg.vllmSettings(), i, plugins, m.environ)
	if err != nil {
		m.t.Fatal(err)
	}
	spec.Argv = append(spec.Argv, "--kv-transfer-config", fmt.Sprintf(
		`{"kv_connector":"MooncakeConnector","kv_role":%q,"kv_load_failure_policy":"recompute","kv_connector_extra_config":{"mooncake_protocol":"tcp"}}`,
		[]string{prefill: "kv_producer", decode: "kv_consumer"}[i]))
	log, pid, ended := &testkit.LogBuffer{}, make(chan int, 1), make(chan error, 1)
	go func() {
		ended <- vllm.RunProcess(spec, func(id int) { pid <- id }, func(_, text string) { fmt.Fprintln(log, text) })
	}()
	var group int
	select {
	case group = <-pid:
	case err := <-ended:
		m.t.Fatal(err)
	}
	kill = sync.OnceFunc(func() {
		if err := vllm.SignalGroup(group, syscall.SIGKILL); err != nil {
			m.t.Error(err)
		}
		<-ended
	})
	m.t.Cleanup(func() {
		kill()
		if m.t.Failed() {
			m.t.Logf("end of worker %d's log:\n%s", i, log.End())
		}
	})
	return kill
}
