package test

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/zmq"
	"kvrouter/internal/testkit"
)

// tierMedia are the media of the parity test's lower tiers: SGLang's, and those that only
// Dynamo names.
var tierMedia = [...]string{kv.Device: "GPU", kv.Host: "CPU_PINNED", kv.Disk: "DISK", kv.External: "EXTERNAL"}

// tierRank is a worker of the parity test of tiers. It publishes events as they are given.
type tierRank struct {
	id       uint64
	pub      *zmq.Publisher
	seq      uint64
	held     [kv.External + 1]map[uint64]bool // engine hashes by tier
	children map[uint64]int                   // on the device
}

// wireEvent is an event as an engine encodes it.
type wireEvent = map[string]any

// stored is the event of blocks from to to of a prompt.
func stored(tokens []uint32, from, to int, medium string) wireEvent {
	hashes := parityHashes(tokens)
	var parent any
	if from > 0 {
		parent = hashes[from-1]
	}
	return wireEvent{
		"type": "BlockStored", "block_hashes": hashes[from:to], "parent_block_hash": parent,
		"token_ids": tokens[from*parityBlockSize : to*parityBlockSize], "block_size": parityBlockSize, "medium": medium,
	}
}

func removed(medium string, hashes ...uint64) wireEvent {
	return wireEvent{"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
}

// addTierWorker registers a worker at both.
func (p *parity) addTierWorker(id uint64) *tierRank {
	p.Helper()
	pub, err := zmq.NewPublisher("127.0.0.1:0")
	if err != nil {
		p.Fatal(err)
	}
	p.Cleanup(pub.Close)
	query := object{
		"worker_id": id, "model_name": parityModel, "endpoint": deadURL(p), "block_size": parityBlockSize,
		"max_num_batched_tokens": 8192, "total_kv_blocks": 1000, "kv_events_endpoint": pub.Endpoint(),
	}
	ours, theirs := p.both("POST", "/workers", query)
	p.same("POST /workers", query, ours.Result, theirs.Result, workerFields...)
	testkit.Eventually(p, 20*time.Second, "both follow the events", func() bool { return pub.Subscribers() >= 2 })
	r := &tierRank{id: id, pub: pub, children: map[uint64]int{}}
	for tier := range r.held {
		r.held[tier] = map[uint64]bool{}
	}
	p.ranks, p.ids, p.specs[id] = append(p.ranks, &parityRank{key: kv.WorkerKey{Worker: id}}), append(p.ids, id), query
	p.settleWorkers()
	p.send(r)
	return r
}

// send publishes events and waits until both have applied them: Dynamo applies those of
// each tier apart, so the last block of each is one of its own.
func (p *parity) send(r *tierRank, events ...wireEvent) {
	p.Helper()
	var marks [len(tierMedia)][]uint32
	for tier, medium := range tierMedia {
		p.next++
		marks[tier] = []uint32{1<<30 + uint32(p.next), 1, 2, 3}
		events = append(events, stored(marks[tier], 0, 1, medium))
	}
	payload, err := msgpack.Marshal([]any{1.0, events, 0})
	if err != nil {
		p.Fatal(err)
	}
	r.pub.Publish([]byte("kv-events"), binary.BigEndian.AppendUint64(nil, r.seq), payload)
	r.seq++
	for tier, mark := range marks {
		field := [...]string{kv.Device: "device_blocks", kv.Host: "host_pinned_extension_blocks", kv.Disk: "disk_extension_blocks", kv.External: "disk_extension_blocks"}[tier]
		for _, base := range []string{p.ours, p.theirs} {
			testkit.Eventually(p, 20*time.Second, fmt.Sprintf("%s has applied the events of %s", base, tierMedia[tier]), func() bool {
				for _, w := range ask(p, base, "POST", "/overlap_scores", object{"model_name": parityModel, "token_ids": mark}).Get("workers").Array() {
					if w.Get("worker_id").Uint() == r.id {
						return w.Get(field).Int() == 1
					}
				}
				return false
			})
		}
	}
}

// deviceEvent stores a prompt on the device or removes blocks that none follows.
func (r *tierRank) deviceEvent(p *parity) (events []wireEvent) {
	device := r.held[kv.Device]
	if p.random.IntN(2) == 0 {
		for range 1 + p.random.IntN(12) {
			var leaves []uint64
			for _, h := range slices.Sorted(maps.Keys(device)) {
				if r.children[h] == 0 {
					leaves = append(leaves, h)
				}
			}
			if len(leaves) == 0 {
				return events
			}
			h := leaves[p.random.IntN(len(leaves))]
			delete(device, h)
			for _, prompt := range p.prompts {
				if hashes := parityHashes(prompt); slices.Contains(hashes, h) {
					if at := slices.Index(hashes, h); at > 0 {
						r.children[hashes[at-1]]--
					}
					break
				}
			}
			events = append(events, removed("GPU", h))
		}
		return events
	}
	tokens := p.prompts[p.random.IntN(len(p.prompts))]
	hashes := parityHashes(tokens)
	to := p.random.IntN(len(hashes) + 1)
	from := 0
	for from < to && device[hashes[from]] {
		from++
	}
	if from == to {
		return nil
	}
	for i := from; i < to; i++ {
		device[hashes[i]] = true
		if i > 0 {
			r.children[hashes[i-1]]++
		}
	}
	return []wireEvent{stored(tokens, from, to, "GPU")}
}

// lowerEvents stores blocks of a prompt in a lower tier, one an event and in no order, or
// removes any.
func (r *tierRank) lowerEvents(p *parity) (events []wireEvent) {
	tier := kv.LowerTiers[p.random.IntN(len(kv.LowerTiers))]
	held, medium := r.held[tier], tierMedia[tier]
	if p.random.IntN(3) == 0 {
		all := slices.Sorted(maps.Keys(held))
		for range min(len(all), 1+p.random.IntN(10)) {
			if h := all[p.random.IntN(len(all))]; held[h] {
				delete(held, h)
				events = append(events, removed(medium, h))
			}
		}
		return events
	}
	tokens := p.prompts[p.random.IntN(len(p.prompts))]
	hashes := parityHashes(tokens)
	from := p.random.IntN(len(hashes) + 1)
	to := from + p.random.IntN(len(hashes)-from+1)
	for i := from; i < to; i++ {
		if !held[hashes[i]] && p.random.IntN(12) > 0 {
			held[hashes[i]] = true
			event := stored(tokens, i, i+1, medium)
			if p.random.IntN(4) == 0 {
				event["locality"] = "LOCAL"
			}
			events = append(events, event)
		}
	}
	p.random.Shuffle(len(events), func(i, j int) { events[i], events[j] = events[j], events[i] })
	return events
}

// clear empties all tiers. Dynamo takes AllBlocksCleared for all of them, this router for
// those that SGLang clears, so that the others' blocks are removed one by one.
func (r *tierRank) clear() (events []wireEvent) {
	for _, tier := range []kv.Tier{kv.Disk, kv.External} {
		if all := slices.Sorted(maps.Keys(r.held[tier])); len(all) > 0 {
			events = append(events, removed(tierMedia[tier], all...))
		}
	}
	for tier := range r.held {
		clear(r.held[tier])
	}
	clear(r.children)
	return append(events, wireEvent{"type": "AllBlocksCleared"})
}

var tierFields = []string{"device_blocks", "host_pinned_blocks", "disk_blocks", "host_pinned_extension_blocks", "disk_extension_blocks", "shared_beyond_device_blocks"}

// TestSelectionParityOfTiers sends random events of all tiers to both services, and compares
// what they find, and what follows of it for loads and choices.
func TestSelectionParityOfTiers(t *testing.T) {
	p := newParity(t, 7)
	for range 12 { // few prompts with long common beginnings, so that tiers meet
		var tokens []uint32
		if len(p.prompts) > 0 {
			tokens = slices.Clone(p.prompts[p.random.IntN(len(p.prompts))])
			tokens = tokens[:p.random.IntN(len(tokens)+1)/parityBlockSize*parityBlockSize]
		}
		for len(tokens) < 12*parityBlockSize {
			tokens = append(tokens, p.random.Uint32N(50))
		}
		p.prompts = append(p.prompts, tokens)
	}
	workers := []*tierRank{p.addTierWorker(1), p.addTierWorker(2), p.addTierWorker(3)}
	lower, deep := 0, 0 // rows with lower blocks, and with some in two of the lower tiers
	for range 200 {
		r := workers[p.random.IntN(len(workers))]
		events := slices.Concat(r.deviceEvent(p), r.lowerEvents(p), r.lowerEvents(p))
		if p.random.IntN(40) == 0 {
			events = append(events, r.clear()...)
		}
		p.operations["KV events"]++
		p.send(r, events...)
		for range 3 {
			tokens := p.prompts[p.random.IntN(len(p.prompts))]
			query := object{"model_name": parityModel, "token_ids": tokens[:1+p.random.IntN(len(tokens))]}
			ours, theirs := p.both("POST", "/overlap_scores", query)
			p.same("POST /overlap_scores", query, ours.Result, theirs.Result, "block_size", "num_blocks", "shared_cache")
			p.sameRows("POST /overlap_scores", query, ours.Get("workers"), theirs.Get("workers"), tierFields...)
			for _, row := range theirs.Get("workers").Array() {
				host, disk := row.Get("host_pinned_extension_blocks").Int(), row.Get("disk_extension_blocks").Int()
				if host+disk > 0 {
					lower++
				}
				if host > 0 && disk > 0 {
					deep++
				}
			}
			p.operations["overlap_scores"]++
		}
		kept := slices.Clone(p.prompts)
		switch p.random.IntN(4) {
		case 0:
			p.selectOnly()
		case 1:
			p.reserve()
		case 2:
			p.book()
		case 3:
			id := p.reservation()
			p.both("DELETE", "/reservations/"+id, nil)
			p.reserved = slices.DeleteFunc(p.reserved, func(have string) bool { return have == id })
		}
		p.prompts = kept
		p.loads()
	}
	if lower < 250 || deep < 25 {
		t.Errorf("only %d rows had blocks in lower tiers, %d in two of them", lower, deep)
	}
	t.Logf("%v; %d rows with blocks in lower tiers, %d in two of them", p.operations, lower, deep)
}

// TestSelectionParityDifferencesOfTiers lists what differs, and why, as
// TestSelectionParityDifferences does.
func TestSelectionParityDifferencesOfTiers(t *testing.T) {
	p := newParity(t, 8)
	r := p.addTierWorker(1)
	tokens := testkit.Tokens(1, 4*parityBlockSize)
	hashes := parityHashes(tokens)
	lowerOf := func(base string) string {
		row := ask(t, base, "POST", "/overlap_scores", object{"model_name": parityModel, "token_ids": tokens}).Get("workers.0")
		return row.Get("device_blocks").Raw + " " + row.Get("host_pinned_extension_blocks").Raw + " " + row.Get("disk_extension_blocks").Raw
	}
	remote := stored(tokens, 0, 4, "DISK")
	remote["locality"] = "REMOTE"
	placeholder := wireEvent{"type": "BlockStored", "block_hashes": hashes[1:2], "parent_block_hash": nil, "token_ids": []uint32{}, "block_size": 0, "medium": "CPU"}
	for _, c := range []struct {
		name, why    string
		events       []wireEvent
		ours, theirs string // blocks on the device, in host memory, in slower tiers
	}{
		{
			"a chain that goes back to a faster tier", "no difference here, though engines take it as it comes: policy work counts all four",
			[]wireEvent{stored(tokens, 0, 1, "CPU_PINNED"), stored(tokens, 1, 2, "DISK"), stored(tokens, 2, 4, "CPU_PINNED")}, "0 1 1", "0 1 1",
		},
		{"a store of other workers", "no difference here: policy work counts it", []wireEvent{remote}, "0 0 0", "0 0 0"},
		{"an unknown medium", "no difference: ignored", []wireEvent{stored(tokens, 0, 2, "FLOPPY")}, "0 0 0", "0 0 0"},
		{"a medium in lower case", "LMCache and Mooncake write it so; unknown there", []wireEvent{stored(tokens, 0, 2, "cpu_pinned")}, "0 2 0", "0 0 0"},
		{
			"an event without tokens", "vLLM's default; the device's event has named the block",
			[]wireEvent{stored(tokens, 0, 2, "GPU"), placeholder, removed("GPU", hashes[1])}, "1 1 0", "1 0 0",
		},
		{
			"a block of a tier stored twice and removed once", "vLLM announces a block once for each chunk that has it",
			[]wireEvent{stored(tokens, 0, 1, "CPU_PINNED"), stored(tokens, 0, 1, "CPU_PINNED"), removed("CPU_PINNED", hashes[0])}, "0 1 0", "0 0 0",
		},
		{
			"AllBlocksCleared and blocks on disk", "SGLang's clears device and host memory",
			[]wireEvent{stored(tokens, 0, 2, "DISK"), {"type": "AllBlocksCleared"}}, "0 0 2", "0 0 0",
		},
	} {
		var before []wireEvent
		for _, medium := range tierMedia {
			before = append(before, removed(medium, hashes...), removed(medium, hashes...))
		}
		p.send(r, append(before, wireEvent{"type": "AllBlocksCleared"})...)
		p.send(r, c.events...)
		ours, theirs := lowerOf(p.ours), lowerOf(p.theirs)
		t.Logf("%s: %s | kvrouter %s | Dynamo %s", c.name, c.why, ours, theirs)
		if ours != c.ours || theirs != c.theirs {
			t.Errorf("%s: ours %q, theirs %q; listed are %q and %q", c.name, ours, theirs, c.ours, c.theirs)
		}
	}
}
