package main

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/models"
	"kvrouter/internal/selection"
	"kvrouter/internal/testkit"
)

// twoModels are mock workers of two base models that have nothing in common: other
// tokenizers, templates and block sizes.
type twoModels struct {
	first, second *mockSite
	dir           string // with a folder of each one's files
}

// startTwoModels starts so many mock workers of each model.
func startTwoModels(t *testing.T, workers int) twoModels {
	t.Helper()
	m := twoModels{dir: t.TempDir()}
	testkit.TokenizerFolder(t, filepath.Join(m.dir, "first"), [2]string{"t", "h"}, [2]string{"th", "e"})
	testkit.TokenizerFolder(t, filepath.Join(m.dir, "second"), [2]string{"o", "u"}, [2]string{"a", "n"}, [2]string{"an", "d"})
	m.first = startMockSite(t, workers, "--model="+filepath.Join(m.dir, "first"), "--mock-lora=sql")
	m.second = m.first.mocksBeside(workers, "--model="+filepath.Join(m.dir, "second"), "--block-size=16", "--mock-lora=legal")
	return m
}

// mocksBeside starts a router with mock workers of its own beside that of s, which ends
// before it.
func (s *mockSite) mocksBeside(workers int, args ...string) *mockSite {
	ports := testkit.FreePorts(s.t, 4*workers)
	port := func(flag string, at int) string { return fmt.Sprintf("--%s=%d", flag, ports+at*workers) }
	return s.route(append([]string{
		"--engine=mocker", "--seed=1", "--speedup-ratio=20", "--drain-timeout=5s", fmt.Sprintf("--num-workers=%d", workers),
		port("base-worker-port", 0), port("base-kv-events-port", 1), port("base-kv-replay-port", 2), port("base-metrics-port", 3),
	}, args...)...)
}

// entries lists the workers of a site as a file of workers does.
func (s *mockSite) entries(name string) (list []string) {
	for i := range s.app.config.NumWorkers {
		list = append(list, fmt.Sprintf("{name: %s%d, url: %q}", name, i, s.workerURL(i)))
	}
	return list
}

// askFor sends a chat to a model.
func (s *mockSite) askFor(t *testing.T, model, text string) (answer gjson.Result, predicted int64) {
	t.Helper()
	return s.ask(t, mocker.MustJSON(map[string]any{"model": model, "messages": say(text), "max_tokens": 1}))
}

// statusFor is the status of a chat with a model.
func (s *mockSite) statusFor(t *testing.T, model string) int {
	t.Helper()
	status, _ := post(t, s.openAI+testkit.ChatPath, string(mocker.MustJSON(map[string]any{"model": model, "messages": say("Hi"), "max_tokens": 1})))
	return status
}

// tokensAt returns the number of tokens and the tokens that POST /tokenize gives.
func tokensAt(t *testing.T, url string, body []byte) string {
	t.Helper()
	_, answer := post(t, url+"/tokenize", string(body))
	return fmt.Sprint(gjson.GetBytes(answer, "count").Int(), " ", gjson.GetBytes(answer, "tokens").Raw)
}

// of is a model of the router.
func (s *mockSite) of(t *testing.T, name string) *models.Model {
	t.Helper()
	m, known := s.app.models.Of(name)
	if !known {
		t.Fatalf("no model %s", name)
	}
	return m
}

// waitBlocks waits until a model's index has blocks.
func waitBlocks(t *testing.T, m *models.Model) {
	t.Helper()
	testkit.Eventually(t, 20*time.Second, "blocks in the index of "+m.Name, func() bool {
		return slices.ContainsFunc(m.Index.Workers(), func(w kv.WorkerKey) bool { return m.Index.Blocks(w) > 0 })
	})
}

