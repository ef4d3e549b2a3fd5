package test

import (
	"bytes"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
	"mime/multipart"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

// twoModels are mock workers of two base models that have nothing in common: other
// tokenizers, templates and block sizes.
type twoModels struct {
	first, second *Workers
	dir           string // with a folder of each one's files
}

// startTwoModels starts so many mock workers of each model.
func startTwoModels(t *testing.T, workers int) twoModels {
	t.Helper()
	m := twoModels{dir: t.TempDir()}
	testkit.TokenizerFolder(t, filepath.Join(m.dir, "first"), [2]string{"t", "h"}, [2]string{"th", "e"})
	testkit.TokenizerFolder(t, filepath.Join(m.dir, "second"), [2]string{"o", "u"}, [2]string{"a", "n"}, [2]string{"an", "d"})
	m.first = StartWorkers(t, workers, "--model="+filepath.Join(m.dir, "first"), "--mock=lora=sql")
	m.second = StartWorkers(t, workers, "--model="+filepath.Join(m.dir, "second"), "--block-size=16", "--mock=lora=legal")
	return m
}

// entries lists the workers as a file of workers does.
func (w *Workers) entries(name string) (list []string) {
	for i := range w.Count {
		list = append(list, fmt.Sprintf("{name: %s%d, url: %q}", name, i, w.URL(i)))
	}
	return list
}

// askFor sends a chat to a model.
func (r *Router) askFor(model, text string) exchange {
	r.T.Helper()
	return r.ask(map[string]any{"model": model, "messages": Say(text), "max_tokens": 1})
}

// tokensAt returns the number of tokens and the tokens that POST /tokenize gives.
func tokensAt(t *testing.T, url string, body []byte) string {
	t.Helper()
	_, answer := Post(t, url+"/tokenize", string(body))
	return fmt.Sprint(gjson.GetBytes(answer, "count").Int(), " ", gjson.GetBytes(answer, "tokens").Raw)
}

// ofModel returns a model's sample of the metrics page, 0 if there is none.
func (r *Router) ofModel(name, model string) float64 {
	return r.Metrics()[fmt.Sprintf("%s{model=%q}", name, model)]
}

// TestTwoModelsAreServedSideBySide: by discovery, each with its own tokenizer, block
// size, index and adapters.
func TestTwoModelsAreServedSideBySide(t *testing.T) {
	t.Parallel()
	both := startTwoModels(t, 2)
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	first, second := both.first.entries("a"), both.second.entries("b")
	file.write(append(second, first...)...) // whichever comes first
	s := Start(t, "--engine=none", "--policy=kv", "--discovery=file:"+file.path, "--model="+filepath.Join(both.dir, "first"), "--models-dir="+both.dir)
	up := func(workers int) {
		t.Helper()
		s.WaitReady(workers, 20*time.Second)
	}
	up(4)

	t.Run("all are listed", func(t *testing.T) {
		_, list := testkit.HTTPGet(t, s.OpenAI+"/v1/models")
		names := []string{}
		for _, name := range gjson.GetBytes(list, "data.#.id").Array() {
			names = append(names, name.Str)
		}
		slices.Sort(names)
		if want := []string{"first", "legal", "second", "sql"}; !slices.Equal(names, want) {
			t.Errorf("models %q, want %q", names, want)
		}
		shown := map[string]int{}
		for _, w := range s.Workers() {
			shown[fmt.Sprint(*w.ModelName, " ", *w.BlockSize)]++
		}
		if shown["first 64"] != 2 || shown["second 16"] != 2 {
			t.Errorf("workers %v", shown)
		}
	})

	t.Run("each is told its own tokens", func(t *testing.T) {
		for i, text := range []string{"Hi", "the sound and the fury", strings.Repeat("you and the others ", 40), "naïve 日本語 🙂"} {
			counts := map[string]int64{}
			for _, model := range []string{"first", "second", "", "sql", "legal"} {
				before := s.Metrics()
				counts[model] = int64(s.askFor(model, text).Prompt)
				page := s.Metrics()
				const local, fallbacks, mismatches = `kvrouter_prompt_source_total{source="local"}`, "kvrouter_prompt_fallbacks_total", "kvrouter_prompt_tokens_mismatch_total"
				if page[local] != before[local]+1 || sum(page, fallbacks) != sum(before, fallbacks) || sum(page, mismatches) > 0 {
					t.Errorf("text %d for %q: %v prompts counted here, %v before, %v mismatches", i, model, page[local], before[local], sum(page, mismatches))
				}
				engine := both.first
				if model == "second" || model == "legal" {
					engine = both.second
				}
				body := mocker.MustJSON(map[string]any{"model": model, "messages": Say(text)})
				if here, there := tokensAt(t, s.OpenAI, body), tokensAt(t, engine.URL(0), body); here != there || !strings.HasPrefix(here, fmt.Sprintf("%d ", counts[model])) {
					t.Errorf("text %d for %q: %s here, %s at the worker, which counted %d", i, model, here, there, counts[model])
				}
			}
			if counts[""] != counts["first"] || counts["sql"] != counts["first"] || counts["legal"] != counts["second"] {
				t.Errorf("text %d: tokens %v", i, counts)
			}
			if i == 2 && counts["first"] == counts["second"] { // else the test could not fail
				t.Errorf("text %d: both models have %d tokens", i, counts["first"])
			}
		}
	})

	t.Run("a cache of one is none of the other's", func(t *testing.T) {
		text := strings.Repeat("a hot prompt ", 60)
		for _, c := range []struct {
			model string
			size  int
			again bool
		}{{"first", 64, false}, {"second", 16, false}, {"first", 64, true}, {"second", 16, true}, {"sql", 64, false}, {"legal", 16, false}, {"legal", 16, true}} {
			a := s.askFor(c.model, text)
			if a.Predicted != a.Cached || a.Predicted%c.size != 0 || (a.Predicted > 0) != c.again {
				t.Errorf("%+v: %d tokens predicted, %d cached", c, a.Predicted, a.Cached)
			}
			testkit.Eventually(t, 20*time.Second, "its blocks are known", func() bool {
				return s.overlap(t, c.size, text, c.model) > 0
			})
		}
	})

	t.Run("a name that nobody serves", func(t *testing.T) {
		if status := s.askFor("third", "Hi").StatusCode; status != http.StatusNotFound {
			t.Errorf("status %d", status)
		}
	})

	t.Run("a form names its model", func(t *testing.T) {
		before := s.ofModel("kvrouter_model_requests_total", "second")
		var form bytes.Buffer
		w := multipart.NewWriter(&form)
		w.WriteField("model", "second")
		w.Close()
		response, err := http.Post(s.OpenAI+"/v1/audio/transcriptions", w.FormDataContentType(), &form)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if now := s.ofModel("kvrouter_model_requests_total", "second"); now != before+1 {
			t.Errorf("%v requests for it, %v before", now, before)
		}
	})

	t.Run("metrics by model", func(t *testing.T) {
		_, page := testkit.HTTPGet(t, s.OpenAI+"/metrics")
		for _, want := range []string{
			`kvrouter_model_info{block_size="64",model="first",tokenizer="router"} 1`, `kvrouter_model_info{block_size="16",model="second",tokenizer="router"} 1`,
			`kvrouter_model_ranks{model="first"} 2`, `kvrouter_model_ranks{model="second"} 2`, `kvrouter_model_in_flight{model="second"} 0`,
		} {
			if !strings.Contains(string(page), want+"\n") {
				t.Errorf("the page lacks %s", want)
			}
		}
		if n := strings.Count(string(page), "\nkvrouter_worker_up{"); n != 4 {
			t.Errorf("%d workers are shown", n)
		}
	})

	t.Run("one goes and comes back", func(t *testing.T) {
		file.write(first...)
		up(2)
		testkit.Eventually(t, 20*time.Second, "its workers are taken out", func() bool { return len(s.Workers()) == 2 })
		if status := s.askFor("second", "Hi").StatusCode; status != http.StatusServiceUnavailable {
			t.Errorf("while it is away: status %d", status)
		}
		if status := s.askFor("first", "Hi").StatusCode; status != http.StatusOK {
			t.Errorf("the other: status %d", status)
		}
		file.write(append(first, second...)...)
		up(4)
		if a := s.askFor("second", "the sound and the fury"); a.Prompt == 0 || sum(s.Metrics(), "kvrouter_prompt_tokens_mismatch_total") > 0 {
			t.Errorf("%d tokens, or others than were counted: %s", a.Prompt, a.Text)
		}
		if n := strings.Count(string(s.Get(s.OpenAI+"/metrics")), "\nkvrouter_model_info{"); n != 2 {
			t.Errorf("%d models", n)
		}
	})
}

// overlap returns the most tokens of a chat that a worker of the model, with blocks of
// size tokens, is known to hold.
func (s *Router) overlap(t *testing.T, size int, text, model string) (most int) {
	t.Helper()
	_, answer := Post(t, s.OpenAI+"/tokenize", string(mocker.MustJSON(map[string]any{"model": model, "messages": Say(text)})))
	lora := ""
	if model == "sql" || model == "legal" {
		lora = model
	}
	_, scores := Post(t, s.Port+"/overlap_scores", fmt.Sprintf(`{"model_name":%q,"lora_name":%q,"token_ids":%s}`, model, lora, gjson.GetBytes(answer, "tokens").Raw))
	if got := gjson.GetBytes(scores, "block_size").Int(); got != int64(size) {
		t.Errorf("scores of %s in blocks of %d: %s", model, got, scores)
	}
	for _, blocks := range gjson.GetBytes(scores, "workers.#.device_blocks").Array() {
		most = max(most, int(blocks.Int())*size)
	}
	return most
}

// TestTwoModelsWithoutFilesAreAskedForTheirTokens: a router that knows no model
// takes the one of the worker that comes first for its own, and asks each one's own
// workers.
func TestTwoModelsWithoutFilesAreAskedForTheirTokens(t *testing.T) {
	t.Parallel()
	both := startTwoModels(t, 1)
	s := Start(t, "--engine=none", "--worker="+both.first.URL(0), "--block-size=64")
	s.WaitReady(1, 20*time.Second)
	if status, text := Post(t, s.Port+"/add_worker?url="+both.second.URL(0), ""); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	for _, text := range []string{"the sound and the fury", strings.Repeat("you and the others ", 20)} {
		for _, model := range []string{"first", "second"} {
			before := s.Metrics()
			a := s.askFor(model, text)
			page := s.Metrics()
			asked := func(page testkit.MetricsLines) float64 {
				return page[`kvrouter_prompt_source_total{source="worker_render"}`] + page[`kvrouter_prompt_source_total{source="worker_tokenize"}`]
			}
			if page[`kvrouter_prompt_source_total{source="local"}`] > 0 || asked(page) != asked(before)+1 || sum(page, "kvrouter_prompt_tokens_mismatch_total") > 0 || a.Prompt == 0 {
				t.Errorf("%q: %v prompts were told by workers, %v before: %s", model, asked(page), asked(before), a.Text)
			}
		}
	}
	if status, answer := Post(t, s.Port+"/find_best_worker", `{"token_ids":[1,2,3]}`); gjson.GetBytes(answer, "worker_id").Int() != 0 {
		t.Errorf("the default model is not the first: %d %s", status, answer)
	}
	page := string(s.Get(s.OpenAI + "/metrics"))
	for _, want := range []string{`block_size="64",model="first"`, `block_size="16",model="second"`} {
		if !strings.Contains(page, "kvrouter_model_info{"+want) {
			t.Errorf("no model of %s", want)
		}
	}
}

// TestWorkersOfASecondModelAreRegistered by a client, which routes to them by name.
func TestWorkersOfASecondModelAreRegistered(t *testing.T) {
	t.Parallel()
	both := startTwoModels(t, 1)
	s := Start(t, "--engine=none", "--policy=kv", "--model="+filepath.Join(both.dir, "first"), "--models-dir="+both.dir)
	register := func(id int, model string, from *Workers, size int) (lifecycle string, reasons []string) {
		t.Helper()
		p := from.Settings.Ports
		_, answer := Post(t, s.Port+"/workers", string(mocker.MustJSON(map[string]any{
			"worker_id": id, "model_name": model, "endpoint": from.URL(0), "block_size": size,
			"kv_events_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", p.KVEvents), "replay_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", p.KVReplay),
		})))
		for _, reason := range gjson.GetBytes(answer, "not_schedulable_reasons").Array() {
			reasons = append(reasons, reason.Str)
		}
		return gjson.GetBytes(answer, "lifecycle").Str, reasons
	}
	for i, c := range []struct {
		model string
		from  *Workers
		size  int
	}{{"first", both.first, 64}, {"second", both.second, 16}} {
		if lifecycle, reasons := register(i+1, c.model, c.from, c.size); lifecycle != selection.LifecycleSchedulable {
			t.Errorf("%+v: %s %q", c, lifecycle, reasons)
		}
	}
	for _, c := range []struct {
		query  string
		worker int64
		size   int64
	}{{`{"model_name":"second","token_ids":[1,2,3]}`, 2, 16}, {`{"model_name":"first","token_ids":[1,2,3]}`, 1, 64}, {`{"token_ids":[1,2,3]}`, 1, 64}} {
		_, answer := Post(t, s.Port+"/select", c.query)
		if got := gjson.ParseBytes(answer); got.Get("worker_id").Int() != c.worker || got.Get("block_size").Int() != c.size {
			t.Errorf("%s: %s", c.query, answer)
		}
		_, answer = Post(t, s.Port+"/find_best_worker", c.query)
		if got := gjson.GetBytes(answer, "worker_id").Int(); got != c.worker {
			t.Errorf("%s: %s", c.query, answer)
		}
	}
	s.askFor("second", strings.Repeat("you and the others ", 20))
	testkit.Eventually(t, 20*time.Second, "blocks in the index of the second", func() bool { return s.Blocks(kv.WorkerKey{Worker: 2}) > 0 })
	if n := s.Blocks(kv.WorkerKey{Worker: 1}); n != 0 {
		t.Errorf("%d blocks in the other's index", n)
	}
}
