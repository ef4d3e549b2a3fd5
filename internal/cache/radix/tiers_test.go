package radix

import (
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
)

// tierModel is what engines do with their tiers, in maps: see naiveMatch.
type tierModel struct {
	workers map[kv.WorkerKey]*modelWorker
	stores  map[string]map[uint64]bool
}

type modelWorker struct {
	device, host, disk map[uint64]int // copies by engine hash
	reads              map[string]bool
	chunk              int
	doubtful           bool
	sure               map[kv.Tier]map[uint64]bool // stored since it is doubtful
}

func newModelWorker() *modelWorker {
	w := &modelWorker{device: map[uint64]int{}, host: map[uint64]int{}, disk: map[uint64]int{}, reads: map[string]bool{}}
	w.doubt(false)
	return w
}

func (w *modelWorker) doubt(doubtful bool) {
	w.doubtful, w.sure = doubtful, map[kv.Tier]map[uint64]bool{kv.Host: {}, kv.Disk: {}}
}

// own returns the blocks of a tier that the worker does not share.
func (w *modelWorker) own(tier kv.Tier) map[uint64]int {
	if tier == kv.Disk {
		return w.disk
	}
	return w.host
}

// match is the rule: device blocks from the first on, then each block in any lower tier,
// the fastest first, never back to the device. sure are the first of them, as long as they
// are in host memory and not doubtful.
func (m *tierModel) match(w *modelWorker, hashes []uint64, usable int) (device int, lower kv.LowerBlocks, sure int32) {
	certain := func(h uint64) bool { return w.host[h] > 0 && (!w.doubtful || w.sure[kv.Host][h]) }
	for device < len(hashes) && w.device[hashes[device]] > 0 {
		device++
	}
	in := func(h uint64) kv.Tier {
		switch {
		case w.host[h] > 0:
			return kv.Host
		case w.disk[h] > 0:
			return kv.Disk
		}
		for name := range w.reads {
			if m.stores[name][h] {
				return kv.External
			}
		}
		return kv.Device
	}
	if w.chunk <= 1 {
		for i := device; i < usable; i++ {
			tier := in(hashes[i])
			if tier == kv.Device {
				break
			}
			add(&lower, tier, 1)
			if int(sure) == i-device && certain(hashes[i]) {
				sure++
			}
		}
		return device, lower, sure
	}
	end, found := device, kv.LowerBlocks{}
	for at := device / w.chunk * w.chunk; at+w.chunk <= len(hashes) && device < usable; at += w.chunk {
		if slices.ContainsFunc(hashes[at:at+w.chunk], func(h uint64) bool { return in(h) == kv.Device }) {
			break
		}
		end = at + w.chunk
		add(&found, in(hashes[end-1]), min(end, usable)-max(at, device))
		if int(sure) == max(at, device)-device && !slices.ContainsFunc(hashes[at:end], func(h uint64) bool { return !certain(h) }) {
			sure = int32(min(end, usable) - device)
		}
	}
	if end-device < w.chunk {
		return device, kv.LowerBlocks{}, 0
	}
	return device, found, sure
}

// staged is Dynamo's rule: host memory from the device's end on, then disk from where that
// ends.
func (w *modelWorker) staged(hashes []uint64, device int) (b kv.LowerBlocks) {
	in := func(tier kv.Tier, h uint64) bool {
		return w.own(tier)[h] > 0 && (!w.doubtful || w.sure[tier][h])
	}
	at := device
	for ; at < len(hashes) && in(kv.Host, hashes[at]); at++ {
		b.Host++
	}
	for ; at < len(hashes) && in(kv.Disk, hashes[at]); at++ {
		b.Disk++
	}
	return b
}

// hosted is the number of leading blocks that are in host memory for sure, in whole chunks.
func (w *modelWorker) hosted(hashes []uint64) (blocks int) {
	for blocks < len(hashes) && w.host[hashes[blocks]] > 0 && (!w.doubtful || w.sure[kv.Host][hashes[blocks]]) {
		blocks++
	}
	chunk := max(1, w.chunk)
	return blocks / chunk * chunk
}

