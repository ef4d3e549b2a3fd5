package test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/tidwall/gjson"
)

func TestMockPredictionsAreExactOneByOne(t *testing.T) {
	t.Parallel()
	variants := [][]string{nil, {"--mock=array-events=true"}, {"--mock=api=sglang"}, {"--mock=api=sglang", "--block-size=16", "--mock=num-gpu-blocks=240"}}
	if dir := filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"); chat.FileExists(dir, "tokenizer.json") {
		variants = append(variants, []string{"--model=" + dir})
	}
	for _, args := range append(variants, []string{"--mock=num-gpu-blocks=60", "--mock=duplicate-events=0.3", "--mock=delay-events=3ms"}) {
		t.Run(strings.ReplaceAll(strings.Join(args, " "), "/", "_"), func(t *testing.T) {
			t.Parallel()
			s := StartMocks(t, 3, append([]string{"--speedup-ratio=100"}, args...)...)
			reused, fromAnswers := 0, 0
			for i := range 12 {
				chat := Say(fmt.Sprint("topic ", i%4, " ", strings.Repeat("lorem ipsum ", 20+5*(i%4))))
				before := 0
				for turn := range 3 {
					a, err := s.Chat(t.Context(), chat, turn%2 == 0, 100)
					if err != nil || !a.Finished {
						t.Fatal(err, a)
					}
					if a.Predicted != a.Cached {
						t.Errorf("chat %d turn %d: predicted %d, the worker had %d of %d", i, turn, a.Predicted, a.Cached, a.Prompt)
					}
					reused += a.Cached
					if before > 0 && a.Cached > before {
						fromAnswers++
					}
					before = a.Prompt
					chat = append(chat, Say("", a.Text, "go on")[1:]...)
					s.Settle()
				}
			}
			if reused == 0 || fromAnswers == 0 {
				t.Errorf("%d tokens reused, %d times some of an answer", reused, fromAnswers)
			}
			testkit.Eventually(t, 20*time.Second, "all bookings freed", func() bool { return s.InFlight() == 0 })
			page := s.Metrics()
			if page[`kvrouter_prompt_source_total{source="local"}`] != 36 || sum(page, "kvrouter_prompt_fallbacks_total")+sum(page, "kvrouter_prompt_tokens_mismatch_total") != 0 {
				t.Errorf("tokens were not computed here: %s", s.Get(s.OpenAI+"/metrics"))
			}
		})
	}
}

func TestWithoutEventsPromptsAreFoundWhereTheyWent(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"--policy=kv"}, {"--mock=data-parallel-size=2", "--policy=work"}, {"--policy=cache-threshold"}} {
		t.Run(strings.Join(args, " "), func(t *testing.T) {
			s := StartMocker(t, 2, append(args, "--no-kv-events", "--mock=num-gpu-blocks=200")...)
			if page := string(s.Get(s.OpenAI + "/metrics")); strings.Contains(page, "\nkvrouter_kv_events_connected{") {
				t.Error("there are event streams")
			}
			for _, w := range s.Workers() {
				if _, sources := testkit.HTTPGet(t, *w.Endpoint+"/kv_event_sources"); strings.TrimSpace(string(sources)) != "{}" {
					t.Errorf("worker %d publishes at %s", w.WorkerID, sources)
				}
			}
			for i := range 3 {
				chat := Say(fmt.Sprint(i, strings.Repeat(" growing prompt", 60)))
				worker := uint64(0)
				for turn := range 4 {
					a, err := s.Chat(t.Context(), chat, turn%2 == 0, 20)
					if err != nil || !a.Finished {
						t.Fatal(err, a)
					}
					if whole := a.Prompt / 64 * 64; turn > 0 && (a.Worker != worker || a.Predicted < 832 || a.Predicted > a.Cached || a.Cached > whole) {
						t.Errorf("chat %d turn %d: worker %d after %d, predicted %d, %d of %d cached", i, turn, a.Worker, worker, a.Predicted, a.Cached, a.Prompt)
					}
					worker = a.Worker
					chat = append(chat, Say("", a.Text, "go on")[1:]...)
				}
			}
		})
	}
}

