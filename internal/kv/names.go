package kv

import (
	"strconv"
	"sync/atomic"
)

// NoWorker stands where a worker is named and none is meant.
const NoWorker = "none"

// Names tells what workers are called for people: those that whoever runs them has
// named by that name, all others by their id as a number. No two are called alike. The
// zero value, and nil, know no name. Set is for one goroutine at a time; the other
// methods are safe beside it and take no lock.
type Names struct {
	known atomic.Pointer[named] // nil: nobody has a name
}

// named is what Names knows. It never changes.
type named struct {
	labels map[uint64]string
	ids    map[string]uint64 // by label
}

// Set forgets all names and takes those of the list. Of several workers with one name
// the first has it alone; the others have their ids behind it, as has one whose name is a
// number, and thus may be another's id, or means nobody.
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

// taken reports whether a name means somebody else, or nobody.
func (n *named) taken(label string) bool {
	_, is := n.ids[label]
	_, err := strconv.ParseUint(label, 10, 64)
	return is || err == nil || label == NoWorker
}

// Any reports whether any worker has a name.
func (n *Names) Any() bool { return len(n.now().labels) > 0 }

// Name returns the worker's name; empty: it has none.
func (n *Names) Name(id uint64) string { return n.now().labels[id] }

// Label returns what the worker is called: its name, else its id.
func (n *Names) Label(id uint64) string {
	if name := n.Name(id); name != "" {
		return name
	}
	return strconv.FormatUint(id, 10)
}

// Now returns the names as they are, for who must not call two workers alike because the
// names change meanwhile.
func (n *Names) Now() *Names {
	names, all := new(Names), n.now()
	names.known.Store(&all)
	return names
}

// ID returns the id of the worker of that name. That of a worker without a name is not
// found.
func (n *Names) ID(name string) (id uint64, found bool) {
	id, found = n.now().ids[name]
	return id, found
}
