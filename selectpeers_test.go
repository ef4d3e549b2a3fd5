package main

import (
	"fmt"
	"kvrouter/internal/kv"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
	"net/http"
	"slices"
	"testing"
	"time"
)

// Each service starts from the other's dump, and then finds the same.
func TestSelectionParityOfDumps(t *testing.T) {
	p := newParity(t, 3)
	p.addFour()
	for range 300 {
		p.events()
	}
	p.dump()
	second := startSelection(t, "--indexer-peers="+p.theirs)
	origins := map[string]string{
		second.selection: p.theirs,
		dynamoService(t, "--indexer-peers", p.ours): p.ours,
	}
	for started, from := range origins {
		want := heldIn(ask(t, from, "GET", "/dump", nil).Result)
		var got []string
		testkit.Eventually(t, 20*time.Second, started+" has taken the dump of "+from, func() bool {
			got = heldIn(ask(t, started, "GET", "/dump", nil).Result)
			return len(got) == len(want)
		})
		if !slices.Equal(got, want) || len(want) < 100 {
			t.Errorf("%s started from %s: %s; %s", started, from, missing(got, want), missing(want, got))
		}
		for _, spec := range p.specs {
			if reply := ask(t, started, "POST", "/workers", spec); reply.status != http.StatusCreated {
				t.Errorf("%d %s", reply.status, reply.Raw)
			}
		}
		for range 100 {
			query := object{"model_name": parityModel, "token_ids": p.prompt()}
			a, b := ask(t, started, "POST", "/overlap_scores", query), ask(t, from, "POST", "/overlap_scores", query)
			p.sameRows("/overlap_scores after a start from a dump", query, a.Get("workers"), b.Get("workers"), "device_blocks")
		}
		t.Logf("%s holds the %d blocks of %s", started, len(got), from)
	}
}

// What differs, and why. Each case shows both answers, so that this list stays
// true.
func TestSelectionParityDifferences(t *testing.T) {
	p := newParity(t, 2)
	p.addWorker(1, 0, 1)
	r := p.ranks[0]
	prompt := testkit.Count(1, 12)
	blocks := func(from, to int) mocker.Event {
		event := mocker.Event{Tokens: prompt[4*from : 4*to]}
		if from > 0 {
			event.Parent, event.HasParent = uint64(10+from), true
		}
		for i := from; i < to; i++ {
			event.Stored = append(event.Stored, kv.StoredBlock{Engine: uint64(11 + i)})
		}
		return event
	}
	heldOf := func(base string, more object) string {
		return ask(t, base, "POST", "/overlap_scores", prompt12(more)).Get("workers.0.device_blocks").Raw
	}
	held := func(base string) string { return heldOf(base, nil) }
	call := func(method, path string, query any, field string) func(base string) string {
		return func(base string) string {
			answer := ask(t, base, method, path, query)
			return fmt.Sprint(answer.status, " ", answer.Get(field).String())
		}
	}
	for _, c := range []struct {
		name, why    string
		prepare      func()
		answer       func(base string) string
		ours, theirs string
	}{
		{
			"a block stored twice and removed once",
			"engines keep physical copies, and publish each of them: one is left",
			func() { p.publish(r, blocks(0, 1), blocks(0, 1), mocker.Event{Removed: []uint64{11}}) },
			held, "1", "0",
		}, {
			"a block of the middle removed and stored again",
			"the blocks behind it were never removed: the engine can use them again",
			func() {
				p.publish(r, mocker.Event{Cleared: true})
				p.publish(r, blocks(0, 3), mocker.Event{Removed: []uint64{12}}, blocks(1, 2))
			},
			held, "3", "2",
		}, {
			"no model_name",
			"means any model here, a model named default there",
			nil, call("POST", "/select", object{"token_ids": prompt}, "worker_id"), "200 1", "503 ",
		}, {
			"two ranks and one kv_events_endpoint",
			"vLLM gives the further ranks the following ports: taken as that here, incomplete there",
			nil, call("POST", "/workers", object{"worker_id": 8, "model_name": "n", "endpoint": "http://h:1", "block_size": 4, "kv_events_endpoint": "tcp://127.0.0.1:1", "data_parallel_size": 2}, "lifecycle"),
			"201 schedulable", "201 incomplete",
		}, {
			"an endpoint that is none",
			"an error here, an incomplete worker there",
			nil, call("POST", "/workers", object{"worker_id": 9, "model_name": "n", "endpoint": "http://h:1", "block_size": 4, "kv_events_endpoint": "x"}, "lifecycle"),
			"400 ", "201 incomplete",
		}, {
			"another block size",
			"one router has one block size; there each model and routing group has its own",
			nil, call("POST", "/workers", object{"worker_id": 10, "model_name": "o", "endpoint": "http://h:1", "block_size": 8, "kv_events_endpoint": "tcp://127.0.0.1:1"}, "lifecycle"),
			"201 incomplete", "201 schedulable",
		}, {
			"a rank that the worker has not",
			"only the text differs",
			nil, call("POST", "/reservations", object{"model_name": "m", "selection_id": "q", "worker_id": 1, "dp_rank": 4, "token_ids": prompt}, "error"),
			"404 schedulable worker 1 (dp_rank 4) not found for model=m routing_group=default", "404 Worker WorkerWithDpRank { worker_id: 1, dp_rank: 4 } not found",
		}, {
			"a field of a wrong type",
			"only the text differs, as for a body that is no JSON",
			nil, call("POST", "/select", object{"model_name": "m", "token_ids": true}, "error"),
			"422 bad body: token_ids cannot be a JSON bool",
			"422 Failed to deserialize the JSON body into the target type: invalid type: boolean `true`, expected a sequence at line 1 column 35",
		}, {
			"a LoRA adapter's blocks",
			"no difference: they match prompts of that adapter only",
			func() {
				event := blocks(0, 3)
				event.Adapter = mocker.Adapter{Name: "l", Id: 1}
				p.publish(r, mocker.Event{Cleared: true}, event)
			},
			func(base string) string {
				return heldOf(base, object{"lora_name": "l"}) + " " + heldOf(base, nil)
			}, "3 0", "3 0",
		}, {
			"blocks with a cache salt",
			"vLLM publishes the salt with a prompt's first block: salted prompts alone match here; there the events' salt is passed over",
			func() {
				event := blocks(0, 3)
				event.Salt = "s"
				p.publish(r, mocker.Event{Cleared: true}, event)
			},
			func(base string) string {
				return heldOf(base, object{"cache_salt": "s"}) + " " + heldOf(base, nil)
			}, "3 0", "0 3",
		},
	} {
		if c.prepare != nil {
			c.prepare()
		}
		ours, theirs := c.answer(p.ours), c.answer(p.theirs)
		t.Logf("%s: %s | kvrouter %s | Dynamo %s", c.name, c.why, ours, theirs)
		if ours != c.ours || theirs != c.theirs {
			t.Errorf("%s: ours %q, theirs %q; listed are %q and %q", c.name, ours, theirs, c.ours, c.theirs)
		}
	}
}
