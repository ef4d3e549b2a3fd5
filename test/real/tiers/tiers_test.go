package tiers

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// Sizes of the workers: a cache that the conversations do not fit into, and host memory
// for ten times as much. A block of the test model has 1,474,560 bytes.
const (
	deviceBlocks = 60
	hostGiB      = 600 * 1474560. / (1 << 30)
	longest      = (deviceBlocks - 2) * 64
)

// requests is the number of prompts that KVROUTER_TIERS asks of a fresh load. A test that
// `make test-tiers` does not run is skipped.
func requests(t *testing.T) int {
	t.Helper()
	n, err := strconv.Atoi(os.Getenv("KVROUTER_TIERS"))
	if err != nil {
		t.Skip("make test-tiers runs it")
	}
	return n
}

func TestHostMemoryOfVLLM(t *testing.T) {
	n := requests(t)
	r := test.StartEngines(t, 2, []string{"VLLM_SERVER_DEV_MODE=1"}, fmt.Sprintf("--kv-offload-gib=%v", hostGiB), "--",
		"--num-gpu-blocks-override", strconv.Itoa(deviceBlocks), "--max-model-len", strconv.Itoa(longest))
	s := test.NewTierSite(r)
	s.Load(n, "fresh load", false)
	s.Loaded("host")

	// The tier survives the first reset, and not the second. The event is the same: what is
	// doubtful is not predicted until an answer has shown it.
	for _, path := range []string{"/reset_prefix_cache", "/reset_prefix_cache?reset_external=true"} {
		reset(s, path)
		settle(s, path)
		s.Load(20, "after "+path, false)
	}

	restart := another(t, s)
	other := restart()
	settle(other, "another router") // has read of the resets, and not of the answers after them
	other.Load(20, "another router", false)
	restart().Load(20, "a restarted router", false)

	kill(s)
	s.Load(20, "a restarted worker", false)
}

// kill ends the first worker, and waits until it is there again.
func kill(s *test.TierSite) {
	s.T.Helper()
	dies := s.Workers()[0]
	if err := syscall.Kill(-dies.PID, syscall.SIGKILL); err != nil {
		s.T.Fatal(err)
	}
	testkit.Eventually(s.T, time.Minute, "the worker seen dead", func() bool { return s.Workers()[0].Restarts > dies.Restarts })
	s.WaitReady(2, 8*time.Minute)
	s.Calm()
}

// reset empties the caches of all workers by a path of theirs.
func reset(s *test.TierSite, path string) {
	s.T.Helper()
	for _, w := range s.Workers() {
		s.Post(*w.Endpoint+path, "{}")
		s.Post(*w.Endpoint+"/v1/completions", `{"prompt":[1,2,3],"max_tokens":1}`) // vLLM publishes a reset with its next step
	}
	s.Calm()
}

// another returns what starts a router that has read the events of the workers of s, and none
// of their answers. Each call restarts that router, with the snapshot of its index.
func another(t *testing.T, s *test.TierSite) (restart func() *test.TierSite) {
	t.Helper()
	args := []string{"--engine=none", "--model=" + test.ModelFolder(), "--index-snapshot=" + filepath.Join(t.TempDir(), "index")}
	for _, w := range s.Workers() {
		args = append(args, "--worker=url="+*w.Endpoint)
	}
	port := testkit.FreePorts(t, 2)
	talks := s.Talks
	var other *test.TierSite
	return func() *test.TierSite {
		t.Helper()
		if other != nil {
			talks = other.Talks
			other.Stop()
		}
		other = test.NewTierSite(test.StartAt(t, test.Program, port, nil, args...))
		other.WaitReady(len(s.Workers()), time.Minute)
		other.Talks = talks
		other.Calm()
		return other
	}
}

// settle sends prompts until the answers have shown what doubtful tiers still have. Until then
// less may be predicted, and never more. Not all doubtful blocks need come up.
func settle(s *test.TierSite, after string) {
	s.T.Helper()
	sent := 0
	for ; sent < 30 && len(s.Doubtful()) > 0; sent++ {
		if f := s.Ask(s.Next()); f.Predicted > f.Cached {
			s.T.Errorf("after %s, request %d at worker %d: predicted %d, cached %d", after, sent, f.Worker, f.Predicted, f.Cached)
		}
	}
	s.T.Logf("after %s, workers %v are doubtful after %d requests", after, s.Doubtful(), sent)
}

// tiering returns the --kv-transfer-config of a vLLM worker with room for so many blocks in host
// memory, and a tier below it.
func tiering(blocks int, below string) string {
	return fmt.Sprintf(`{"kv_connector":"OffloadingConnector","kv_role":"kv_both","kv_connector_extra_config":{"spec_name":"TieringOffloadingSpec",`+
		`"cpu_bytes_to_use":%d,"self_describing_kv_events":true,"secondary_tiers":[%s]}}`, blocks*1474560, below)
}

