package peers

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// dynamoCell is a whole cell of Dynamo's: cell.py.
type dynamoCell struct {
	url, relay string
	kill       func()
}

const dynamoCellBlock = 16

func startDynamoCell(t *testing.T, python, model, name string) *dynamoCell {
	t.Helper()
	port := testkit.FreePorts(t, 2)
	command := exec.Command(python, "test/real/peers/cell.py", fmt.Sprint(port), fmt.Sprint(port+1), name, fmt.Sprint(dynamoCellBlock), model)
	command.Env = append(os.Environ(), "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1", "DYN_SELF_HOST_METADATA=0", "DYN_LOG=warn", "PYTHONDONTWRITEBYTECODE=1", "HOME="+t.TempDir())
	log := &testkit.LogBuffer{}
	command.Stdout, command.Stderr, command.WaitDelay = log, log, 5*time.Second
	in, err := command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { // until it ends
		_ = command.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		in.Close()
		select {
		case <-ended:
		case <-time.After(20 * time.Second):
			_ = command.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("end of the log of cell %s:\n%s", name, log.Tail())
		}
	})
	c := &dynamoCell{
		url: fmt.Sprintf("http://127.0.0.1:%d", port), relay: fmt.Sprintf("127.0.0.1:%d", port+1),
		kill: func() {
			_ = command.Process.Kill()
			<-ended
		},
	}
	testkit.Eventually(t, 90*time.Second, "the cell's frontend has its model", func() bool {
		response, err := http.Get(c.url + "/v1/models")
		if err != nil {
			return false
		}
		defer response.Body.Close()
		var text [4 << 10]byte
		n, _ := response.Body.Read(text[:])
		return strings.Contains(string(text[:n]), `"id":"m"`)
	})
	return c
}

// foundAt returns how many blocks of a chat a router expects to find on a worker.
func foundAt(r *test.Router, messages []map[string]string, worker uint64) int {
	body, _ := json.Marshal(map[string]any{"messages": messages})
	_, text := test.Post(r.T, r.OpenAI+"/tokenize", string(body))
	_, scores := test.Post(r.T, r.Port+"/overlap_scores", `{"token_ids":`+gjson.GetBytes(text, "tokens").Raw+`}`)
	return int(gjson.GetBytes(scores, fmt.Sprintf("workers.#(worker_id==%d).device_blocks", worker)).Int())
}

// TestDynamoCellsBelowAKvrouter puts two whole cells of Dynamo's below one kvrouter, which
// knows what they hold by their relays alone. Its predictions are what Dynamo's engines
// find, conversations stay in their cell, and a cell that is killed costs no request.
func TestDynamoCellsBelowAKvrouter(t *testing.T) {
	python, model := os.Getenv("KVROUTER_PEERS_DYNAMO"), os.Getenv("KVROUTER_DYNAMO_MODEL")
	if python == "" || model == "" {
		t.Skip("run `make test-relay`")
	}
	cells := []*dynamoCell{startDynamoCell(t, python, model, "paris"), startDynamoCell(t, python, model, "lyon")}
	r := test.Start(t, "--engine=none", "--policy=kv", fmt.Sprintf("--block-size=%d", dynamoCellBlock), "--model="+model, "--served-model-name=m",
		"--worker=url="+cells[0].url+",id=0", "--worker=url="+cells[1].url+",id=1",
		"--relay-cell=0="+cells[0].relay+",1="+cells[1].relay)
	r.Model = "m" // Dynamo refuses a request without
	r.WaitReady(2, 60*time.Second)
	random := rand.New(rand.NewPCG(1, 1))
	used, exact, asked := map[uint64]bool{}, 0, 0
	var talks [][]map[string]string
	for range 6 {
		messages := []map[string]string{test.Message("system", test.Words(random, 30))} // no two begin alike
		var home uint64
		for turn := range 3 {
			messages = append(messages, test.Message("user", test.Words(random, 60)))
			a, err := r.Chat(t.Context(), messages, true, 8)
			if err != nil || !a.Finished || a.Broken {
				t.Fatalf("%+v, %v", a, err)
			}
			if turn == 0 {
				home = a.Worker
			} else {
				asked++
				if a.Worker != home || a.Cached == 0 {
					t.Errorf("turn %d: cell %d, %d tokens cached: want cell %d, and those of the turn before", turn, a.Worker, a.Cached, home)
				}
				if a.Predicted == a.Cached {
					exact++
				}
			}
			used[a.Worker] = true
			// The relay reports the blocks a moment later: wait until the same prompt would be found.
			testkit.Eventually(t, 20*time.Second, "the relay has told of the prompt", func() bool {
				return foundAt(r, messages, a.Worker) >= a.Prompt/dynamoCellBlock
			})
			messages = append(messages, test.Message("assistant", a.Text))
		}
		talks = append(talks, messages)
	}
	if len(used) != 2 {
		t.Errorf("the conversations used %d cells of 2", len(used))
	}
	if exact != asked {
		t.Errorf("%d of %d predictions were what Dynamo's engine found", exact, asked)
	}
	cells[0].kill()
	for _, messages := range talks {
		messages = append(messages, test.Message("user", "go on"))
		if a, err := r.Chat(t.Context(), messages, true, 8); err != nil || !a.Finished || a.Worker != 1 {
			t.Errorf("after cell 0 is gone: %+v, %v", a, err)
		}
	}
}