func TestMockResetEmptiesTheCache(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1)
	chat := Say(strings.Repeat("remember this ", 30))
	for range 2 {
		if _, err := s.Chat(t.Context(), chat, false, 1); err != nil {
			t.Fatal(err)
		}
	}
	s.Settle()
	if _, answer := Post(t, s.URL(0)+"/reset_prefix_cache", ""); string(answer) != `{"success":true}` {
		t.Fatalf("%s", answer)
	}
	// As in vLLM the next step tells it: this one the router cannot know yet.
	a, err := s.Chat(t.Context(), Say("something else"), false, 1)
	if err != nil || a.Cached != 0 {
		t.Error(a, err)
	}
	s.Settle()
	if a, err := s.Chat(t.Context(), chat, false, 1); err != nil || a.Cached != 0 || a.Predicted != 0 {
		t.Error(a, err)
	}

}

func TestMockKeepsAdaptersAndSaltsApart(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--mock=lora=sql,legal", "--policy=kv")
	_, list := testkit.HTTPGet(t, s.OpenAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["legal","mock","sql"]` && got != `["mock","sql","legal"]` {
		t.Errorf("models %s", got)
	}
	text := strings.Repeat("the same words ", 20)
	for _, c := range []struct {
		model, salt string
		want        int
	}{{"mock", "", 0}, {"sql", "", 0}, {"legal", "", 0}, {"sql", "a", 0}, {"sql", "", 256}, {"legal", "", 256}, {"mock", "", 256}, {"sql", "a", 256}, {"sql", "b", 0}, {"mock", "a", 0}, {"mock", "a", 256}} {
		body := map[string]any{"model": c.model, "messages": Say(text), "max_tokens": 1}
		if c.salt != "" {
			body["cache_salt"] = c.salt
		}
		a := s.ask(body)
		if a.Cached != c.want || a.Predicted != a.Cached || a.json().Get("model").Str != c.model {
			t.Errorf("%+v: %d cached, %d predicted: %s", c, a.Cached, a.Predicted, a.Text)
		}
		s.Settle()
	}
}

func TestMockRanksHaveCachesOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--mock=data-parallel-size=2")
	if ranks := s.Ranks(); len(ranks) != 4 {
		t.Fatalf("ranks %v", ranks)
	}
	ranks := map[string]bool{}
	for i := range 12 {
		a := s.ask(map[string]any{"messages": Say(fmt.Sprint(i%6, strings.Repeat(" rank and file", 20))), "max_tokens": 1})
		if a.Predicted != a.Cached || (a.Cached > 0) != (i >= 6) {
			t.Errorf("chat %d: %d cached, %d predicted", i, a.Cached, a.Predicted)
		}
		s.Settle()
	}
	for _, key := range s.Ranks() {
		if s.Blocks(key) > 0 {
			ranks[fmt.Sprint(key)] = true
		}
		if got, held := s.Blocks(key), s.Rank(key); got > 0 && held.Counts.PromptTokens.Load() == 0 {
			t.Errorf("%v has %d blocks in the index and computed nothing", key, got)
		}
	}
	if len(ranks) < 3 {
		t.Errorf("only %v were used", ranks)
	}

	// A worker asked directly goes where the header says.
	before := s.Rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load()
	for header, want := range map[string]int{"1": 200, "2": 400, "-1": 400, "x": 200} {
		request, _ := http.NewRequest(http.MethodPost, s.URL(1)+completionsPath, strings.NewReader(`{"prompt":"Hi","max_tokens":1}`))
		request.Header.Set(web.HeaderRank, header)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := io.ReadAll(response.Body)
		response.Body.Close()
		if response.StatusCode != want || want == 400 && gjson.GetBytes(answer, "error.message").Str != "data_parallel_rank "+header+" is out of range [0, 2)." {
			t.Errorf("rank %s: %d %s", header, response.StatusCode, answer)
		}
	}
	if after := s.Rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load(); after-before < 2 {
		t.Errorf("rank 1 got %d prompt tokens", after-before)
	}
	_, page := testkit.HTTPGet(t, s.URL(1)+"/metrics")
	_, sources := testkit.HTTPGet(t, s.URL(1)+"/kv_event_sources")
	if !strings.Contains(string(page), `vllm:num_requests_running{engine="1"`) || len(gjson.ParseBytes(sources).Map()) != 2 {
		t.Errorf("%s\n%s", page, sources)
	}
}

// adapters sends an adapter's name to one of vLLM's two routes for them.
func adapters(t *testing.T, base, route, name string) (status int, answer []byte) {
	t.Helper()
	return Post(t, base+"/v1/"+route+"_lora_adapter", fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters"}`, name))
}

