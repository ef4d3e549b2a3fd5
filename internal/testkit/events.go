package testkit

import (
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
)

// EventWorker is the worker of the events in tests.
var EventWorker = kv.WorkerKey{Worker: 3, Rank: 1}

// Event is an event in the format of publisher.py and FakePublisher.
type Event map[string]any

// PromptTokens returns the tokens of the first n blocks of the prompt with that
// number. No other number shares any of them.
func PromptTokens(number, n int) []uint32 {
	tokens := make([]uint32, n*BlockSize)
	for i := range tokens {
		tokens[i] = uint32(number*1000 + i)
	}
	return tokens
}

// BlockIDs returns the engine hashes of blocks from to below to of a prompt.
func BlockIDs(number, from, to int) []uint64 {
	ids := []uint64{}
	for i := from; i < to; i++ {
		ids = append(ids, 1<<63+uint64(number*1000+i))
	}
	return ids
}

// StoredEvent returns the event that stores blocks from to below to of a prompt.
func StoredEvent(number, from, to int) Event {
	e := Event{"stored": BlockIDs(number, from, to), "tokens": PromptTokens(number, to)[from*BlockSize:], "block_size": BlockSize}
	if from > 0 {
		e["parent"] = BlockIDs(number, from-1, from)[0]
	}
	return e
}

// RemovedEvent returns the event that removes blocks from to below to of a prompt.
func RemovedEvent(number, from, to int) Event {
	return Event{"removed": BlockIDs(number, from, to)}
}

// Wire returns the event as vLLM encodes it.
func (e Event) Wire() any {
	m := map[string]any{"medium": "GPU"}
	for k, v := range e {
		m[k] = v
	}
	switch {
	case e["stored"] != nil:
		m["type"], m["block_hashes"], m["token_ids"], m["parent_block_hash"] = "BlockStored", e["stored"], e["tokens"], e["parent"]
		delete(m, "stored")
		delete(m, "tokens")
		delete(m, "parent")
	case e["removed"] != nil:
		m["type"], m["block_hashes"] = "BlockRemoved", e["removed"]
		delete(m, "removed")
	case e["cleared"] != nil:
		m = map[string]any{"type": "AllBlocksCleared"}
	case e["as is"] != nil:
		return e["as is"]
	}
	return m
}

// Payload returns events of EventWorker as one encoded batch; ts is in seconds.
func Payload(t testing.TB, ts float64, events ...Event) []byte {
	t.Helper()
	list := make([]any, len(events))
	for i, e := range events {
		list[i] = e.Wire()
	}
	b, err := msgpack.Marshal([]any{ts, list, EventWorker.Rank})
	if err != nil {
		t.Fatal(err)
	}
	return b
}
