package router

import (
	"slices"
	"sync/atomic"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// fleet is the workers that are up, with their loads. router.mu guards it, except what is atomic.
type fleet struct {
	targets     []kv.Target  // by key
	targetLoads []targetLoad // for each of targets
	several     bool         // more than one has been up at once
	resting     int          // of targets, those whose engine rests
	latest      string       // version of the weights of targets
	loads       *loads       // also of workers that are down, while they have bookings

	paired atomic.Bool            // some worker computes only prompts or only answers
	pulls  atomic.Bool            // two workers at least can pull from each other
	units  atomic.Pointer[units]  // of the workers' blocks. A loaded value never changes
	cells  atomic.Pointer[[]cell] // by key; nil: none. A loaded slice never changes
}

// note notes what the workers that are up can do together. It follows each change of them.
func (f *fleet) note() {
	f.noteSizes()
	paired, pulling := false, 0
	f.resting, f.latest = 0, ""
	for i := range f.targets {
		t := &f.targets[i]
		if f.targetLoads[i].load.State.Rests() {
			f.resting++
		}
		if version := f.targetLoads[i].engine.version; compareVersions(version, f.latest) > 0 {
			f.latest = version
		}
		paired = paired || t.Role != kv.RoleBoth
		if t.Pulls() {
			pulling++
		}
	}
	f.paired.Store(paired)
	f.pulls.Store(pulling > 1)
}

// noteSizes notes the sizes of the workers' blocks. Without a worker the last ones stay.
func (f *fleet) noteSizes() {
	known, same := f.units.Load(), true
	var sizes []int
	for i := range f.targets {
		size := int(f.targets[i].BlockSize)
		same = same && len(known.sizes) == 1 && size == known.unit
		if len(sizes) == 0 || sizes[len(sizes)-1] != size {
			sizes = append(sizes, size)
		}
	}
	if !same && len(sizes) > 0 {
		known = unitsOf(sizes)
		f.units.Store(known)
	}
	for i := range f.targets {
		if load := f.targetLoads[i].workerLoad; load.times != int(f.targets[i].BlockSize)/known.unit {
			load.times = int(f.targets[i].BlockSize) / known.unit
			load.sumBlocks()
		}
	}
}

// Up adds t to the workers that requests may be routed to. It replaces a target
// with the same key.
func (r *Router) Up(t kv.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.decider.assumes != nil {
		r.decider.assumes.SetCapacity(t.Key, t.TotalBlocks)
		r.decider.assumes.Assume(t.Key, t.Known == kv.Approximate)
	}
	t.Cordoned = r.Health.isCordoned(t.Key.Worker)
	if t.BlockSize <= 0 || t.BlockSize > kv.MaxBlock {
		t.BlockSize = int32(r.blockSize)
	}
	// Most workers have the same names: decisions read them in one place.
	if i := slices.IndexFunc(r.fleet.targets, func(other kv.Target) bool { return slices.Equal(other.Models, t.Models) }); i >= 0 {
		t.Models = r.fleet.targets[i].Models
	}
	at, found := r.fleet.target(t.Key)
	load := r.fleet.loads.expect(t)
	if found {
		if r.fleet.targets[at].Generation != t.Generation {
			load.engine, load.State = engine{}, 0
		}
		r.fleet.targets[at], r.fleet.targetLoads[at].blockSize = t, uint32(t.BlockSize)
	} else {
		r.fleet.targets = slices.Insert(r.fleet.targets, at, t)
		r.fleet.targetLoads = slices.Insert(r.fleet.targetLoads, at, targetLoad{load, load.Load, load.number, uint32(t.BlockSize)})
	}
	r.fleet.several = r.fleet.several || len(r.fleet.targets) > 1
	r.Health.outliers.Join(t.Key, t.Generation, t.Role, r.now())
	r.fleet.note()
	r.Admission.dispatch(r.now())
}

// target finds w among those that are up, or where it would be.
func (f *fleet) target(w kv.WorkerKey) (at int, found bool) {
	return slices.BinarySearchFunc(f.targets, w, func(t kv.Target, key kv.WorkerKey) int { return t.Key.Compare(key) })
}

// Down excludes w from the choice. Bookings on it stay until their requests end.
func (r *Router) Down(w kv.WorkerKey) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, found := r.fleet.target(w); found {
		r.fleet.targets, r.fleet.targetLoads = slices.Delete(r.fleet.targets, at, at+1), slices.Delete(r.fleet.targetLoads, at, at+1)
	}
	r.fleet.loseCell(w)
	r.fleet.loads.silence(w)
	r.Health.outliers.Leave(w, r.now())
	r.fleet.note()
	r.Admission.dispatch(r.now())
}

