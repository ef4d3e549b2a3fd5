package mocker

import (
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// TestAPausedEngineDoesWhatItsModeSays: what runs ends with abort, finishes, or stands still; what comes waits in every
// mode, and goes on afterwards.
func TestAPausedEngineDoesWhatItsModeSays(t *testing.T) {
	const aborted, finished, stands = "aborted", "finished", "stands"
	for _, c := range []struct{ api, pause, body, running string }{
		{"vllm", "/pause", " ", aborted},
		{"vllm", "/pause?mode=wait", " ", finished},
		{"vllm", "/pause?mode=keep", " ", stands},
		{"vllm", "/pause?mode=keep&clear_cache=false", " ", stands},
		{"sglang", "/pause_generation", `{}`, aborted},
		{"sglang", "/pause_generation", `{"mode":"retract"}`, stands},
		{"sglang", "/pause_generation", `{"mode":"in_place"}`, stands},
	} {
		t.Run(c.api+c.pause+c.body, func(t *testing.T) {
			t.Parallel()
			w := testWorker(t, func(s *Settings) { s.API, s.SpeedupRatio = c.api, 5 })
			resume := map[string]string{"vllm": "/resume", "sglang": "/continue_generation"}[c.api]
			send := func(tokens string) chan string {
				out := make(chan string, 1)
				go func() {
					_, text := w.ask(t, "/v1/completions", `{"model":"mock","prompt":"one two three four","ignore_eos":true,"max_tokens":`+tokens+`}`)
					out <- gjson.Get(text, "choices.0.finish_reason").Str
				}()
				return out
			}
			first := send("200")
			testkit.Eventually(t, 10*time.Second, "it runs", func() bool { return w.Ranks[0].CurrentLoad().Running == 1 })
			if status, text := w.ask(t, c.pause, c.body); status != 200 {
				t.Fatalf("%d %s", status, text)
			}
			if c.running != stands {
				want := map[string]string{aborted: "abort", finished: "length"}[c.running]
				if got := <-first; got != want {
					t.Errorf("what ran ended with %q, want %q", got, want)
				}
			}
			second := send("1")
			testkit.Eventually(t, 10*time.Second, "it waits", func() bool { return w.Ranks[0].CurrentLoad().Waiting >= 1 })
			select {
			case got := <-second:
				t.Errorf("a request was answered by a paused engine: %q", got)
			case got := <-first:
				t.Errorf("what ran has ended: %q", got)
			default:
			}
			if status, _ := w.ask(t, resume, `{}`); status != 200 {
				t.Fatal(status)
			}
			if got := <-second; got != "length" {
				t.Errorf("what waited ended with %q", got)
			}
			if c.running == stands {
				if got := <-first; got != "length" {
					t.Errorf("what stood still ended with %q", got)
				}
			}
		})
	}
}

func TestUpdatesChangeTheVersionOfTheWeights(t *testing.T) {
	for api, calls := range map[string][3]string{
		"vllm":   {"/finish_weight_update", `{"weight_version":"7"}`, "/weight_info"},
		"sglang": {"/update_weights_from_disk", `{"model_path":"/m","weight_version":"7"}`, "/model_info"},
	} {
		w := testWorker(t, func(s *Settings) { s.API = api })
		version := func() string {
			_, text := w.ask(t, calls[2], "")
			return gjson.Get(text, "weight_version").Str
		}
		before := version()
		if status, text := w.ask(t, calls[0], calls[1]); status != 200 || before != "default" || version() != "7" {
			t.Errorf("%s: %d %s: version %q, before %q", api, status, text, version(), before)
		}
		if _, text := w.ask(t, "/generate", `{"input_ids":[1,2],"sampling_params":{"max_new_tokens":1}}`); api == "sglang" && !strings.Contains(text, `"weight_version":"7"`) {
			t.Error(text)
		}
	}
}
