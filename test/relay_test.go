package test

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/relay"
	"kvrouter/internal/testkit"
)

// TestTheRelayTellsWhatTheWorkersHold follows the relay of a router over mock workers: it
// tells what the engines then find, and nothing of a router that has ended.
func TestTheRelayTellsWhatTheWorkersHold(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	port := testkit.FreePorts(t, 1)
	s := StartMocks(t, 2, fmt.Sprintf("--relay-port=%d", port), "--relay-data-center=here", "--policy=kv", "--mock-lora=sql")
	c, err := relay.NewClient(relay.Following{Address: fmt.Sprintf("127.0.0.1:%d", port), Subscriber: "test", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	testkit.Background(t, c.Run)
	random := rand.New(rand.NewPCG(5, 5))
	model := s.Workers.Settings.ServedModelName
	for range 3 {
		messages := Say(Words(random, 400))
		a, err := s.Chat(t.Context(), messages, true, 4)
		if err != nil || !a.Finished {
			t.Fatalf("%+v, %v", a, err)
		}
		body, _ := json.Marshal(map[string]any{"messages": messages})
		_, text := Post(t, s.OpenAI+"/tokenize", string(body))
		prompt := relay.Prompt{Model: model}
		if err := json.Unmarshal([]byte(gjson.GetBytes(text, "tokens").Raw), &prompt.Tokens); err != nil {
			t.Fatal(err)
		}
		want := a.Prompt / 64
		testkit.Eventually(t, 20*time.Second, fmt.Sprintf("%d blocks are told", want), func() bool {
			matches, err := c.Match(&prompt)
			return err == nil && len(matches) == 1 && matches[0].State == relay.Ready && matches[0].Loaded && matches[0].Blocks == want
		})
		if again, err := s.Chat(t.Context(), messages, true, 4); err != nil || again.Cached != (a.Prompt-1)/64*64 {
			t.Errorf("the engine found %d tokens of %d, %v", again.Cached, a.Prompt, err)
		}
		prompt.Tokens[0]++
		if matches, err := c.Match(&prompt); err != nil || matches[0].Blocks != 0 {
			t.Errorf("another prompt: %+v, %v", matches, err)
		}
		prompt.Model, prompt.Tokens[0] = "sql", prompt.Tokens[0]-1
		if matches, err := c.Match(&prompt); err != nil || len(matches) != 1 || matches[0].Blocks != 0 {
			t.Errorf("another adapter: %+v, %v", matches, err)
		}
	}
	if told, held := s.Metrics()["kvrouter_relay_blocks"], s.Held(s.Keys()[0])+s.Held(s.Keys()[1]); told < 1 || int(told) > held {
		t.Errorf("%v blocks are told, %d are held", told, held)
	}
	s.Stop()
	testkit.Eventually(t, 20*time.Second, "nothing is known of a router that has ended", func() bool {
		matches, err := c.Match(&relay.Prompt{Model: model})
		return err != nil && len(matches) == 0
	})
}

// startRelayed starts a router over mock workers, and another one above it that knows them
// by the relay alone.
func startRelayed(t *testing.T) (upper *Router, cell *Mocks) {
	t.Helper()
	port := testkit.FreePorts(t, 1)
	cell = StartMocks(t, 2, "--policy=kv", fmt.Sprintf("--relay-port=%d", port)) // which always goes where the blocks are
	upper = Start(t, "--engine=none", "--policy=kv", "--model="+BuiltinModel(t), "--served-model-name="+cell.Workers.Settings.ServedModelName,
		"--worker=url="+cell.OpenAI+",id=5", fmt.Sprintf("--relay-cell=5=127.0.0.1:%d", port))
	upper.WaitReady(1, 30*time.Second)
	testkit.Eventually(t, 20*time.Second, "the relay is known", func() bool { return upper.Metrics()[`kvrouter_relay_cell_known{worker_id="5"}`] == 1 })
	return upper, cell
}

// TestACellIsPredictedByItsRelay has a router above another one predict what the engines of
// the lower one find.
func TestACellIsPredictedByItsRelay(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	upper, _ := startRelayed(t)
	random := rand.New(rand.NewPCG(6, 6))
	messages := Say(Words(random, 200))
	for turn := range 4 {
		a, err := upper.Chat(t.Context(), messages, true, 4)
		if err != nil || !a.Finished || a.Worker != 5 {
			t.Fatalf("%+v, %v", a, err)
		}
		if a.Predicted != a.Cached || turn > 0 && a.Cached == 0 {
			t.Errorf("turn %d: %d tokens are predicted, %d found", turn, a.Predicted, a.Cached)
		}
		upper.Settled(messages, a)
		messages = append(messages, Message("assistant", a.Text), Message("user", Words(random, 50)))
	}
}
