package kv

import (
	"strconv"
	"sync/atomic"
)

const (
	// NoWorker is the name that means no worker.
	NoWorker = "none"
	// OtherWorkers is the label of the sums over all workers without series of their own. A
	// worker of that name gets its id appended.
	OtherWorkers = "(others)"
)

// Names maps worker ids to unique labels: the configured name of a worker,
// otherwise its id as a number. The zero value and nil have no names. Only one
// goroutine may call Set at a time; the other methods may run concurrently with it
// and take no lock.
type Names struct {
	known atomic.Pointer[named] // nil: no worker has a name
}

// named is what Names knows. It never changes.
type named struct {
	labels map[uint64]string
	ids    map[string]uint64 // by label
}

// Set replaces all names by those of the list. If several workers have the same name,
// the first keeps it and the others get their ids appended, as does a worker whose name
// is a number (possibly another worker's id), NoWorker or OtherWorkers.
func (n *Names) Set(list []Worker) {
	if n == nil {
		return
	}
	all := &named{make(map[uint64]string, len(list)), make(map[string]uint64, len(list))}
	for _, w := range list {
		if w.Name == "" {
			continue
		}
		label, behind := w.Name, "#"+strconv.FormatUint(w.ID, 10)
		for all.taken(label) {
			label += behind
		}
		all.labels[w.ID], all.ids[label] = label, w.ID
	}
	n.known.Store(all)
}

func (n *Names) now() named {
	if n != nil {
		if all := n.known.Load(); all != nil {
			return *all
		}
	}
	return named{}
}

// taken reports whether a name is used, could be an id, or has a meaning.
func (n *named) taken(label string) bool {
	_, ok := n.ids[label]
	_, err := strconv.ParseUint(label, 10, 64)
	return ok || err == nil || label == NoWorker || label == OtherWorkers
}

// Any reports whether any worker has a name.
func (n *Names) Any() bool { return len(n.now().labels) > 0 }

// Name returns the worker's name; empty: it has none.
func (n *Names) Name(id uint64) string { return n.now().labels[id] }

// Label returns the label of the worker: its name, else its id.
func (n *Names) Label(id uint64) string {
	if name := n.Name(id); name != "" {
		return name
	}
	return strconv.FormatUint(id, 10)
}

// Now returns a snapshot of the names, for callers that must not see them change.
func (n *Names) Now() *Names {
	names, all := new(Names), n.now()
	names.known.Store(&all)
	return names
}

// ID returns the id of the worker with that name. Workers without a name are not found.
func (n *Names) ID(name string) (id uint64, found bool) {
	id, found = n.now().ids[name]
	return id, found
}
