package main

import "fmt"

// check tells what is inconsistent between the workers' modelled memories and
// the Radix.
func (a *Approx) check() error {
	if err := a.Radix.check(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.Radix.Workers() {
		if a.caches[w] == nil && a.Radix.Blocks(w) > 0 {
			return fmt.Errorf("%v holds %d blocks and has no memory", w, a.Radix.Blocks(w))
		}
	}
	for w, c := range a.caches {
		if err := c.pool.check(); err != nil {
			return fmt.Errorf("%v: %w", w, err)
		}
		if c.capacity != a.capacity[w] || c.capacity > 0 && c.pool.size() > c.capacity || c.pool.size() > 0 && len(c.used) != len(c.pool.references()) {
			return fmt.Errorf("%v: %d blocks of %d (%d), times of %d", w, c.pool.size(), c.capacity, a.capacity[w], len(c.used))
		}
		var before int64
		for _, b := range c.pool.order() {
			if c.used[b] < before {
				return fmt.Errorf("%v: block %d was used before one that goes first", w, b)
			}
			before = c.used[b]
		}
		slot, _ := a.Radix.slot(w)
		for _, held := range a.Radix.snapshot(w) {
			if b := c.pool.find(held.block.Engine); b == 0 {
				return fmt.Errorf("%v: the index has a block that the memory has not", w)
			} else if parent := held.parent; parent != rootNode && !a.Radix.sets.has(a.Radix.nodes.at(parent).members, slot) {
				return fmt.Errorf("%v: block %d has lost the one before it", w, b)
			}
		}
	}
	return nil
}