// A prompt of the model is a path in a tree of two children a node; a block's engine hash
// names its path, and its local hash its last step.
func modelPrompt(t *rapid.T) (hashes []uint64, blocks []kv.StoredBlock) {
	path := uint64(1)
	for range rapid.IntRange(1, 6).Draw(t, "length") {
		step := rapid.Uint64Range(0, 1).Draw(t, "step")
		path = path*2 + step
		hashes = append(hashes, path)
		blocks = append(blocks, kv.StoredBlock{Engine: path, Local: 100 + step})
	}
	return hashes, blocks
}

// TestTiersMatchAsTheModel changes an index with tiers and maps alike.
func TestTiersMatchAsTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := NewTreeWithBook(summary.NewBook())
		m := &tierModel{workers: map[kv.WorkerKey]*modelWorker{}, stores: map[string]map[uint64]bool{"": {}, "s": {}}}
		keys := []kv.WorkerKey{{Worker: 1}, {Worker: 2}, {Worker: 2, Rank: 1}}
		for _, key := range keys {
			m.workers[key] = newModelWorker()
		}
		for range rapid.IntRange(1, 40).Draw(t, "changes") {
			key := rapid.SampledFrom(keys).Draw(t, "worker")
			w := m.workers[key]
			hashes, blocks := modelPrompt(t)
			tier := rapid.SampledFrom(kv.LowerTiers[:]).Draw(t, "tier")
			at := LowerTier{Tier: tier}
			if tier == kv.External { // of stores
				at.Shared, at.Store = true, rapid.SampledFrom([]string{"", "s"}).Draw(t, "store")
			}
			hold := func(hash uint64) {
				switch {
				case at.Shared:
					w.reads[at.Store] = true
					m.stores[at.Store][hash] = true
				default:
					held := w.own(tier)
					if w.doubtful && !w.sure[tier][hash] { // stored again, since it was lost
						held[hash] = 0
						w.sure[tier][hash] = true
					}
					held[hash]++
				}
			}
			switch rapid.IntRange(0, 7).Draw(t, "change") {
			case 0, 1: // a prompt is computed
				for _, hash := range hashes {
					w.device[hash]++
				}
				if err := r.stored(key, 0, false, nil, blocks); err != nil {
					t.Fatal(err)
				}
			case 2, 3: // it is stored below, in any order, each block an event
				for _, i := range rapid.Permutation([]int{0, 1, 2, 3, 4, 5}).Draw(t, "order") {
					if i >= len(hashes) {
						continue
					}
					hold(hashes[i])
					parent, hasParent := uint64(0), i > 0
					if hasParent {
						parent = hashes[i-1]
					}
					r.lowerStored(key, at, parent, hasParent, blocks[i:i+1])
				}
			case 4: // the same, without tokens, and known from the device or later
				for _, hash := range hashes {
					hold(hash)
				}
				r.lowerHeldBy(key, at, hashes)
				for _, hash := range hashes {
					w.device[hash]++
				}
				if err := r.stored(key, 0, false, nil, blocks); err != nil {
					t.Fatal(err)
				}
			case 5: // the device evicts
				last := hashes[len(hashes)-1]
				unknown := 1
				if w.device[last] > 0 {
					w.device[last]--
					unknown = 0
				}
				if got := r.removed(key, []uint64{last}); got != unknown {
					t.Fatalf("%d removed blocks were unknown, want %d", got, unknown)
				}
			case 6: // a tier evicts
				for _, hash := range hashes {
					unknown := 1
					switch {
					case at.Shared:
						if m.stores[at.Store][hash] {
							unknown = 0
						}
						delete(m.stores[at.Store], hash)
					case w.own(tier)[hash] > 0:
						if w.own(tier)[hash]--; w.own(tier)[hash] == 0 {
							delete(w.sure[tier], hash)
						}
						unknown = 0
					}
					if got := r.lowerRemoved(key, at, []uint64{hash}); got != unknown {
						t.Fatalf("%d removed blocks of %s were unknown, want %d", got, tier, unknown)
					}
				}
			case 7:
				switch rapid.IntRange(0, 5).Draw(t, "reset") {
				case 0:
					host := rapid.Bool().Draw(t, "host")
					r.deviceCleared(key, host)
					clear(w.device)
					if host {
						clear(w.host)
						clear(w.sure[kv.Host])
					} else {
						w.doubt(len(w.host)+len(w.disk) > 0)
					}
				case 1:
					held := rapid.Bool().Draw(t, "held")
					doubt, current := r.LowerOf(key).Doubt, rapid.Bool().Draw(t, "current")
					if (doubt != 0) != w.doubtful {
						t.Fatalf("doubt %d, want one: %v", doubt, w.doubtful)
					}
					if !current {
						doubt = rapid.Uint32Max(doubt).Draw(t, "earlier doubt") - 1
					}
					settles := current && w.doubtful
					if got := r.doubtSettled(key, doubt, held); got != settles {
						t.Fatalf("settled: %v, want %v", got, settles)
					} else if !settles {
						continue
					}
					if !held {
						for tier, sure := range w.sure {
							maps.DeleteFunc(w.own(tier), func(h uint64, _ int) bool { return !sure[h] })
						}
						m.unread(w)
					}
					w.doubt(false)
				case 2:
					r.cleared(key)
					m.unread(w)
					m.workers[key] = newModelWorker()
				case 3:
					w.chunk = rapid.IntRange(1, 3).Draw(t, "chunk")
					r.chunkSet(key, w.chunk)
				}
			}
			if err := r.Check(); err != nil {
				t.Fatal(err)
			}
			hashes, blocks = modelPrompt(t)
			compareTiers(t, r, m, keys, hashes, blocks)
		}
		restored := restoredTiers(t, r)
		for range 5 {
			_, blocks := modelPrompt(t)
			restoredMatches(t, restored, r, m, blocks)
		}
	})
}

