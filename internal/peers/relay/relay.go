// Package relay follows relays of Dynamo's contract dynamo.kvrelay.v1: over gRPC a cell
// reports which blocks each of its pools of workers has, as a cuckoo filter that is a
// snapshot and then deltas, and which of its models are ready.
//
// A filter is exact in one direction only: a block that is in it is found, unless the
// sender's filter was full; any other block is found with a probability of at most 1.2e-4.
// Whatever makes a filter doubtful (a gap, another producer, an invalid frame, silence)
// empties it until the next snapshot.
package relay

import (
	"errors"
	"fmt"
	"strings"
)

// The contract: its gRPC service, and the numbers that every message carries. They are
// those of Dynamo 1.6.1.
const (
	service         = "dynamo.kvrelay.v1.KvEventRelay"
	protocolVersion = 1
	contractMarker  = 0x4B565231 // "KVR1"
	identityVersion = 1          // of a PoolID
	filterVersion   = 1          // of a Format
	fingerprintBits = 16
	slotsPerBucket  = 4
)

// Bounds of what the other side sends. A message beyond them is refused.
const (
	// maxMessage is the maximum size of a message, bytes: the default of Dynamo's relay.
	maxMessage = 8 << 20
	// maxBuckets is the maximum number of buckets of a filter, of 8 bytes each: the
	// contract's limit.
	maxBuckets = 1 << 24
	// maxPools is the maximum number of pools of a relay.
	maxPools = 64
	// maxModels is the maximum number of models of a pool, with its adapters; maxAliases of the
	// other names of one.
	maxModels  = 1024
	maxAliases = 64
	// maxText is the maximum length of a name, bytes.
	maxText = 1024
	// maxBlockSize is the maximum number of tokens of a block.
	maxBlockSize = 1 << 20
)

// Identity is a relay's process and its run within that.
type Identity struct{ Instance, Incarnation uint64 }

// Source is the origin of a digest.
type Source uint8

// The sources of a digest.
const (
	Derived  Source = 1 // from the endpoint's properties
	Explicit Source = 2 // configured
)

// Digest identifies what is hashed, or where.
type Digest struct {
	Sum    [16]byte
	Source Source
}

// PoolID identifies a pool of workers over all its generations.
type PoolID struct {
	Semantics  Digest // how blocks are hashed
	Scope      Digest // the endpoint that owns the pool
	DataCenter uint64
}

// Format is the layout of a filter.
type Format struct {
	Seed    uint64
	Buckets int // a power of two, 2 to maxBuckets
}

// Producer is one generation of a pool's filter. A stream is valid for exactly one.
type Producer struct {
	Pool        PoolID
	Incarnation uint64
	Generation  uint64 // at least 1
	Format      Format
}

// Model is a base model, or an adapter of one, that a pool serves.
type Model struct {
	Name    string
	Base    string
	Adapter string // enters the hashes of its blocks; empty: the base model
	Aliases []string
}

// HashFormat is the way from tokens to sequence hashes.
type HashFormat uint8

// The hash formats.
const (
	Standard HashFormat = 1 // a block's tokens
	Eagle    HashFormat = 2 // a block's tokens and the one behind them
)

// Role is the work of a pool's workers.
type Role uint8

// The roles.
const (
	Prefill    Role = 1
	Decode     Role = 2
	Encode     Role = 3
	Aggregated Role = 4
	Legacy     Role = 5 // a worker that does not say
)

// Pool describes a pool of workers.
type Pool struct {
	Producer  Producer
	encoded   []byte // Producer as the relay encoded it, for the subscription
	Models    []Model
	BlockSize int // tokens
	Format    HashFormat
	Roles     uint8 // bits 1 << Role
}

// Serves returns the model that a request names, by its name or an alias. known is false
// if the pool does not serve it.
func (p *Pool) Serves(name string) (m *Model, known bool) {
	for i := range p.Models {
		if p.Models[i].Name == name {
			return &p.Models[i], true
		}
	}
	for i := range p.Models {
		for _, alias := range p.Models[i].Aliases {
			if alias == name {
				return &p.Models[i], true
			}
		}
	}
	return nil, false
}

// Has reports whether the pool's workers have that role.
func (p *Pool) Has(role Role) bool { return p.Roles&(1<<role) != 0 }

// Catalog is all pools of a relay.
type Catalog struct {
	Relay Identity
	Pools []Pool
	// Refused are the pools that were left out, with what this version does not know of
	// each. Their state must not be used.
	Refused []error
}

// served is a base model of a pool.
type served struct {
	pool  PoolID
	model string
}

// stateUnavailable is the state of a model that cannot be served. Others are known not to be.
const stateUnavailable = 1

// Readiness is which models of a relay cannot be served.
type Readiness struct {
	Relay       Identity
	Unavailable map[served]bool
}

// Kind is the kind of an Update.
type Kind uint8

// The kinds.
const (
	Snapshot  Kind = 1 // a part of one
	Delta     Kind = 2
	Heartbeat Kind = 3
)

// Update is a message of a pool's stream.
type Update struct {
	Relay          Identity
	Producer       Producer
	Base, Sequence uint64
	Kind           Kind
	Payload        []byte // a frame; empty for a heartbeat
}

// errUnsupported marks what a later version may mean: the entry is left out, and the others
// are used.
var errUnsupported = errors.New("not supported")

// check refuses a format that is not of the contract.
func (f Format) check() error {
	if f.Buckets < 2 || f.Buckets > maxBuckets || f.Buckets&(f.Buckets-1) != 0 {
		return fmt.Errorf("a filter of %d buckets: want a power of two from 2 to %d", f.Buckets, maxBuckets)
	}
	return nil
}

func (d Digest) check(what string) error {
	switch d.Source {
	case Derived, Explicit:
		return nil
	case 0:
		return fmt.Errorf("the %s has no source", what)
	}
	return fmt.Errorf("source %d of the %s: %w", d.Source, what, errUnsupported)
}

func (p *Producer) check() error {
	if p.Generation == 0 {
		return errors.New("a producer without a layout generation")
	}
	return p.Format.check()
}

func (m *Model) check() error {
	if err := errors.Join(checkText("model", m.Name), checkText("base model", m.Base)); err != nil {
		return err
	}
	for _, alias := range m.Aliases {
		if err := checkText("alias", alias); err != nil {
			return err
		}
	}
	return nil
}

// check refuses a pool that cannot be used.
func (p *Pool) check() error {
	switch {
	case p.BlockSize < 1 || p.BlockSize > maxBlockSize:
		return fmt.Errorf("a block of %d tokens: want 1 to %d", p.BlockSize, maxBlockSize)
	case p.Format == 0:
		return errors.New("a pool without a hash format")
	case p.Format > Eagle:
		return fmt.Errorf("hash format %d: %w", p.Format, errUnsupported)
	case p.Roles == 0:
		return errors.New("a pool without a role")
	}
	return nil
}

func checkText(what, text string) error {
	switch {
	case text == "":
		return fmt.Errorf("an empty %s", what)
	case len(text) > maxText:
		return fmt.Errorf("a %s of %d bytes: want at most %d", what, len(text), maxText)
	case strings.TrimSpace(text) != text:
		return fmt.Errorf("%s %q begins or ends with a space", what, text)
	}
	return nil
}
