package mocker

import (
	"fmt"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// pull asks a worker for one token with a source, and returns the cached tokens.
func pull(t *testing.T, w *Worker, prompt, host string, port int) int64 {
	t.Helper()
	status, answer := w.ask(t, "/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":1,"kv_transfer_params":{"remote_kv_source":{"kv_request_id":"r","remote_host":%q,"remote_port":%d}}}`, prompt, host, port))
	if status != 200 {
		t.Fatalf("%d %s", status, answer)
	}
	return gjson.Get(answer, "usage.prompt_tokens_details.cached_tokens").Int()
}

// pulling are two workers that pull from each other.
func pulling(t *testing.T, change func(*Settings)) []*Worker {
	return vllmWorkers(t, 2, func(s *Settings) {
		small(s)
		s.PeerBandwidth = 25
		if change != nil {
			change(s)
		}
	})
}

func TestAWorkerPullsWhatItsSourceHasInHostMemory(t *testing.T) {
	workers := pulling(t, nil)
	prompt := tokensOf("a", 641)
	complete(t, workers[0], prompt)
	at := workers[0].cfg.Ports.HTTP
	if got := pull(t, workers[1], prompt, "127.0.0.1", at); got != 640 {
		t.Errorf("%d cached, want 640", got)
	}
	_, page := workers[1].ask(t, "/metrics", "")
	for _, want := range []string{`prompt_tokens_cached_by_source_total{engine="0",model_name="mock",source="p2p"} 640`, `tier="2:p2p"`} {
		if !strings.Contains(page, want) {
			t.Errorf("the metrics lack %s", want)
		}
	}
	settledEvents(t, workers[1], "CPU", 10) // a copy stays
	if got := complete(t, workers[1], prompt); got != 640 {
		t.Errorf("%d cached the second time", got)
	}
}

// TestAPullThatFailsIsComputed: the source lacks the blocks, does not answer or is none, or
// the fault is asked for.
func TestAPullThatFailsIsComputed(t *testing.T) {
	for _, test := range []struct {
		name   string
		prompt string
		port   func(w *Worker) int
		change func(*Settings)
	}{
		{"unknown prompt", "b", func(w *Worker) int { return w.cfg.Ports.HTTP }, nil},
		{"no source listens", "a", func(*Worker) int { return 1 }, nil},
		{"the fault", "a", func(w *Worker) int { return w.cfg.Ports.HTTP }, func(s *Settings) { s.PeerFailures = 1 }},
	} {
		t.Run(test.name, func(t *testing.T) {
			workers := pulling(t, test.change)
			complete(t, workers[0], tokensOf("a", 641))
			if got := pull(t, workers[1], tokensOf(test.prompt, 641), "127.0.0.1", test.port(workers[0])); got != 0 {
				t.Errorf("%d cached", got)
			}
		})
	}
}
