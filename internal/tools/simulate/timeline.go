package simulate

import (
	"fmt"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/tools/engine"
)

// lateEvent is a change of a worker's cache that the index sees later.
type lateEvent struct {
	due    time.Duration
	worker int
	event  engine.Event
	// cleared means that all of the cache is gone, not event.
	cleared bool
}

// cacheChanged takes a change of worker w's cache to the index, at once or late.
func (s *simulator) cacheChanged(w int, event engine.Event) {
	switch {
	case !s.follows || event.Tier != kv.Device && s.UnpublishedTiers:
	case s.EventLag == 0:
		s.apply(w, event)
	default:
		event.Removed = append([]uint64(nil), event.Removed...)
		s.lagging = append(s.lagging, lateEvent{due: s.now + s.EventLag, worker: w, event: event})
	}
}

// catchUp applies due events to the index.
func (s *simulator) catchUp() {
	n := 0
	for ; n < len(s.lagging) && s.lagging[n].due <= s.now; n++ {
		if late := &s.lagging[n]; late.cleared {
			s.clear(late.worker)
		} else {
			s.apply(late.worker, late.event)
		}
		s.lagging[n] = lateEvent{}
	}
	s.lagging = s.lagging[n:]
}

// clear empties worker w's part of the indexes.
func (s *simulator) clear(w int) {
	for i, index := range s.indexes {
		_, _ = index.Apply(key(w), &radix.Change{Kind: radix.DeviceCleared}) // cannot fail
		s.routers[i].Health.Cleared(key(w))
	}
}

// apply changes the indexes as worker w's cache has changed.
func (s *simulator) apply(w int, event engine.Event) {
	key := kv.WorkerKey{Worker: uint64(w)}
	change := s.changeOf(event)
	for _, index := range s.indexes {
		if done, err := index.Apply(key, &change); err != nil {
			s.err = err
		} else if done.Unknown > 0 && event.Tier == kv.Device {
			s.err = fmt.Errorf("simulated worker %d removed %d blocks that the index does not know", w, done.Unknown)
		}
	}
}

// happening is the end of a worker's pass, a turn whose user has thought, or the
// end of a prompt's way from one worker to another.
type happening struct {
	at    time.Duration
	order int    // of those at one time: the pass's worker; turns, fetches and calls of after come later
	call  func() // nil: a pass
}

// timeline is a heap, what happens next at its top.
type timeline []happening

func (t timeline) Len() int { return len(t) }

func (t timeline) Less(i, j int) bool {
	return t[i].at < t[j].at || t[i].at == t[j].at && t[i].order < t[j].order
}

func (t timeline) Swap(i, j int) { t[i], t[j] = t[j], t[i] }

// Push implements heap.Interface.
func (t *timeline) Push(h any) { *t = append(*t, h.(happening)) }

// Pop implements heap.Interface.
func (t *timeline) Pop() any {
	last := len(*t) - 1
	h := (*t)[last]
	*t = (*t)[:last]
	return h
}
