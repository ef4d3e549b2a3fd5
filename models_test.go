package main

import (
	"fmt"
	"io"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
	"kvrouter/internal/web"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

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
	for _, target := range s.rooms.router.Targets() {
		if !slices.Equal(target.Models, []string{"mock", "everywhere"}) || !slices.Equal(target.Adapters, []string{"everywhere"}) {
			t.Errorf("%v serves %q, of them adapters %q", target.Key, target.Models, target.Adapters)
		}
	}
}

func TestMockAdaptersAreLoadedAsInVLLM(t *testing.T) {
	s := startMockSite(t, 1, "--mock-lora=sql")
	for _, c := range []struct {
		route, body string
		status      int
		says        string
	}{
		{"load", `{"lora_name":"a","lora_path":"/a"}`, 200, "Success: LoRA adapter 'a' added successfully."},
		{"load", `{"lora_name":"a","lora_path":"/a"}`, 400, "'a' has already been loaded"},
		{"load", `{"lora_name":"a","lora_path":"/a","load_inplace":true}`, 200, "added"},
		{"load", `{"lora_name":"mock","lora_path":"/a"}`, 400, "conflicts with a served base model"},
		{"load", `{"lora_name":"b"}`, 400, "must be provided"},
		{"unload", `{"lora_name":"sql"}`, 200, "Success: LoRA adapter 'sql' removed successfully."},
		{"unload", `{"lora_name":"sql"}`, 404, "'sql' cannot be found"},
		{"unload", `{}`, 400, "needs to be provided"},
	} {
		status, answer := post(t, s.workerURL(0)+"/v1/"+c.route+"_lora_adapter", c.body)
		if status != c.status || !strings.Contains(string(answer), c.says) {
			t.Errorf("%s %s: %d %s", c.route, c.body, status, answer)
		}
	}
	if _, list := testkit.Get(t, s.workerURL(0)+"/v1/models"); gjson.GetBytes(list, "data.#.id").Raw != `["mock","a"]` {
		t.Errorf("%s", list)
	}
}
