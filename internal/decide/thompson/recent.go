package thompson

import "container/list"

// recent is a bounded map that knows which of its entries was
// touched longest ago; that one goes when the map is full and another comes.
type recent[K comparable, V any] struct {
	limit   int
	entries map[K]*list.Element // of *recentEntry[K, V]
	order   list.List           // touched longest ago first
}

type recentEntry[K comparable, V any] struct {
	key   K
	value V
}

func newRecent[K comparable, V any](limit int) *recent[K, V] {
	return &recent[K, V]{limit: limit, entries: map[K]*list.Element{}}
}

func (r *recent[K, V]) len() int { return len(r.entries) }

// get returns the entry of key without touching it; the zero value: there is none.
func (r *recent[K, V]) get(key K) (value V) {
	if e := r.entries[key]; e != nil {
		value = e.Value.(*recentEntry[K, V]).value
	}
	return value
}

// put sets and touches an entry. If another entry had to go for it, evicted is
// that one.
func (r *recent[K, V]) put(key K, value V) (evicted V, full bool) {
	if e := r.entries[key]; e != nil {
		e.Value.(*recentEntry[K, V]).value = value
		r.order.MoveToBack(e)
		return evicted, false
	}
	if len(r.entries) >= r.limit {
		oldest, _ := r.oldest()
		evicted, full = r.remove(oldest)
	}
	r.entries[key] = r.order.PushBack(&recentEntry[K, V]{key, value})
	return evicted, full
}

// remove takes an entry out.
func (r *recent[K, V]) remove(key K) (value V, had bool) {
	e := r.entries[key]
	if e == nil {
		return value, false
	}
	delete(r.entries, key)
	return r.order.Remove(e).(*recentEntry[K, V]).value, true
}

// oldest returns the entry touched longest ago; the zero values: there is none.
func (r *recent[K, V]) oldest() (key K, value V) {
	if e := r.order.Front(); e != nil {
		entry := e.Value.(*recentEntry[K, V])
		return entry.key, entry.value
	}
	return key, value
}

// all yields the entries, those touched longest ago first. The one yielded may
// be removed meanwhile, others may not.
func (r *recent[K, V]) all(yield func(K, V) bool) {
	for e := r.order.Front(); e != nil; {
		next := e.Next()
		entry := e.Value.(*recentEntry[K, V])
		if !yield(entry.key, entry.value) {
			return
		}
		e = next
	}
}
