package radix

import "kvrouter/internal/base/kv"

// Changes of a Tree, a method a kind.

func (r *Tree) stored(w kv.WorkerKey, parent uint64, hasParent bool, skipped []uint64, blocks []kv.StoredBlock) error {
	_, err := r.Apply(w, &Change{Kind: Stored, Parent: parent, HasParent: hasParent, Skipped: skipped, Blocks: blocks})
	return err
}

func (r *Tree) removed(w kv.WorkerKey, engine []uint64) (unknown int) {
	done, _ := r.Apply(w, &Change{Kind: Removed, Hashes: engine})
	return done.Unknown
}

func (r *Tree) cleared(w kv.WorkerKey) { _, _ = r.Apply(w, &Change{Kind: Cleared}) }

func (r *Tree) forgotten(worker uint64) {
	_, _ = r.Apply(kv.WorkerKey{Worker: worker}, &Change{Kind: Forgotten})
}

func (r *Tree) held(w kv.WorkerKey, group int, engine []uint64) {
	_, _ = r.Apply(w, &Change{Kind: Held, Group: int32(group), Hashes: engine})
}

func (r *Tree) dropped(w kv.WorkerKey, group int, engine []uint64) (unknown int) {
	done, _ := r.Apply(w, &Change{Kind: Removed, Group: int32(group), Hashes: engine})
	return done.Unknown
}

func (r *Tree) layoutSet(w kv.WorkerKey, layout kv.Layout, block int) {
	_, _ = r.Apply(w, &Change{Kind: LayoutSet, Set: &Setting{Layout: layout, BlockSize: block}})
}

func (r *Tree) lowerStored(w kv.WorkerKey, at LowerTier, parent uint64, hasParent bool, blocks []kv.StoredBlock) (lost int) {
	done, _ := r.Apply(w, &Change{Kind: Stored, LowerTier: at, Parent: parent, HasParent: hasParent, Blocks: blocks})
	return done.Lost
}

func (r *Tree) lowerHeldBy(w kv.WorkerKey, at LowerTier, engine []uint64) (lost int) {
	done, _ := r.Apply(w, &Change{Kind: Held, LowerTier: at, Hashes: engine})
	return done.Lost
}

func (r *Tree) lowerRemoved(w kv.WorkerKey, at LowerTier, engine []uint64) (unknown int) {
	done, _ := r.Apply(w, &Change{Kind: Removed, LowerTier: at, Hashes: engine})
	return done.Unknown
}

func (r *Tree) deviceCleared(w kv.WorkerKey, host bool) {
	_, _ = r.Apply(w, &Change{Kind: DeviceCleared, Host: host})
}

func (r *Tree) doubtSettled(w kv.WorkerKey, doubt uint32, held bool) (settled bool) {
	done, _ := r.Apply(w, &Change{Kind: DoubtSettled, Set: &Setting{Doubt: doubt, Held: held}})
	return done.Settled
}

func (r *Tree) chunkSet(w kv.WorkerKey, blocks int) {
	_, _ = r.Apply(w, &Change{Kind: ChunkSet, Set: &Setting{Chunk: blocks}})
}

func (r *Tree) lowerRestored(w kv.WorkerKey, chunk int, doubtful bool, stores []string) {
	_, _ = r.Apply(w, &Change{Kind: LowerRestored, Set: &Setting{Chunk: chunk, Doubtful: doubtful, Stores: stores}})
}
