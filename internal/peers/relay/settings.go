package relay

import (
	"fmt"
	"slices"
)

// Settings are the flags of the relays that are followed.
type Settings struct {
	RelayCells []Cell `group:"Relay" name:"relay-cell" placeholder:"ID=HOST:PORT" help:"Relay of a worker that is a cell of Dynamo's: it reports which blocks the cell has. ID is the id of a --worker with the URL of the cell's OpenAI port. Plaintext, or TLS with ID=https://HOST:PORT and --worker-ca. Comma-separated. See docs/dynamo-relay.md."`
}

// CheckCells refuses cells that are no workers, or that report their blocks in another way: ids
// are those of the attached workers, routers those of kind=router.
func (s Settings) CheckCells(ids, routers []uint64) error {
	if len(s.RelayCells) > maxCells {
		return fmt.Errorf("--relay-cell: %d cells, at most %d can be followed", len(s.RelayCells), maxCells)
	}
	for i, c := range s.RelayCells {
		if !slices.Contains(ids, c.Worker) {
			return fmt.Errorf("--relay-cell %d=%s: no --worker has id=%d", c.Worker, c.Address, c.Worker)
		}
		if slices.Contains(routers, c.Worker) {
			return fmt.Errorf("--relay-cell %d=%s: worker %d has kind=router, so that its own stream reports its blocks: "+
				"leave out --relay-cell for it, or kind=router to follow its relay", c.Worker, c.Address, c.Worker)
		}
		if slices.ContainsFunc(s.RelayCells[:i], func(other Cell) bool { return other.Worker == c.Worker }) {
			return fmt.Errorf("--relay-cell: worker %d is given twice", c.Worker)
		}
	}
	return nil
}