func TestAdapterLoadedAtRunTimeIsServed(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--policy=kv", "--mock=data-parallel-size=2", "--allow-engine-admin")
	text := strings.Repeat("the same words ", 20)
	chat := func(model string) (a exchange, problem string) {
		t.Helper()
		a = s.ask(map[string]any{"model": model, "messages": Say(text), "max_tokens": 1})
		return a, a.json().Get("error.message").Str
	}
	if _, problem := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("before it is loaded: %q", problem)
	}
	for _, key := range s.Keys() { // the base model's blocks are everywhere
		s.pinned(key, map[string]any{"messages": Say(text), "max_tokens": 1})
	}
	if status, answer := adapters(t, s.URL(1), "load", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	for i := range 6 {
		a, problem := chat("late")
		if a.Worker != "1" || problem != "" || a.Cached != a.Predicted || (a.Cached > 0) != (i > 0) {
			t.Errorf("request %d: worker %q, %q, %d cached, %d predicted", i, a.Worker, problem, a.Cached, a.Predicted)
		}
		s.Settle()
	}
	if status, answer := adapters(t, s.URL(1), "unload", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	chat("another") // is what has the workers asked again
	if _, problem := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("after it is unloaded: %q", problem)
	}

	// Through the router it is loaded on every worker, once on each.
	status, answer := adapters(t, s.OpenAI, "load", "everywhere")
	if workers := gjson.GetBytes(answer, "#.worker_id").Raw; status != 200 || workers != "[0,1]" {
		t.Errorf("%d %s", status, answer)
	}
	if _, problem := chat("everywhere"); problem != "" {
		t.Error(problem)
	}
	for i := range s.Count {
		if served := gjson.GetBytes(s.Get(s.URL(i)+"/v1/models"), "data.#.id").Raw; served != `["mock","everywhere"]` {
			t.Errorf("worker %d serves %s", i, served)
		}
	}
	if list := gjson.GetBytes(s.Get(s.OpenAI+"/v1/models"), `data.#(id=="everywhere").parent`); list.Str != "mock" {
		t.Errorf("it is listed below %s", list.Raw)
	}
}

// TestTwoRoutersHoldTheSameIndex has a second router join while the first is at
// work: it learns what was before through replay.
func TestTwoRoutersHoldTheSameIndex(t *testing.T) {
	t.Parallel()
	first := StartMocks(t, 2, "--mock=num-gpu-blocks=40", "--block-size=16", "--mock=data-parallel-size=2")
	load := func(from, to int) {
		for i := from; i < to; i++ {
			if _, err := first.Chat(t.Context(), Say(strings.Repeat(fmt.Sprintf("words of chat %d ", i), 12)), i%2 == 0, 4); err != nil {
				t.Fatal(err)
			}
		}
	}
	load(0, 20)
	second := first.attach(t, "--block-size=16")
	load(20, 40)
	first.Settle()
	want := first.dump()
	if len(want) == 0 {
		t.Fatal("the first index is empty")
	}
	testkit.Settles(t, func() error {
		if diff := cmp.Diff(want, second.dump()); diff != "" {
			return fmt.Errorf("the indexes differ (-first +second):\n%s", diff)
		}
		return nil
	})
}

// TestGrowingPrefixesStayOnOneWorker continues chats turn by turn.
func TestGrowingPrefixesStayOnOneWorker(t *testing.T) {
	t.Parallel()
	for _, flags := range [][]string{{"--policy=kv"}, {"--policy=work"}, {"--policy=kv", "--no-kv-events"}, {"--policy=kv", "--mock=data-parallel-size=2"}} {
		t.Run(strings.Join(flags, " "), func(t *testing.T) {
			s := StartMocks(t, 2, append(flags, "--block-size=16")...)
			for c := range 4 {
				parts := []string{strings.Repeat(fmt.Sprintf("chat %d begins at length ", c), 10)}
				var home uint64
				for turn := range 4 {
					a, err := s.Chat(t.Context(), Say(parts...), false, 8)
					if err != nil {
						t.Fatal(err)
					}
					if turn == 0 {
						home = a.Worker
					} else if a.Worker != home || a.Cached == 0 {
						t.Errorf("turn %d of chat %d went to worker %d and found %d tokens; want worker %d and some", turn, c, a.Worker, a.Cached, home)
					}
					s.Settle()
					parts = append(parts, a.Text, strings.Repeat("and goes on ", 5))
				}
			}
		})
	}
}