// TestTwoModelsAreServedSideBySide: by discovery, each with its own tokenizer, block
// size, index and adapters.
func TestTwoModelsAreServedSideBySide(t *testing.T) {
	both := startTwoModels(t, 2)
	file := &workersFile{t, filepath.Join(t.TempDir(), "workers.yaml")}
	first, second := both.first.entries("a"), both.second.entries("b")
	file.write(append(second, first...)...) // whichever comes first
	s := both.first.route("--policy=kv", "--discovery=file:"+file.path, "--model="+filepath.Join(both.dir, "first"), "--models-dir="+both.dir)
	up := func(workers int) {
		t.Helper()
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d workers are up", workers), func() bool { return s.app.models.Count() == workers })
	}
	up(4)

	t.Run("all are listed", func(t *testing.T) {
		_, list := testkit.HTTPGet(t, s.openAI+"/v1/models")
		names := []string{}
		for _, name := range gjson.GetBytes(list, "data.#.id").Array() {
			names = append(names, name.Str)
		}
		slices.Sort(names)
		if want := []string{"first", "legal", "second", "sql"}; !slices.Equal(names, want) {
			t.Errorf("models %q, want %q", names, want)
		}
		shown := map[string]int{}
		for _, w := range s.workers() {
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
				m := s.of(t, model)
				local := m.Tokens.Stats().Local
				answer, _ := s.askFor(t, model, text)
				counts[model] = answer.Get("usage.prompt_tokens").Int()
				if now := m.Tokens.Stats(); now.Local != local+1 || len(now.Mismatches) > 0 || len(now.Disabled) > 0 {
					t.Errorf("text %d for %q: %+v", i, model, now)
				}
				engine := both.first
				if model == "second" || model == "legal" {
					engine = both.second
				}
				body := mocker.MustJSON(map[string]any{"model": model, "messages": say(text)})
				if here, there := tokensAt(t, s.openAI, body), tokensAt(t, engine.workerURL(0), body); here != there || !strings.HasPrefix(here, fmt.Sprintf("%d ", counts[model])) {
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
			size  int64
			again bool
		}{{"first", 64, false}, {"second", 16, false}, {"first", 64, true}, {"second", 16, true}, {"sql", 64, false}, {"legal", 16, false}, {"legal", 16, true}} {
			answer, predicted := s.askFor(t, c.model, text)
			cached := answer.Get("usage.prompt_tokens_details.cached_tokens").Int()
			if predicted != cached || predicted%c.size != 0 || (predicted > 0) != c.again {
				t.Errorf("%+v: %d tokens predicted, %d cached", c, predicted, cached)
			}
			m := s.of(t, c.model)
			testkit.Eventually(t, 20*time.Second, "its blocks are known", func() bool {
				_, overlap := s.overlap(t, m, text, c.model)
				return overlap
			})
		}
	})

	t.Run("a name that nobody serves", func(t *testing.T) {
		if status := s.statusFor(t, "third"); status != http.StatusNotFound {
			t.Errorf("status %d", status)
		}
	})

	t.Run("a form names its model", func(t *testing.T) {
		before := s.of(t, "second").Requests.Load()
		var form bytes.Buffer
		w := multipart.NewWriter(&form)
		w.WriteField("model", "second")
		w.Close()
		response, err := http.Post(s.openAI+"/v1/audio/transcriptions", w.FormDataContentType(), &form)
		if err != nil {
			t.Fatal(err)
		}
		io.Copy(io.Discard, response.Body)
		response.Body.Close()
		if now := s.of(t, "second").Requests.Load(); now != before+1 {
			t.Errorf("%d requests for it, %d before", now, before)
		}
	})

	t.Run("metrics by model", func(t *testing.T) {
		_, page := testkit.HTTPGet(t, s.openAI+"/metrics")
		for _, want := range []string{
			`kvrouter_model_info{block_size="64",model="first",tokenizer="router"} 1`, `kvrouter_model_info{block_size="16",model="second",tokenizer="router"} 1`,
			`kvrouter_model_ranks{model="first"} 2`, `kvrouter_model_ranks{model="second"} 2`, `kvrouter_model_in_flight{model="second"} 0`,
			fmt.Sprintf(`kvrouter_model_requests_total{model="second"} %d`, s.of(t, "second").Requests.Load()),
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
		testkit.Eventually(t, 20*time.Second, "its workers are taken out", func() bool { return len(s.workers()) == 2 })
		if status := s.statusFor(t, "second"); status != http.StatusServiceUnavailable {
			t.Errorf("while it is away: status %d", status)
		}
		if status := s.statusFor(t, "first"); status != http.StatusOK {
			t.Errorf("the other: status %d", status)
		}
		file.write(append(first, second...)...)
		up(4)
		answer, _ := s.askFor(t, "second", "the sound and the fury")
		if stats := s.of(t, "second").Tokens.Stats(); len(stats.Mismatches) > 0 || !answer.Get("usage.prompt_tokens").Exists() {
			t.Errorf("%+v: %s", stats, answer.Raw)
		}
		if n := len(s.app.models.All()); n != 2 {
			t.Errorf("%d models", n)
		}
	})
}

// overlap tells the most tokens of a chat that a worker of the model is known to hold,
// and whether there are any.
func (s *mockSite) overlap(t *testing.T, m *models.Model, text, model string) (most int, some bool) {
	t.Helper()
	_, answer := post(t, s.openAI+"/tokenize", string(mocker.MustJSON(map[string]any{"model": model, "messages": say(text)})))
	lora := ""
	if model == "sql" || model == "legal" {
		lora = model
	}
	_, scores := post(t, s.selection+"/overlap_scores", fmt.Sprintf(`{"model_name":%q,"lora_name":%q,"token_ids":%s}`, model, lora, gjson.GetBytes(answer, "tokens").Raw))
	if size := gjson.GetBytes(scores, "block_size").Int(); size != int64(m.Router.BlockSize()) {
		t.Errorf("scores of %s in blocks of %d: %s", model, size, scores)
	}
	for _, blocks := range gjson.GetBytes(scores, "workers.#.device_blocks").Array() {
		most = max(most, int(blocks.Int())*m.Router.BlockSize())
	}
	return most, most > 0
}

// TestTwoModelsWithoutFilesAreAskedForTheirTokens: a router that was told of no model
// takes the one of the worker that comes first for its own, and asks each one's own
// workers.
func TestTwoModelsWithoutFilesAreAskedForTheirTokens(t *testing.T) {
	both := startTwoModels(t, 1)
	s := both.first.route("--worker="+both.first.workerURL(0), "--block-size=64")
	testkit.Eventually(t, 20*time.Second, "the first is up", func() bool { return s.app.router.Count() == 1 })
	if status, text := post(t, s.selection+"/add_worker?url="+both.second.workerURL(0), ""); status != http.StatusOK {
		t.Fatalf("%d %s", status, text)
	}
	for _, text := range []string{"the sound and the fury", strings.Repeat("you and the others ", 20)} {
		for _, model := range []string{"first", "second"} {
			m := s.of(t, model)
			answer, _ := s.askFor(t, model, text)
			if stats := m.Tokens.Stats(); stats.Local > 0 || stats.WorkerRender+stats.WorkerTokenize == 0 || len(stats.Mismatches) > 0 {
				t.Errorf("%q: %+v of %s", model, stats, answer.Raw)
			}
		}
	}
	if s.of(t, "first") != s.app.models.Default() || s.of(t, "second").Router.BlockSize() != 16 {
		t.Errorf("the default model has blocks of %d, the second of %d", s.app.router.BlockSize(), s.of(t, "second").Router.BlockSize())
	}
}

// TestWorkersOfASecondModelAreRegistered by a client, which routes to them by name.
func TestWorkersOfASecondModelAreRegistered(t *testing.T) {
	both := startTwoModels(t, 1)
	s := both.first.route("--policy=kv", "--model="+filepath.Join(both.dir, "first"), "--models-dir="+both.dir)
	register := func(id int, model string, from *mockSite, size int) (lifecycle string, reasons []string) {
		t.Helper()
		c := from.app.config
		_, answer := post(t, s.selection+"/workers", string(mocker.MustJSON(map[string]any{
			"worker_id": id, "model_name": model, "endpoint": from.workerURL(0), "block_size": size,
			"kv_events_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", c.BaseKVEventsPort), "replay_endpoint": fmt.Sprintf("tcp://127.0.0.1:%d", c.BaseKVReplayPort),
		})))
		for _, reason := range gjson.GetBytes(answer, "not_schedulable_reasons").Array() {
			reasons = append(reasons, reason.Str)
		}
		return gjson.GetBytes(answer, "lifecycle").Str, reasons
	}
	for i, c := range []struct {
		model  string
		from   *mockSite
		size   int
		reason string
	}{{"first", both.first, 64, ""}, {"second", both.second, 16, ""}, {"second", both.second, 32, "existing=16 requested=32"}, {"first", both.first, 16, "existing=64 requested=16"}} {
		lifecycle, reasons := register(i+1, c.model, c.from, c.size)
		if (lifecycle == selection.LifecycleSchedulable) != (c.reason == "") || c.reason != "" && !strings.Contains(strings.Join(reasons, " "), c.reason) {
			t.Errorf("%+v: %s %q", c, lifecycle, reasons)
		}
	}
	for _, c := range []struct {
		query  string
		worker int64
		size   int64
	}{{`{"model_name":"second","token_ids":[1,2,3]}`, 2, 16}, {`{"model_name":"first","token_ids":[1,2,3]}`, 1, 64}, {`{"token_ids":[1,2,3]}`, 1, 64}} {
		_, answer := post(t, s.selection+"/select", c.query)
		if got := gjson.ParseBytes(answer); got.Get("worker_id").Int() != c.worker || got.Get("block_size").Int() != c.size {
			t.Errorf("%s: %s", c.query, answer)
		}
		_, answer = post(t, s.selection+"/find_best_worker", c.query)
		if got := gjson.GetBytes(answer, "worker_id").Int(); got != c.worker {
			t.Errorf("%s: %s", c.query, answer)
		}
	}
	s.askFor(t, "second", strings.Repeat("you and the others ", 20))
	waitBlocks(t, s.of(t, "second"))
	for _, w := range s.of(t, "first").Index.Workers() {
		t.Errorf("worker %v has blocks in the other's index", w)
	}
}
