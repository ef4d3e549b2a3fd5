package relay

import (
	"errors"
	"fmt"
	"slices"
)

// maxBlocks is the maximum of RelayBlocks: a filter of MaxBuckets.
const maxBlocks = MaxBuckets * slotsPerBucket / expectedShare

// Settings are the flags of the relay that tells others what this router's workers hold.
type Settings struct {
	RelayPort       int    `group:"Relay" default:"0" placeholder:"PORT" help:"gRPC port on which others follow what the workers of the default model hold, by the contract of Dynamo's KV relay (usually 5561). See docs/dynamo-relay.md. 0 disables it."`
	RelayHost       string `group:"Relay" default:"127.0.0.1" placeholder:"HOST" help:"Listen address of that port."`
	RelayTLS        bool   `group:"Relay" name:"relay-tls" help:"Serve TLS on --relay-port with --tls-cert, and accept only clients that --tls-client-ca has signed, if it is given. Dynamo's own relay and followers speak plaintext behind a proxy."`
	RelayDataCenter string `group:"Relay" default:"kvrouter" placeholder:"NAME" help:"Name of this cell, different for each that has the same followers."`
	RelayBlocks     int    `group:"Relay" default:"1048576" help:"Different blocks to tell of, 4 to 8 bytes each. Almost twice as many fit; further ones are left out."`
	RelayCells      []Cell `group:"Relay" name:"relay-cell" placeholder:"ID=HOST:PORT" help:"Relay of a worker that is a cell of Dynamo's, or of a kvrouter with --relay-port: what its workers hold. ID is the id of a --worker with the URL of the cell's OpenAI port. Plaintext, or TLS with ID=https://HOST:PORT and --worker-ca. Comma-separated."`
}

// CheckCells refuses cells that are no workers, or that tell what they hold in another way: ids
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
			return fmt.Errorf("--relay-cell %d=%s: worker %d has kind=router, so that its own stream tells what it holds: leave out --relay-cell for it, or kind=router to follow its relay", c.Worker, c.Address, c.Worker)
		}
		if slices.ContainsFunc(s.RelayCells[:i], func(other Cell) bool { return other.Worker == c.Worker }) {
			return fmt.Errorf("--relay-cell: worker %d is given twice", c.Worker)
		}
	}
	return nil
}

// Validate checks the settings; its errors name the flag. events is whether the index has
// the blocks that workers announce, certified whether there is a certificate.
func (s Settings) Validate(events, certified bool) error {
	switch {
	case s.RelayTLS && !certified:
		return errors.New("--relay-tls requires --tls-cert")
	case s.RelayPort != 0 && !events:
		return errors.New("--relay-port tells of blocks that KV events announce, and there are none: remove --no-kv-events, or choose a policy that uses them")
	case s.RelayBlocks < 1 || s.RelayBlocks > maxBlocks:
		return fmt.Errorf("--relay-blocks %d: give 1 to %d", s.RelayBlocks, maxBlocks)
	case s.RelayDataCenter == "" || len(s.RelayDataCenter) > maxText:
		return fmt.Errorf("--relay-data-center: give 1 to %d characters", maxText)
	case s.RelayPort != 0 && s.RelayHost == "":
		return errors.New("--relay-host must not be empty")
	}
	return nil
}