// TestPredictionsAreExactOnSGLangMocks sends requests of all kinds, over a cache that
// is too small for them, to a router that started the workers and to one that knows no
// more than their URL.
func TestPredictionsAreExactOnSGLangMocks(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 1, "--mock=api=sglang", "--mock=data-parallel-size=2", "--block-size=16", "--mock=num-gpu-blocks=240")
	url := s.URL(0)
	other := s.attach(t, "--block-size=16")
	for _, r := range []*Mocks{s, other} {
		if workers := r.Router.Workers(); len(r.Ranks()) != 2 || len(workers) != 1 || workers[0].Engine != kv.EngineSGLang {
			t.Fatalf("%+v", workers)
		}
	}
	random := rand.New(rand.NewPCG(3, 3))
	texts := make([]string, 6)
	for i := range texts {
		texts[i] = Words(random, 40+20*i)
	}
	follow := func() {
		t.Helper()
		s.Settle()
		other.Settle()
	}
	follow()
	cached := 0
	kinds := sglangMockKinds()
	for i := range 5 * len(kinds) {
		kind := kinds[i%len(kinds)]
		text := &texts[random.IntN(len(texts))]
		from := []*Mocks{s, other}[i/len(kinds)%2]
		a := from.send(kind[0], fmt.Sprintf(kind[1], proxy.Quoted(*text)))
		if a.StatusCode != http.StatusOK || a.Prompt == 0 && kind[1][1:8] != `"text":` {
			t.Fatalf("%s: %d %s", kind, a.StatusCode, a.Text)
		}
		if strings.HasPrefix(a.Text, "[") {
			a.Cached = int(gjson.Get(a.Text, "0.meta_info.cached_tokens").Int())
		}
		if a.Predicted != a.Cached {
			t.Errorf("request %d, %s: predicted %d, cached %d of %d", i, kind, a.Predicted, a.Cached, a.Prompt)
		}
		cached += a.Cached
		follow()
		if random.IntN(3) == 0 {
			*text += " " + Words(random, 20)
		}
		if i == 30 {
			if status, answer := Post(t, url+"/flush_cache", ""); status != http.StatusOK {
				t.Fatalf("%d %s", status, answer)
			}
			follow()
			if n := other.Blocks(kv.WorkerKey{}) + other.Blocks(kv.WorkerKey{Rank: 1}); n > 0 {
				t.Errorf("%d blocks are left after a flush", n)
			}
		}
	}
	if _, page := testkit.HTTPGet(t, url+"/metrics"); cached == 0 || sum(testkit.ReadMetricsPage(string(page)), "sglang:evicted_tokens_total") == 0 {
		t.Errorf("%d tokens were cached: the test shows nothing\n%s", cached, page)
	}
	for _, key := range []kv.WorkerKey{{Rank: 0}, {Rank: 1}} {
		if s.Rank(key).Counts.PromptTokens.Load() == 0 {
			t.Errorf("%v was never used", key)
		}
	}

	// What an extra_key keeps apart is never predicted across.
	shared := Words(random, 100)
	for i, extra := range []string{`,"extra_key":"a"`, ``, `,"extra_key":"a"`, `,"extra_key":"b"`, ``} {
		a := s.send("/generate", fmt.Sprintf(`{"text":%s%s,"sampling_params":{"max_new_tokens":1}}`, proxy.Quoted(shared), extra))
		if a.StatusCode != http.StatusOK || a.Predicted > a.Cached {
			t.Errorf("extra_key, request %d: %+v", i, a)
		}
		follow()
	}
}