func TestFilesOfVLLM(t *testing.T) {
	n := requests(t)
	config := tiering(90, fmt.Sprintf(`{"type":"fs","root_dir":%q,"n_read_threads":2,"n_write_threads":2,"enable_kv_events":true,"locality":"REMOTE"}`, filepath.Join(t.TempDir(), "store")))
	s := test.NewTierSite(test.StartEngines(t, 2, []string{"VLLM_SERVER_DEV_MODE=1"}, "--",
		"--num-gpu-blocks-override", strconv.Itoa(deviceBlocks), "--max-model-len", strconv.Itoa(longest), "--kv-transfer-config", config))
	s.Load(n, "fresh load", true)
	s.Loaded("disk")

	// Host memory is emptied, and the files are not.
	reset(s, "/reset_prefix_cache?reset_external=true")
	s.Load(20, "after a reset", true)

	restart := another(t, s)
	restart().Load(20, "another router", true)
	restart().Load(20, "a restarted router", true)
}

// TestPullsOfVLLM has one worker compute prompts that the other one is then asked for: it pulls
// their blocks, answers as the first one did, and computes them once the first one is away. Now
// and then two tokens are so close that a computed prompt and a pulled one differ.
func TestPullsOfVLLM(t *testing.T) {
	n := requests(t) / 10
	peers := testkit.FreePorts(t, 2)
	args := []string{"--engine=none", "--model=" + test.ModelFolder(), "--policy=work"}
	var servers []*test.Router
	for i := range 2 {
		config := tiering(600, fmt.Sprintf(`{"type":"p2p","host":"127.0.0.1","port":%d}`, peers+i))
		server := test.StartEngines(t, 1, []string{"VLLM_SERVER_DEV_MODE=1", "PYTHONHASHSEED=0"}, "--",
			"--num-gpu-blocks-override", strconv.Itoa(deviceBlocks), "--max-model-len", strconv.Itoa(longest), "--kv-transfer-config", config)
		servers = append(servers, server)
		args = append(args, fmt.Sprintf("--worker=url=%s,id=%d,p2p=127.0.0.1:%d", *server.Workers()[0].Endpoint, i, peers+i))
	}
	s := test.NewTierSite(test.Start(t, args...))
	s.WaitReady(2, time.Minute)
	s.Calm()

	pulled, differ := 0, 0
	for i := range n {
		prompt := s.Tokens(1500 + 64*i)
		first := s.AskOf(0, prompt)
		second := s.AskOf(1, prompt)
		if first.Text != second.Text {
			differ++
			t.Logf("prompt %d: the worker that computed it answers %q, the other one %q", i, first.Text, second.Text)
		}
		if second.Cached > 0 {
			pulled++
		}
		t.Logf("prompt %d of %d tokens: %d cached, %d predicted", i, second.Prompt, second.Cached, second.Predicted)
	}
	if differ > n/10 {
		t.Errorf("%d of %d answers differ", differ, n)
	}
	s.Loaded("p2p")
	results := map[string]int{}
	for _, result := range []string{"came", "part", "failed", "unreported"} {
		results[result] = int(s.Metrics()[fmt.Sprintf(`kvrouter_kv_pulls_total{dp_rank="0",result=%q,worker_id="1"}`, result)])
	}
	t.Logf("%d of %d prompts were pulled, results %v, %v tokens by the engine", pulled, n, results, s.Source("p2p"))
	if pulled < n/2 || results["came"] != pulled || results["failed"] > 1 {
		t.Errorf("%d of %d prompts were pulled, results %v", pulled, n, results)
	}

	prompt := s.Tokens(1500)
	s.AskOf(0, prompt)
	servers[0].Stop()
	testkit.Eventually(t, time.Minute, "the first worker seen away", func() bool {
		w, _ := s.Record(0)
		return w.Lifecycle != "schedulable"
	})
	if second := s.AskOf(1, prompt); second.Cached != 0 {
		t.Errorf("without the source: %d tokens cached", second.Cached)
	}
}

func TestHostMemoryOfSGLang(t *testing.T) {
	n := requests(t)
	s := test.NewTierSite(test.StartEngines(t, 2, nil, "--engine=sglang", "--kv-offload-gib=1", "--",
		"--max-total-tokens", strconv.Itoa(deviceBlocks*64), "--hicache-ratio", "10"))
	s.Load(n, "fresh load", false)
	s.Loaded("host")

	reset(s, "/flush_cache")
	s.Load(20, "after /flush_cache", false)

	restart := another(t, s)
	restart().Load(20, "another router", false)
	restart().Load(20, "a restarted router", false)

	kill(s)
	s.Load(20, "a restarted worker", false)
}
