package radix

import "fmt"

// Check tells what is inconsistent between the workers' modelled memories and
// the Radix.
func (a *Approx) Check() error {
	if err := a.Tree.Check(); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, w := range a.Tree.Workers() {
		if a.Caches[w] == nil && a.Tree.Blocks(w) > 0 {
			return fmt.Errorf("%v holds %d blocks and has no memory", w, a.Tree.Blocks(w))
		}
	}
	for w, c := range a.Caches {
		if err := c.Pool.Check(); err != nil {
			return fmt.Errorf("%v: %w", w, err)
		}
		if c.capacity != a.capacity[w] || c.capacity > 0 && c.Pool.Size() > c.capacity || c.Pool.Size() > 0 && len(c.used) != len(c.Pool.References()) {
			return fmt.Errorf("%v: %d blocks of %d (%d), times of %d", w, c.Pool.Size(), c.capacity, a.capacity[w], len(c.used))
		}
		var before int64
		for _, b := range c.Pool.Order() {
			if c.used[b] < before {
				return fmt.Errorf("%v: block %d was used before one that goes first", w, b)
			}
			before = c.used[b]
		}
		slot, _ := a.Tree.slot(w)
		for _, held := range a.Tree.snapshot(w) {
			if b := c.Pool.Find(held.block.Engine); b == 0 {
				return fmt.Errorf("%v: the index has a block that the memory has not", w)
			} else if parent := held.parent; parent != rootNode && !a.Tree.sets.has(a.Tree.nodes.at(parent).members, slot) {
				return fmt.Errorf("%v: block %d has lost the one before it", w, b)
			}
		}
	}
	return nil
}
