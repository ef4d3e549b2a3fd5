package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
)

// toldValues are the labels whose values the document lists, where the value is
// no HTTP status.
var toldValues = []string{"kind", "result", "source", "stage", "reason", "event_type"}

// familiesOf reads a router's page.
func familiesOf(t *testing.T, s *Router) map[string]*dto.MetricFamily {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(s.MetricsPage()))
	if err != nil {
		t.Fatal(err)
	}
	return families
}

// metricsOf returns the families of a router's page, as the rows of the document
// write them: type and labels. The document must name their values of toldValues.
func metricsOf(t *testing.T, s *Router, document string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for name, family := range familiesOf(t, s) {
		if regexp.MustCompile("^(go|process|promhttp)_").MatchString(name) {
			continue
		}
		for _, metric := range family.Metric {
			var labels []string
			for _, label := range metric.Label {
				labels = append(labels, label.GetName())
				if slices.Contains(toldValues, label.GetName()) && !regexp.MustCompile(`\b`+label.GetValue()+`\b`).MatchString(document) {
					t.Errorf("docs/metrics*.md does not tell of the %s %q of %s", label.GetName(), label.GetValue(), name)
				}
			}
			row := metricRow(strings.ToLower(family.GetType().String()), labels)
			if other, seen := found[name]; seen && other != row {
				t.Errorf("%s has series of %s and of %s", name, other, row)
			}
			found[name] = row
		}
	}
	return found
}

// metricRow is a family's type and labels, whatever their order.
func metricRow(kind string, labels []string) string {
	slices.Sort(labels)
	return fmt.Sprintf("%s of %q", kind, labels)
}