// restoredTiers returns another index with what the dumps of r yield.
func restoredTiers(t *rapid.T, r *Tree) *Tree {
	restored := NewTree()
	workers := r.Workers()
	if rapid.Bool().Draw(t, "backwards") { // the first reader of a store comes last
		slices.Reverse(workers)
	}
	for _, w := range workers {
		for b := range r.DumpOf(w) {
			if err := restored.stored(w, b.Parent, b.HasParent, nil, []kv.StoredBlock{b.StoredBlock}); err != nil {
				t.Fatal(err)
			}
		}
		lower := r.DumpLowerOf(w)
		if lower.Empty() {
			continue
		}
		restored.lowerRestored(w, 0, false, lower.Stores)
		for b := range lower.Blocks {
			if b.Placed {
				restored.lowerStored(w, b.At, b.Parent, b.HasParent, []kv.StoredBlock{b.StoredBlock})
			} else {
				restored.lowerHeldBy(w, b.At, []uint64{b.Engine})
			}
		}
		restored.lowerRestored(w, lower.Chunk, lower.Doubtful, nil)
	}
	if err := restored.Check(); err != nil {
		t.Fatal(err)
	}
	return restored
}

// restoredMatches compares a restored index with the original one. A block of a store
// behind one that only another reader holds may be missing.
func restoredMatches(t *rapid.T, restored, r *Tree, m *tierModel, blocks []kv.StoredBlock) {
	local := make([]uint64, len(blocks))
	for i, b := range blocks {
		local[i] = b.Local
	}
	got, want := restored.Match(local, len(local), kv.AllParts, nil), r.Match(local, len(local), kv.AllParts, nil)
	reads := false
	for _, w := range m.workers {
		reads = reads || len(w.reads) > 0
	}
	doubtful := slices.ContainsFunc(slices.Collect(maps.Values(m.workers)), func(w *modelWorker) bool { return w.doubtful })
	if !reads && !doubtful && !slices.Equal(got, want) {
		t.Fatalf("a restored index matches %+v, want %+v", got, want)
	}
	for _, g := range got {
		i := slices.IndexFunc(want, func(w kv.Match) bool { return w.Worker == g.Worker })
		if i < 0 || g.Blocks != want[i].Blocks || g.Lower.Total() > want[i].Lower.Total() || g.Sure > want[i].Sure {
			t.Fatalf("a restored index matches %+v, more than %+v", got, want)
		}
	}
}

// unread ends the worker's reading of its stores: a store goes with its last reader.
func (m *tierModel) unread(w *modelWorker) {
	clear(w.reads)
	for name := range m.stores {
		read := false
		for _, other := range m.workers {
			read = read || other.reads[name]
		}
		if !read {
			clear(m.stores[name])
		}
	}
}

