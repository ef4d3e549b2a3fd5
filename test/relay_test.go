package test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/relaytest"
)

// relayedBlock is the block size of both routers, tokens.
const relayedBlock = 64

// relayed is a router above another one, which is worker 5 and has a relay.
type relayed struct {
	*Router
	cell  *Mocks
	relay *relaytest.Relay
	pool  relaytest.Pool
}

// startRelayed starts both routers, the lower one over mock workers. The upper one knows their
// blocks by the relay alone.
func startRelayed(t *testing.T) *relayed {
	t.Helper()
	cell := StartMocks(t, 2, "--policy=kv") // which always goes where the blocks are
	r := &relayed{cell: cell, relay: relaytest.Serve(t, 0, nil), pool: relaytest.NewPool(1 << 10)}
	model := r.cell.Workers.Settings.ServedModelName
	r.pool.BlockSize, r.pool.Models = relayedBlock, []relaytest.Model{{Name: model, Base: model}}
	r.relay.Announce(r.pool)
	r.relay.Hold(r.pool)
	r.Router = Start(t, "--engine=none", "--policy=kv", "--model="+BuiltinModel(t), "--served-model-name="+model,
		"--worker=url="+r.cell.OpenAI+",id=5", "--relay-cell=5="+r.relay.Address)
	r.WaitReady(1, 30*time.Second)
	testkit.Eventually(t, 20*time.Second, "the relay is known", func() bool {
		return r.Metrics()[`kvrouter_relay_cell_known{worker_id="5"}`] == 1
	})
	return r
}

// report has the relay report the blocks of a prompt that the cell has, and returns how many.
func (r *relayed) report(messages []map[string]string) int {
	r.T.Helper()
	body, _ := json.Marshal(map[string]any{"messages": messages})
	_, text := Post(r.T, r.OpenAI+"/tokenize", string(body))
	var tokens []uint32
	if err := json.Unmarshal([]byte(gjson.GetBytes(text, "tokens").Raw), &tokens); err != nil {
		r.T.Fatal(err)
	}
	blocks := 0
	for _, found := range r.cell.heldOf(messages) {
		blocks = max(blocks, found)
	}
	r.relay.Hold(r.pool, kv.SequenceHashes(nil, kv.HashBlocks(nil, tokens, relayedBlock, "", ""))[:blocks]...)
	testkit.Eventually(r.T, 20*time.Second, fmt.Sprintf("%d blocks are reported", blocks), func() bool {
		return int(r.Metrics()[`kvrouter_relay_cell_blocks{worker_id="5"}`]) == blocks
	})
	return blocks
}

// TestACellIsPredictedByItsRelay has a router above another one predict what the engines of
// the lower one find.
func TestACellIsPredictedByItsRelay(t *testing.T) {
	if testing.Short() {
		t.Skip("starts processes")
	}
	t.Parallel()
	r := startRelayed(t)
	random := rand.New(rand.NewPCG(6, 6))
	messages := Say(Words(random, 200))
	for turn := range 4 {
		blocks := r.report(messages)
		a, err := r.Chat(t.Context(), messages, true, 4)
		if err != nil || !a.Finished || a.Worker != 5 {
			t.Fatalf("%+v, %v", a, err)
		}
		if a.Predicted != a.Cached || a.Cached != blocks*relayedBlock || turn > 0 && a.Cached == 0 {
			t.Errorf("turn %d: %d tokens are predicted, %d found: want %d blocks", turn, a.Predicted, a.Cached, blocks)
		}
		testkit.Eventually(t, 20*time.Second, "the cell knows the prompt", func() bool {
			found := 0
			for _, n := range r.cell.heldOf(messages) {
				found = max(found, n)
			}
			return found >= a.Prompt/relayedBlock
		})
		messages = append(messages, Message("assistant", a.Text), Message("user", Words(random, 50)))
	}
}