// Publish stores the load that w reports.
func (r *Router) Publish(w kv.WorkerKey, p policy.Published) {
	r.mu.Lock()
	defer r.unlock()
	at, up := r.fleet.target(w)
	if !up { // a late report would keep the books of a removed worker
		return
	}
	before := r.fleet.targetLoads[at].Published
	r.fleet.loads.publish(w, p, r.now())
	if r.Admission.fair != nil {
		r.Admission.learnRoom(at, before)
		r.Admission.dispatch(r.now())
	}
}

// Transferred stores the counters of w's loads from lower tiers.
func (r *Router) Transferred(w kv.WorkerKey, t policy.Transfers) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, up := r.fleet.target(w); up {
		r.fleet.targetLoads[at].tiers().Count(t)
	}
}

// ShowAdapters stores what w's engine shows of its LoRA adapters.
func (r *Router) ShowAdapters(w kv.WorkerKey, report policy.AdapterReport) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if at, up := r.fleet.target(w); up {
		r.fleet.targetLoads[at].adapters().Show(report, r.now())
	}
}

// Approximates reports whether prompts that are routed to some worker that is up count as cached there.
func (r *Router) Approximates() bool {
	return r.Has(func(t *kv.Target) bool { return t.Known == kv.Approximate })
}

// IsUp reports whether that incarnation of a worker is up.
func (r *Router) IsUp(t kv.Target) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	at, found := r.fleet.target(t.Key)
	return found && r.fleet.targets[at].Generation == t.Generation
}

// Targets returns the workers that are up, by key.
func (r *Router) Targets() []kv.Target {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.fleet.targets)
}

// Count returns the number of workers that are up and not Unanswered.
func (r *Router) Count() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.fleet.targets {
		if !r.fleet.targets[i].Unanswered {
			n++
		}
	}
	return n
}

// Schedulable returns the number of ranks that are up, and neither cordoned nor
// Unanswered.
func (r *Router) Schedulable() (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.fleet.targets {
		if t := &r.fleet.targets[i]; !t.Cordoned && !t.Unanswered {
			n++
		}
	}
	return n
}

// Working reports whether this router has in-flight requests on any rank of a
// worker.
func (r *Router) Working(worker uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fleet.loads.own[worker] > 0
}

// Several reports whether more than one worker has been up at once, so that another one may be
// up again before a request ends.
func (r *Router) Several() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fleet.several
}

// Has reports whether is returns true for any worker that is up. is is called under
// the router's lock.
func (r *Router) Has(is func(*kv.Target) bool) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.fleet.has(is)
}

// has is Has under the lock.
func (f *fleet) has(is func(*kv.Target) bool) bool {
	for i := range f.targets {
		if is(&f.targets[i]) {
			return true
		}
	}
	return false
}

// ranksOf returns those of the targets that are ranks of a worker. The caller holds the
// lock, and may change them.
func (f *fleet) ranksOf(worker uint64) []kv.Target {
	first, _ := f.target(kv.WorkerKey{Worker: worker})
	end := first
	for end < len(f.targets) && f.targets[end].Key.Worker == worker {
		end++
	}
	return f.targets[first:end]
}

// Ranks returns the ranks of a worker that are up, in order.
func (r *Router) Ranks(worker uint64) []kv.Target {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.fleet.ranksOf(worker))
}

// Load returns the load of w.
func (r *Router) Load(w kv.WorkerKey) policy.Load {
	r.mu.Lock()
	defer r.mu.Unlock()
	load := r.fleet.loads.get(w, r.now())
	load.Prefills = slices.Clone(load.Prefills)
	if load.Tiers != nil {
		tiers := *load.Tiers
		load.Tiers = &tiers
	}
	if load.Cell != nil {
		cell := *load.Cell
		load.Cell = &cell
	}
	load.Adapters = load.Adapters.Clone()
	return load
}

// Adapter returns model if it is the name of a LoRA adapter, otherwise an empty
// name. listed means that a worker lists that name.
func (r *Router) Adapter(model string) (adapter string, listed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := range r.fleet.targets {
		if slices.Contains(r.fleet.targets[i].Adapters, model) {
			return model, true
		}
		listed = listed || slices.Contains(r.fleet.targets[i].Models, model)
	}
	return "", listed
}