// TestMetricsPage holds the pages of metrics against what running routers show.
func TestMetricsPage(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	text := MetricsPages(t)
	rows := map[string]string{}
	for _, match := range regexp.MustCompile("(?m)^\\| `([a-z_]+)` \\| ([a-z]+) \\| (.*?) \\| .+ \\|$").FindAllStringSubmatch(text, -1) {
		if _, twice := rows[match[1]]; twice {
			t.Errorf("docs/metrics*.md has %s twice", match[1])
		}
		var labels []string
		for _, label := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(match[3], -1) {
			labels = append(labels, label[1])
		}
		rows[match[1]] = metricRow(match[2], labels)
	}
	if lines := strings.Count(text, "\n| `"); lines != len(rows) {
		t.Errorf("docs/metrics*.md has %d rows, of which %d tell name, type, labels and meaning", lines, len(rows))
	}

	found := map[string]string{}
	look := func(s *Router) {
		for name, row := range metricsOf(t, s, text) {
			if other, seen := found[name]; seen && other != row {
				t.Errorf("%s is %s with one router and %s with another", name, other, row)
			}
			found[name] = row
		}
	}
	t.Run("thompson, prefill and decode apart, replicas", func(t *testing.T) {
		s := StartPairs(t, kv.KindNIXL, 1, 1, "--policy=thompson", "--session-header=x-session-id", "--cluster=test", "--cluster-port=0")
		for i := range 3 {
			if a, err := s.Chat(t.Context(), LongPrompt(i), i > 0, 8); err != nil || !a.Finished {
				t.Fatalf("%+v, %v", a, err)
			}
		}
		testkit.Eventually(t, 20*time.Second, "the loads of the workers are published", func() bool {
			look(s.Router)
			return found["kvrouter_worker_running_requests"] != "" && found["kvrouter_kv_event_lag_seconds"] != ""
		})
	})
	t.Run("keys, gateways", func(t *testing.T) {
		s := StartMocks(t, 1, keysFile(t, "- {name: a, key: key-a, limits: {requests-per-second: 1, concurrent-requests: 1, prompt-tokens-per-minute: 1}}"), fmt.Sprintf("--ext-proc-port=%d", testkit.FreePorts(t, 1)))
		look(s.Router)
	})
	t.Run("cells", func(t *testing.T) {
		tree := plantCells(t, 1, 1)
		look(tree.cells[0].Router)
		testkit.Eventually(t, 20*time.Second, "the reports of the cell count", func() bool {
			look(tree.uppers[0])
			return found["kvrouter_cell_late_seconds"] != "" && found["kvrouter_cell_summary_bytes"] != ""
		})
	})
	t.Run("a cell by its relay", func(t *testing.T) {
		look(startRelayed(t).Router)
	})
	t.Run("traced", func(t *testing.T) {
		look(startTraced(t, traceTo(deadURL(t)), 1).Router)
	})
	t.Run("adapters", func(t *testing.T) {
		s := StartMocks(t, 1, "--mock=lora=sql")
		s.ask(map[string]any{"model": "sql", "messages": Say("Hi"), "max_tokens": 1})
		look(s.Router)
	})
	t.Run("pulls", func(t *testing.T) {
		s := startPulling(t, 0)
		s.pull(t)
		look(s.Router)
	})
	t.Run("lower tiers", func(t *testing.T) {
		for _, api := range []string{"vllm", "sglang"} {
			farm := StartMocks(t, 1, "--mock=api="+api, "--mock=host-blocks=70", "--mock=disk-blocks=200", "--mock=num-gpu-blocks=60", "--speedup-ratio=100")
			s := NewTierSite(farm.Router)
			s.Quiet = 40 * time.Millisecond
			s.WaitReady(1, time.Minute)
			s.Load(30, "load", true)
			look(s.Router)
			r, seen := s.Router, "kvrouter_tier_predictions_total"
			if api == "sglang" { // only its answers have the tiers
				for range 2 {
					Post(t, s.OpenAI+"/generate", fmt.Sprintf(`{"input_ids":%s,"sampling_params":{"max_new_tokens":1}}`, tokens.AppendTokens(nil, s.Talks[0])))
				}
			} else { // a new router reads the counters of loads every 5 s from the start
				r, seen = Start(t, append([]string{"--engine=none"}, farm.Attach()...)...), "kvrouter_worker_tier_bandwidth_bytes"
			}
			testkit.Eventually(t, time.Minute, seen, func() bool {
				if api == "vllm" {
					s.Load(5, "more load", true)
				}
				look(r)
				return found[seen] != ""
			})
		}
	})
	t.Run("work, workers that fail", func(t *testing.T) {
		s := StartMocks(t, 2, "--eject-after=3", "--rollouts")
		Post(t, s.OpenAI+"/pause", "")
		look(s.Router)
		Post(t, s.OpenAI+"/resume", "")
		for i := range s.Count {
			s.Mocker.Worker(i).Failing.Store(500)
		}
		for _, content := range []string{`"Hi"`, `[{"type":"image_url","image_url":{"url":"data:,"}}]`} { // the latter cannot be rendered here
			Post(t, s.OpenAI+testkit.ChatPath, `{"messages":[{"role":"user","content":`+content+`}]}`)
		}
		for range 3 {
			s.pinned(kv.WorkerKey{Worker: 1}, map[string]any{"messages": Say("Hi")})
		}
		look(s.Router)
	})
	t.Run("kv, a worker that is full", func(t *testing.T) {
		release := make(chan struct{})
		worker := fakeWorker(t, func(w http.ResponseWriter, r *http.Request) {
			body, _ := io.ReadAll(r.Body)
			if strings.Contains(string(body), "wait") {
				select {
				case <-release:
				case <-r.Context().Done():
				}
			}
			w.Header().Set("Content-Type", "text/event-stream")
			for range 3 { // one by one
				io.WriteString(w, `data: {"choices":[{"index":0,"delta":{"content":"x"}}]}`+"\n\n")
				w.(http.Flusher).Flush()
				<-time.After(10 * time.Millisecond)
			}
			io.WriteString(w, `data: {"choices":[],"usage":{"prompt_tokens":2,"completion_tokens":3}}`+"\n\ndata: [DONE]\n\n") // other than were counted
		})
		s := Start(t, "--engine=none", "--policy=kv", "--no-kv-events", "--served-model-name=mock", "--model="+BuiltinModel(t), "--worker="+worker, "--active-prefill-tokens-threshold=1")
		s.WaitReady(1, 20*time.Second)
		s.ask(map[string]any{"messages": Say("Hi"), "stream": true})
		var waiting sync.WaitGroup
		waiting.Go(func() { s.ask(map[string]any{"messages": Say("wait")}) })
		testkit.Eventually(t, 10*time.Second, "a prompt is being computed", func() bool { return s.InFlight() == 1 })
		if busy := s.ask(map[string]any{"messages": Say("Hi")}); busy.StatusCode != http.StatusServiceUnavailable {
			t.Errorf("a busy worker: %s %s", busy.Status, busy.Text)
		}
		look(s)
		close(release)
		waiting.Wait()
	})
	t.Run("kv, a queue that is full", func(t *testing.T) {
		s := StartMocker(t, 1, "--policy=kv", "--speedup-ratio=0.005", "--router-queue-threshold=0", "--router-queue-limit=1")
		ctx, leave := context.WithCancel(t.Context())
		var waiting sync.WaitGroup
		for i := range 2 {
			waiting.Go(func() {
				if response, err := streamed(s, ctx, i, 3); err == nil {
					response.Body.Close()
				}
			})
			testkit.Eventually(t, 10*time.Second, "one is computed, the other waits", func() bool {
				return s.InFlight() == 1 && sum(s.Metrics(), "dynamo_frontend_router_queue_pending_requests") == float64(i)
			})
		}
		if full, err := streamed(s, ctx, 2, 3); err != nil || full.StatusCode < 500 {
			t.Errorf("a full queue: %+v, %v", full, err)
		} else {
			full.Body.Close()
		}
		look(s)
		leave()
		waiting.Wait()
	})

	for _, name := range slices.Sorted(maps.Keys(found)) {
		if row, told := rows[name]; !told {
			t.Errorf("docs/metrics*.md does not tell of %s, a %s", name, found[name])
		} else if row != found[name] {
			t.Errorf("docs/metrics*.md has %s as a %s; it is a %s", name, row, found[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		if found[name] == "" {
			t.Errorf("docs/metrics*.md describes %s, which no router exports", name)
		}
	}
}
