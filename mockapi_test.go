package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
)

const completionsPath = "/v1/completions"

func TestMockKeepsAdaptersAndSaltsApart(t *testing.T) {
	s := startMockSite(t, 2, "--mock-lora=sql,legal", "--policy=kv")
	_, list := testkit.HTTPGet(t, s.openAI+"/v1/models")
	if got := gjson.GetBytes(list, "data.#.id").Raw; got != `["legal","mock","sql"]` && got != `["mock","sql","legal"]` {
		t.Errorf("models %s", got)
	}
	text := strings.Repeat("the same words ", 20)
	for _, c := range []struct {
		model, salt string
		want        int64
	}{{"mock", "", 0}, {"sql", "", 0}, {"legal", "", 0}, {"sql", "a", 0}, {"sql", "", 256}, {"legal", "", 256}, {"mock", "", 256}, {"sql", "a", 256}, {"sql", "b", 0}, {"mock", "a", 0}, {"mock", "a", 256}} {
		body := map[string]any{"model": c.model, "messages": say(text), "max_tokens": 1}
		if c.salt != "" {
			body["cache_salt"] = c.salt
		}
		answer, predicted := s.ask(t, mocker.MustJSON(body))
		if cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int(); cached != c.want || predicted != cached || answer.Get("model").Str != c.model {
			t.Errorf("%+v: %d cached, %d predicted: %s", c, cached, predicted, answer.Raw)
		}
		s.settle()
	}
}

func TestMockRanksHaveCachesOfTheirOwn(t *testing.T) {
	s := startMockSite(t, 2, "--mock-data-parallel-size=2")
	if targets := s.app.router.Targets(); len(targets) != 4 {
		t.Fatalf("%d targets", len(targets))
	}
	ranks := map[string]bool{}
	for i := range 12 {
		chat := mocker.MustJSON(map[string]any{"messages": say(fmt.Sprint(i%6, strings.Repeat(" rank and file", 20))), "max_tokens": 1})
		answer, predicted := s.ask(t, chat)
		cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
		if predicted != cached || (cached > 0) != (i >= 6) {
			t.Errorf("chat %d: %d cached, %d predicted", i, cached, predicted)
		}
		s.settle()
	}
	for _, target := range s.app.router.Targets() {
		if s.app.index.Blocks(target.Key) > 0 {
			ranks[fmt.Sprint(target.Key)] = true
		}
		if got, held := s.app.index.Blocks(target.Key), s.rank(target.Key); got > 0 && held.Counts.PromptTokens.Load() == 0 {
			t.Errorf("%v has %d blocks in the index and computed nothing", target.Key, got)
		}
	}
	if len(ranks) < 3 {
		t.Errorf("only %v were used", ranks)
	}

	// A worker asked directly goes where the header says.
	before := s.rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load()
	for header, want := range map[string]int{"1": 200, "2": 400, "-1": 400, "x": 200} {
		request, _ := http.NewRequest(http.MethodPost, s.workerURL(1)+completionsPath, strings.NewReader(`{"prompt":"Hi","max_tokens":1}`))
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
	if after := s.rank(kv.WorkerKey{Worker: 1, Rank: 1}).Counts.PromptTokens.Load(); after-before < 2 {
		t.Errorf("rank 1 got %d prompt tokens", after-before)
	}
	_, page := testkit.HTTPGet(t, s.workerURL(1)+"/metrics")
	_, sources := testkit.HTTPGet(t, s.workerURL(1)+"/kv_event_sources")
	if !strings.Contains(string(page), `vllm:num_requests_running{engine="1"`) || len(gjson.ParseBytes(sources).Map()) != 2 {
		t.Errorf("%s\n%s", page, sources)
	}
}

// ask sends a chat through the router; predicted are the tokens of overlap that
// it names.
func (s *mockSite) ask(t *testing.T, body []byte) (answer gjson.Result, predicted int64) {
	t.Helper()
	response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	if predicted, err = strconv.ParseInt(response.Header.Get(web.HeaderOverlap), 10, 64); err != nil {
		t.Fatalf("%s: %s", response.Status, text)
	}
	return gjson.ParseBytes(text), predicted
}

// adapters sends an adapter's name to one of vLLM's two routes for them.
func (s *mockSite) adapters(t *testing.T, base, route, name string) (status int, answer []byte) {
	t.Helper()
	return post(t, base+"/v1/"+route+"_lora_adapter", fmt.Sprintf(`{"lora_name":%q,"lora_path":"/adapters"}`, name))
}

func TestAdapterLoadedAtRunTimeIsServed(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--mock-data-parallel-size=2", "--allow-engine-admin")
	text := strings.Repeat("the same words ", 20)
	chat := func(model string) (worker, problem string, cached, predicted int64) {
		t.Helper()
		response, err := http.Post(s.openAI+testkit.ChatPath, "application/json", strings.NewReader(string(mocker.MustJSON(map[string]any{"model": model, "messages": say(text), "max_tokens": 1}))))
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Sscan(response.Header.Get(web.HeaderOverlap), &predicted)
		answer := gjson.ParseBytes(body)
		return response.Header.Get(web.HeaderWorker), answer.Get("error.message").Str, answer.Get("usage.prompt_tokens_details.cached_tokens").Int(), predicted
	}
	if _, problem, _, _ := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("before it is loaded: %q", problem)
	}
	for _, key := range []kv.WorkerKey{{Worker: 0, Rank: 0}, {Worker: 0, Rank: 1}, {Worker: 1, Rank: 0}, {Worker: 1, Rank: 1}} { // the base model's blocks are everywhere
		s.pinned(t, key, map[string]any{"messages": say(text), "max_tokens": 1})
	}
	if status, answer := s.adapters(t, s.workerURL(1), "load", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	for i := range 6 {
		worker, problem, cached, predicted := chat("late")
		if worker != "1" || problem != "" || cached != predicted || (cached > 0) != (i > 0) {
			t.Errorf("request %d: worker %q, %q, %d cached, %d predicted", i, worker, problem, cached, predicted)
		}
		s.settle()
	}
	if status, answer := s.adapters(t, s.workerURL(1), "unload", "late"); status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	chat("another") // is what has the workers asked again
	if _, problem, _, _ := chat("late"); problem != "The model `late` does not exist." {
		t.Errorf("after it is unloaded: %q", problem)
	}

	// Through the router it is loaded on every worker, once on each.
	status, answer := s.adapters(t, s.openAI, "load", "everywhere")
	if workers := gjson.GetBytes(answer, "#.worker_id").Raw; status != 200 || workers != "[0,1]" {
		t.Errorf("%d %s", status, answer)
	}
	if _, problem, _, _ := chat("everywhere"); problem != "" {
		t.Error(problem)
	}
	for _, target := range s.app.router.Targets() {
		if !slices.Equal(target.Models, []string{"mock", "everywhere"}) || !slices.Equal(target.Adapters, []string{"everywhere"}) {
			t.Errorf("%v serves %q, of them adapters %q", target.Key, target.Models, target.Adapters)
		}
	}
}