// TestLoadOfSGLangMocksIsSeenAtOnce: a queue on one worker, of which the router has
// sent nothing, is known within a second, also where the worker is attached.
func TestLoadOfSGLangMocksIsSeenAtOnce(t *testing.T) {
	t.Parallel()
	s := StartMocks(t, 2, "--mock=api=sglang", "--speedup-ratio=1", "--mock=max-num-seqs=2")
	other := s.attach(t)
	ctx, leave := context.WithCancel(t.Context())
	const queue = 6
	left := make(chan struct{}, queue)
	for i := range queue {
		go func() {
			defer func() { left <- struct{}{} }()
			request, _ := http.NewRequestWithContext(ctx, http.MethodPost, s.URL(0)+"/generate",
				strings.NewReader(fmt.Sprintf(`{"text":"number %d","sampling_params":{"max_new_tokens":3000,"ignore_eos":true}}`, i)))
			request.Header.Set("Content-Type", "application/json")
			if response, err := http.DefaultClient.Do(request); err == nil {
				response.Body.Close()
			}
		}()
	}
	busy := s.Mocker.Worker(0).Ranks[0]
	testkit.Eventually(t, 10*time.Second, "a queue", func() bool { return busy.CurrentLoad().Waiting == queue-2 })
	for i, r := range []*Mocks{s, other} {
		testkit.Eventually(t, time.Second, fmt.Sprintf("router %d sees the load", i), func() bool {
			w, _ := r.Record(0)
			return w.RunningReqs == 2 && w.WaitingReqs == queue-2
		})
	}
	for range 20 {
		a := s.send("/generate", `{"text":"something new","sampling_params":{"max_new_tokens":1}}`)
		if a.StatusCode != http.StatusOK || a.Worker != "1" {
			t.Fatalf("worker %s, %d %s", a.Worker, a.StatusCode, a.Text)
		}
	}
	leave()
	for range queue {
		<-left
	}
}

