package engine

import (
	"fmt"
	"slices"
)

// Check returns the first inconsistency of the engine: in the pool itself, or a
// block whose references are not those that requests hold.
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
