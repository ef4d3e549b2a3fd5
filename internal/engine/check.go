package engine

import (
	"fmt"
	"slices"
)

// Check tells what is inconsistent in the engine: the pool itself, or
// references that no request holds.
func (e *Engine) Check() error {
	if err := e.Pool.Check(); err != nil {
		return err
	}
	counted := e.Pool.References()
	refs := make([]int32, len(counted))
	for _, r := range slices.Concat(e.running, e.fetching, e.fetched, e.kept) {
		for _, b := range r.Held {
			refs[b]++
		}
	}
	for b := 1; b < len(refs); b++ {
		if refs[b] != counted[b] {
			return fmt.Errorf("block %d has %d references, requests hold %d", b, counted[b], refs[b])
		}
	}
	for _, r := range e.waiting {
		if len(r.Held) > 0 || r.running {
			return fmt.Errorf("a waiting request holds %d blocks", len(r.Held))
		}
	}
	return nil
}
