package test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/selection"
	"kvrouter/internal/testkit"
)

// TestWorkersGetTokensOfLongPromptsAndAnswerAlike: the text of a mock's answer depends on the
// prompt's tokens. Routers with and without --send-tokens stand before the same worker.
func TestWorkersGetTokensOfLongPromptsAndAnswerAlike(t *testing.T) {
	t.Parallel()
	for _, api := range []string{"vllm", "sglang"} {
		t.Run(api, func(t *testing.T) {
			t.Parallel()
			w := StartWorkers(t, 1, "--mock=api="+api)
			r := RecordTokens(t, w.URL(0))
			attach := []string{"--engine=none", "--model=" + BuiltinModel(t), "--served-model-name=" + w.Settings.ServedModelName, "--worker=url=" + r.URL, "--no-kv-events"}
			auto, never := Start(t, attach...), Start(t, append(attach, "--send-tokens=never")...)
			auto.WaitReady(1, 30*time.Second)
			never.WaitReady(1, 30*time.Second)
			testkit.Eventually(t, 30*time.Second, "the worker shows that it takes tokens", func() bool {
				return slices.Equal(auto.Workers()[0].TakesTokens, []string{testkit.ChatPath, "/v1/completions"})
			})
			if takes := never.Workers()[0].TakesTokens; takes != nil {
				t.Errorf("with never: %s", takes)
			}
			r.forget()
			long := strings.Repeat("Some words of a long text. ", 250)
			chat, _ := json.Marshal(Say(long, "I see.", "Go on."))
			for _, c := range []struct{ path, body string }{
				{testkit.ChatPath, `{"messages":` + string(chat) + `,"max_tokens":20`},
				{"/v1/completions", fmt.Sprintf(`{"prompt":%q,"max_tokens":20`, long)},
				{testkit.ChatPath, `{"messages":[{"role":"user","content":"short"}],"max_tokens":20`},
			} {
				for _, stream := range []string{"", `,"stream":true,"stream_options":{"include_usage":true}`} {
					_, plain := Post(t, never.OpenAI+c.path, c.body+stream+"}")
					before := len(r.Sent())
					_, answer := Post(t, auto.OpenAI+c.path, c.body+stream+"}")
					sent := r.Sent()[before:]
					if want := !strings.Contains(c.body, "short"); (len(sent) == 1) != want {
						t.Errorf("%s%s: tokens sent: %v, want %v", c.path, stream, sent, want)
					}
					if before > 0 && len(sent) == 1 && sent[0] < 1024 {
						t.Errorf("%s%s: %d tokens sent", c.path, stream, sent[0])
					}
					if a, b := alike(plain), alike(answer); a != b || !strings.Contains(a, "20]") {
						t.Errorf("%s%s: with tokens\n%s\nwithout\n%s", c.path, stream, b, a)
					}
				}
			}
		})
	}
}

// TestPairsAnswerAlikeWithTokens: both legs of prefill and decode workers.
func TestPairsAnswerAlikeWithTokens(t *testing.T) {
	t.Parallel()
	s := StartPairs(t, kv.KindNIXL, 1, 1)
	testkit.Eventually(t, 30*time.Second, "both workers show that they take tokens", func() bool {
		return !slices.ContainsFunc(s.Router.Workers(), func(w selection.WorkerRecord) bool { return len(w.TakesTokens) != 2 })
	})
	alone := StartMocks(t, 1, "--send-tokens=never")
	long := strings.Repeat("Some words of a long text. ", 250)
	for i := range 6 {
		chat := Say(fmt.Sprint(i, long))
		want, err := alone.Chat(t.Context(), chat, i%2 == 0, 20)
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.Chat(t.Context(), chat, i%2 == 0, 20)
		if err != nil || got.Text != want.Text || got.Prompt != want.Prompt || got.Worker != 1 || !got.Finished {
			t.Errorf("chat %d: %+v, %v, want %+v", i, got, err, want)
		}
	}
	testkit.Eventually(t, 30*time.Second, "nothing is in flight", s.idle)
}
