package fleet

import (
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"strconv"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// The workers, in the order of the command line.
const (
	stock     = iota // vLLM as it is
	published        // vLLM with KV events
	pages            // SGLang with KV events
	llama            // llama-cpp-python
	servers
)

// portsEach is the number of ports of a server.
const portsEach = 4

// TestFleet attaches four servers by their URLs alone, and compares what is predicted for the
// turns of conversations with what each server finds. Then the vLLM server without KV events
// is started with those that the router advises. KVROUTER_FLEET is the folder of llama-cpp-python.
func TestFleet(t *testing.T) {
	folder := os.Getenv("KVROUTER_FLEET")
	if folder == "" {
		t.Skip("make test-fleet runs it")
	}
	ports := testkit.FreePorts(t, servers*portsEach)
	at := func(worker int) int { return ports + worker*portsEach }
	fleet := []*server{
		stock:     startVLLM(t, at(stock)),
		published: startVLLM(t, at(published), append(advised(t, probe.EventFlags(kv.EngineVLLM, 0), at(published)), "--enable-prompt-tokens-details")...),
		pages:     startSGLang(t, at(pages)),
		llama:     startLlama(t, folder, at(llama)),
	}
	var urls []string
	for _, s := range fleet {
		s.wait(t)
		urls = append(urls, s.url)
	}
	r := test.Start(t, urls...)
	r.WaitReady(servers, time.Minute)

	const vllmBlock = 128 // on a CPU
	wants := []workers.CacheState{
		stock:     {Known: kv.Approximate, BlockSize: vllmBlock, Reason: "no KV events of it are followed"},
		published: {Known: kv.Exact, BlockSize: vllmBlock},
		pages:     {Known: kv.Exact, BlockSize: 1},
		llama:     {Known: kv.Approximate, BlockSize: 64, Reason: "no KV events of it are followed"},
	}
	for worker, want := range wants {
		got := r.Workers()[worker].Cache
		t.Logf("worker %d: %+v", worker, got)
		if got.Known != want.Known || got.BlockSize != want.BlockSize || got.Reason != want.Reason ||
			(got.Remedy == "") != (want.Known == kv.Exact) {
			t.Errorf("the cache of worker %d is known as %+v, want %+v", worker, got, want)
		}
	}

	counted := []cached{stock: byCounters(t, fleet[stock]), published: byUsage, pages: byUsage, llama: byLog(fleet[llama])}
	for worker, count := range counted {
		converse(t, r, worker, count).check(t, wants[worker])
	}

	remedy := r.Workers()[stock].Cache.Remedy
	killed := time.Now()
	fleet[stock].kill()
	again := startVLLM(t, at(stock), advised(t, remedy, at(stock))...)
	again.wait(t)
	serves := time.Now()
	testkit.Eventually(t, time.Minute, "the restarted worker is exact", func() bool { return r.Workers()[stock].Cache.Known == kv.Exact })
	t.Logf("restarted with events: serves after %.1f s, exact %.1f s later", serves.Sub(killed).Seconds(), time.Since(serves).Seconds())
	r.WaitReady(servers, time.Minute)
	converse(t, r, stock, byCounters(t, again)).check(t, wants[published])
}

// advised returns the arguments that a remedy names, with the ports after port.
func advised(t *testing.T, remedy string, port int) (args []string) {
	t.Helper()
	for _, match := range regexp.MustCompile(`(--[a-z-]+) '([^']*)'`).FindAllStringSubmatch(remedy, -1) {
		args = append(args, match[1], match[2])
	}
	if len(args) == 0 {
		t.Fatalf("%q names no arguments", remedy)
	}
	sockets := regexp.MustCompile(`tcp://\*:\d+`)
	for i := range args {
		args[i] = sockets.ReplaceAllStringFunc(args[i], func(string) string {
			port++
			return fmt.Sprintf("tcp://*:%d", port)
		})
	}
	return args
}

// turn is what one prompt came to, in tokens.
type turn struct{ prompt, predicted, cached int }

// turns are those of a worker, in order.
type turns struct {
	worker int
	all    []turn
}

// answerTokens bounds the tokens of an answer.
const answerTokens = 8

// converse holds two conversations with a worker that begin alike.
func converse(t *testing.T, r *test.Router, worker int, count cached) (got turns) {
	t.Helper()
	random := rand.New(rand.NewPCG(5, 5))
	system := test.Message("system", test.Words(random, 250))
	got.worker = worker
	for range 2 {
		chat := []map[string]string{system}
		for range 5 {
			chat = append(chat, test.Message("user", test.Words(random, 60)))
			a, err := r.Chat(t.Context(), chat, false, answerTokens, hints.HeaderPinnedWorker, strconv.Itoa(worker))
			if err != nil || !a.Finished || a.Worker != uint64(worker) {
				t.Fatalf("worker %d: %+v, %v", worker, a, err)
			}
			got.all = append(got.all, turn{a.Prompt, a.Predicted, count(t, a)})
			chat = append(chat, test.Message("assistant", a.Text))
			r.Calm(300 * time.Millisecond)
		}
	}
	return got
}

// check demands that predictions are as good as is known of the worker's cache: equal to what
// was found, or too low by less than the answer before and a block, as nothing was evicted.
func (s turns) check(t *testing.T, state workers.CacheState) {
	t.Helper()
	equal, found := 0, 0
	for _, one := range s.all {
		less := one.cached - one.predicted
		if less == 0 {
			equal++
		} else if state.Known == kv.Exact || less < 0 || less >= state.BlockSize+answerTokens {
			t.Errorf("worker %d, %s: %d tokens predicted, %d cached of %d", s.worker, state.Known, one.predicted, one.cached, one.prompt)
		}
		if one.cached > 0 {
			found++
		}
	}
	t.Logf("worker %d, %s: %d of %d predictions equal; prompt, predicted, cached tokens: %v", s.worker, state.Known, equal, len(s.all), s.all)
	if found < len(s.all)-1 {
		t.Errorf("worker %d: %d of %d prompts found anything cached: the test shows little", s.worker, found, len(s.all))
	}
}