// sglangKinds are the kinds of requests whose predictions must be exact, each as a
// path and a body with a place for a text as JSON and, as MODEL, the model's name. SGLang counts each as it renders
// it, which is not always what the template alone says.
var sglangKinds = []struct{ name, path, body string }{
	{"chat", testkit.ChatPath, `{"messages":[{"role":"system","content":%s},{"role":"user","content":"Go on."}],"max_tokens":4}`},
	{"streamed chat", testkit.ChatPath, `{"messages":[{"role":"system","content":%s},{"role":"user","content":"Go on."}],"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`},
	{"chat that ends with the assistant", testkit.ChatPath, `{"messages":[{"role":"user","content":%s},{"role":"assistant","content":"The answer"}],"max_tokens":4}`},
	{"final message continued", testkit.ChatPath, `{"messages":[{"role":"user","content":%s},{"role":"assistant","content":"The answer is"}],"continue_final_message":true,"max_tokens":4}`},
	{"content in parts", testkit.ChatPath, `{"messages":[{"role":"user","content":[{"type":"text","text":%s},{"type":"text","text":"And then?"}]}],"max_tokens":4}`},
	{"tools", testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object","properties":{"a":{"type":"string"}}}}}],"tool_choice":"none","max_tokens":4}`},
	{"salted chat", testkit.ChatPath, `{"messages":[{"role":"user","content":%s}],"cache_salt":"tenant","max_tokens":4}`},
	{"completion", "/v1/completions", `{"prompt":%s,"max_tokens":4}`},
	{"streamed completion", "/v1/completions", `{"prompt":%s,"max_tokens":4,"stream":true,"stream_options":{"include_usage":true}}`},
	{"generate", "/generate", `{"text":%s,"sampling_params":{"max_new_tokens":4,"temperature":0}}`},
	{"streamed generate", "/generate", `{"text":%s,"sampling_params":{"max_new_tokens":4,"temperature":0},"stream":true}`},
	{"responses", "/v1/responses", `{"model":"MODEL","input":%s,"max_output_tokens":4}`},
	{"messages", "/v1/messages", `{"model":"MODEL","messages":[{"role":"user","content":%s}],"max_tokens":4}`},
}

// sglangMockKinds are those of sglangKinds that mock workers serve.
func sglangMockKinds() (kinds [][2]string) {
	for _, kind := range sglangKinds {
		if kind.path != "/v1/responses" && kind.path != "/v1/messages" {
			body := kind.body
			if kind.path == testkit.ChatPath { // only then a stream reports what was cached
				body = strings.Replace(body, `"stream":true}`, `"stream":true,"stream_options":{"include_usage":true}}`, 1)
			}
			kinds = append(kinds, [2]string{kind.path, body})
		}
	}
	return append(kinds,
		[2]string{"/generate", `{"text":[%s],"sampling_params":{"max_new_tokens":40,"ignore_eos":true}}`},
		[2]string{"/generate", `{"text":%s,"cache_salt":"tenant","sampling_params":{"max_new_tokens":4}}`})
}

// TestTokenDataMisleadsNobody sends tokens of one prompt beside the text of
// another: the text is what the worker computes, and what counts.
func TestTokenDataMisleadsNobody(t *testing.T) {
	t.Parallel()
	for _, flag := range []string{"--router-predicted-ttl-secs=60", "--no-kv-events"} {
		t.Run(flag, func(t *testing.T) {
			s := StartMocks(t, 2, "--policy=kv", flag)
			warm, cold := strings.Repeat("a prompt that is known ", 20), strings.Repeat("another one of that kind ", 20)
			first, err := s.Chat(t.Context(), Say(warm), false, 1)
			if err != nil {
				t.Fatal(err)
			}
			s.Settle()
			_, dry := Post(t, s.OpenAI+testkit.ChatPath, string(mocker.MustJSON(map[string]any{"messages": Say(warm), "nvext": map[string]any{"annotations": []string{"query_instance_id"}}})))
			tokens := gjson.GetBytes(dry, "nvext.token_data")
			if len(tokens.Array()) != first.Prompt {
				t.Fatalf("%.300s", dry)
			}
			for i, text := range []string{cold, cold, warm} {
				nvext := map[string]any{"backend_instance_id": first.Worker, "token_data": json.RawMessage(tokens.Raw)}
				a := s.ask(map[string]any{"messages": Say(text), "max_tokens": 1, "nvext": nvext})
				if a.Predicted != a.Cached || (a.Cached > 0) != (i > 0) {
					t.Errorf("request %d: %d cached, %d predicted", i, a.Cached, a.Predicted)
				}
				s.Settle()
			}
		})
	}
}

func TestAttachedRanksAreWorkersOfTheirOwn(t *testing.T) {
	t.Parallel()
	s := StartWorkers(t, 2, "--mock=data-parallel-size=2", "--mock=lora=sql").attach(t, "--policy=kv", "--send-tokens=never")
	computed := func(key kv.WorkerKey) int64 { return s.Rank(key).Counts.PromptTokens.Load() }
	text := strings.Repeat("keep the ranks apart ", 20)
	settle := func(want kv.WorkerKey, blocks int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d blocks on %v", blocks, want), func() bool { return s.Blocks(want) == blocks })
	}

	// The chosen rank reaches the worker, and its events are its own.
	key := kv.WorkerKey{Worker: 1, Rank: 1}
	first := s.pinned(key, map[string]any{"messages": Say(text), "max_tokens": 1})
	if first.Predicted != 0 || first.Cached != 0 {
		t.Errorf("cached before anything was: %s", first.Text)
	}
	settle(key, first.Prompt/64)
	if ranks := s.Ranks(); len(ranks) != 4 {
		t.Errorf("ranks %v", ranks)
	}
	for _, rank := range s.Ranks() {
		if own := rank == key; own != (computed(rank) > 0) || own != (s.Blocks(rank) > 0) {
			t.Errorf("%v computed %d tokens and holds %d blocks", rank, computed(rank), s.Blocks(rank))
		}
	}

	// A conversation that grows stays where its prefix is.
	messages := Say(text)
	for turn := range 4 {
		messages = append(messages, map[string]string{"role": "assistant", "content": "And then?"}, map[string]string{"role": "user", "content": strings.Repeat(fmt.Sprint("turn ", turn, " "), 20)})
		a := s.ask(map[string]any{"messages": messages, "max_tokens": 1})
		if a.Predicted != a.Cached || a.Cached == 0 {
			t.Errorf("turn %d: %d cached, %d predicted", turn, a.Cached, a.Predicted)
		}
		settle(key, a.Prompt/64)
	}
	if n := computed(kv.WorkerKey{Worker: 1, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 0}) + computed(kv.WorkerKey{Worker: 0, Rank: 1}); n != 0 {
		t.Errorf("%d tokens were computed elsewhere", n)
	}

	// Neither an adapter nor a salt finds the base model's blocks, on the same rank.
	held := s.Blocks(key)
	for _, other := range []map[string]any{{"model": "sql"}, {"cache_salt": "a"}, {"model": "sql", "cache_salt": "a"}} {
		for again := range 2 {
			other["messages"], other["max_tokens"] = Say(text), 1
			a := s.pinned(key, other)
			if a.Predicted != a.Cached || (a.Cached > 0) != (again > 0) {
				t.Errorf("%v: %d cached, %d predicted", other, a.Cached, a.Predicted)
			}
			if again == 0 {
				held += a.Prompt / 64
			}
			settle(key, held)
		}
	}
	_, list := testkit.HTTPGet(t, s.OpenAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["mock","sql"]` {
		t.Errorf("models %s", got)
	}

	// Every rank's load is its own: here from /metrics, which has them all.
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	body, err := json.Marshal(map[string]any{"messages": Say("Go on for long."), "max_tokens": 15000, "ignore_eos": true, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.OpenAI+testkit.ChatPath, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set(hints.HeaderPinnedWorker, "0")
	request.Header.Set(hints.HeaderPinnedRank, "1")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	testkit.Eventually(t, 20*time.Second, "a running request on the one rank", func() bool { return s.Gauge("kvrouter_worker_running_requests", kv.WorkerKey{Rank: 1}) == 1 })
	metrics := s.Metrics()
	if running, known := metrics[`kvrouter_worker_running_requests{dp_rank="0",worker_id="0"}`]; !known || running != 0 || metrics[`kvrouter_worker_in_flight{dp_rank="0",worker_id="0"}`] != 0 {
		t.Errorf("of the other rank %v requests run (%t)", running, known)
	}
	_, page := testkit.HTTPGet(t, s.OpenAI+"/metrics")
	for _, want := range []string{
		`kvrouter_worker_running_requests{dp_rank="1",worker_id="0"} 1`, `kvrouter_worker_in_flight{dp_rank="0",worker_id="0"} 0`,
		`dynamo_frontend_worker_active_decode_blocks{dp_rank="0",worker_id="0",worker_type="decode"} 0`,
		`dynamo_component_kv_cache_events_applied{dp_rank="1",event_type="stored",status="ok",worker_id="1"}`,
	} {
		if !strings.Contains(string(page), want) {
			t.Errorf("no %s", want)
		}
	}
	cancel()
	testkit.Eventually(t, 20*time.Second, "nothing in flight", func() bool { return s.InFlight() == 0 })
}

func TestRouterTakesFromItsPeerWhatAWorkerCannotReplay(t *testing.T) {
	t.Parallel()
	farm := StartMocks(t, 1)
	key := kv.WorkerKey{}
	chat := func(i int) {
		t.Helper()
		if _, err := farm.Chat(t.Context(), Say(strings.Repeat(fmt.Sprint("chat ", i, " "), 60)), false, 1); err != nil {
			t.Fatal(err)
		}
	}
	chat(1)
	farm.Settle()
	before := farm.Blocks(key)
	second := Start(t, "--engine=none", "--worker=url="+farm.URL(0)+",id=0,replay=tcp"+strings.TrimPrefix(deadURL(t), "http"), "--indexer-peers="+farm.Port)
	connected, cold := func() bool { return second.Gauge("kvrouter_kv_events_connected", key) == 1 }, func() bool { return second.Gauge("kvrouter_worker_cold", key) == 1 }
	testkit.Eventually(t, 20*time.Second, "events followed", func() bool { return connected() && farm.Rank(key).Events.Pub.Subscribers() == 2 })
	chat(2)
	farm.Settle()
	all := farm.Blocks(key)
	testkit.Eventually(t, 20*time.Second, "all blocks taken over", func() bool { return second.Blocks(key) == all })
	dumps := second.Metrics()[`kvrouter_kv_events_total{dp_rank="0",kind="peer_dumps",worker_id="0"}`]
	if before == 0 || all <= before || dumps == 0 || cold() {
		t.Errorf("%d blocks, then %d; %v dumps of the peer", before, all, dumps)
	}
}