func compareTiers(t *rapid.T, r *Tree, m *tierModel, keys []kv.WorkerKey, hashes []uint64, blocks []kv.StoredBlock) {
	local := make([]uint64, len(blocks))
	for i, b := range blocks {
		local[i] = b.Local
	}
	usable := rapid.IntRange(len(local)-1, len(local)).Draw(t, "usable")
	var want []string
	for _, key := range keys {
		device, lower, sure := m.match(m.workers[key], hashes, usable)
		staged := m.workers[key].staged(hashes, device)
		hosted := m.workers[key].hosted(hashes)
		if device > 0 || lower.Total() > 0 || staged.Total() > 0 || hosted > 0 {
			want = append(want, fmt.Sprint(key, device, lower, sure, staged, hosted))
		}
	}
	var got []string
	for _, match := range r.Match(local, usable, kv.AllParts, nil) {
		got = append(got, fmt.Sprint(match.Worker, match.Blocks, match.Lower, match.Sure, match.Staged, match.Hosted))
	}
	if !slices.Equal(got, want) {
		t.Fatalf("a prompt of %v, usable %d, matches %v, want %v", hashes, usable, got, want)
	}
}

// Without removals, as of files, the index keeps its bounds and its sense.
func TestTiersAreBounded(t *testing.T) {
	r := NewTree()
	r.lowerMost = 1000
	lost, engine := 0, uint64(0)
	worker, disk := func(id uint64) kv.WorkerKey { return kv.WorkerKey{Worker: id} }, LowerTier{Tier: kv.Disk}
	if n := r.lowerStored(worker(9), LowerTier{Tier: kv.Host}, 0, false, []kv.StoredBlock{{Engine: 1, Local: 1}}); n != 0 {
		t.Errorf("%d blocks are lost at once", n)
	}
	for i := range 10_000 {
		engine++
		lost += r.lowerStored(worker(uint64(i%3)), disk, 0, false, []kv.StoredBlock{{Engine: engine << 8, Local: engine}})
	}
	if err := r.Check(); err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, w := range r.Workers() {
		held += r.LowerOf(w).Own.Total()
	}
	if held > 1000 || held+lost != 10_001 {
		t.Errorf("%d blocks are held and %d lost of 10001", held, lost)
	}
	if got := r.LowerOf(kv.WorkerKey{Worker: 9}).Own.Host; got != 1 {
		t.Errorf("the smallest tier has %d blocks: the largest must go", got)
	}

	// Blocks without a place.
	lost = 0
	for i := range uint64(3 * maxWaiting) {
		lost += r.lowerHeldBy(worker(1), disk, []uint64{1<<40 + i})
		lost += r.lowerStored(worker(2), disk, 1<<50+i, true, []kv.StoredBlock{{Engine: 1<<45 + i, Local: i}})
	}
	if err := r.Check(); err != nil {
		t.Fatal(err)
	}
	if got := r.LowerOf(kv.WorkerKey{Worker: 1}).Waiting; got > maxWaiting || got == 0 || lost < 2*maxWaiting {
		t.Errorf("%d blocks wait, %d are lost", got, lost)
	}
	// A chain whose first block comes last has its place at once.
	r = NewTree()
	for i := uint64(maxWaiting - 1); i > 0; i-- {
		r.lowerStored(worker(1), disk, i, true, []kv.StoredBlock{{Engine: i + 1, Local: i}})
	}
	r.lowerStored(worker(1), disk, 0, false, []kv.StoredBlock{{Engine: 1, Local: 0}})
	local := make([]uint64, maxWaiting)
	for i := range local {
		local[i] = uint64(i)
	}
	if m := r.Match(local, len(local), kv.AllParts, nil); len(m) != 1 || m[0].Lower.Disk != maxWaiting {
		t.Errorf("%+v, want %d blocks on disk", m, maxWaiting)
	}
	if err := r.Check(); err != nil {
		t.Fatal(err)
	}
	// Stores have a bound, too.
	for i := range 2 * maxStores {
		r.lowerStored(worker(1), LowerTier{Tier: kv.External, Shared: true, Store: fmt.Sprint(i)}, 0, false, []kv.StoredBlock{{Engine: 1 << 60, Local: 7}})
	}
	if len(r.stores) != maxStores {
		t.Errorf("%d stores", len(r.stores))
	}
	r.forgotten(1)
	if err := r.Check(); err != nil || len(r.stores) != 0 || r.lowered != 0 {
		t.Errorf("%d stores and %d workers with tiers after all are gone: %v", len(r.stores), r.lowered, err)
	}
}
