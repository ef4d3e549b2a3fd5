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
	"unicode/utf8"
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
	// maxModels is the maximum number of models of a pool, with its adapters, and of
	// entries of a readiness message; maxAliases of the other names of one.
	maxModels  = 1024
	maxAliases = 64
	// maxMembers is the maximum number of endpoints of a readiness entry.
	maxMembers = 256
	// maxText is the maximum length of a name, bytes.
	maxText = 1024
	// maxBlockSize is the maximum number of tokens of a block.
	maxBlockSize = 1 << 20
)

// Identity is a relay's process and its run within that.
type Identity struct{ Instance, Incarnation uint64 }

// Source is how a digest came about.
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

// Endpoint is Dynamo's name of a set of workers. It is no address.
type Endpoint struct{ Namespace, Component, Name string }

// String returns the name as Dynamo writes it.
func (e Endpoint) String() string { return e.Namespace + "." + e.Component + "." + e.Name }

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
	Endpoint  Endpoint
	Models    []Model
	BlockSize int // tokens
	Format    HashFormat
	Roles     []Role
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
func (p *Pool) Has(role Role) bool {
	for _, r := range p.Roles {
		if r == role {
			return true
		}
	}
	return false
}

// Catalog is all pools of a relay.
type Catalog struct {
	Relay    Identity
	Revision uint64
	Pools    []Pool
	// Refused are the pools that were left out, with what this version does not know of
	// each. Their state must not be used.
	Refused []error
}

// State is the readiness of a model.
type State uint8

// The states. Unknown is a state of its own, not a missing value.
const (
	Unknown     State = 0
	Unavailable State = 1
	Ready       State = 2
)

// Member is an endpoint that serves a model.
type Member struct {
	Endpoint Endpoint
	Roles    []Role
	Pool     PoolID
	HasPool  bool // false: it publishes no blocks
}

// AdapterState is the readiness of an adapter.
type AdapterState struct {
	Name    string
	State   State
	Missing []Role
}

// Entry is the readiness of a model in a namespace.
type Entry struct {
	Namespace, Model string
	State            State
	Present, Missing []Role
	Members          []Member
	Duplicates       []Role // Prefill or Decode roles of more than one endpoint
	Legacy           bool   // a worker without a role makes the model ready
	Adapters         []AdapterState
}

// Readiness is the readiness of all models of a relay.
type Readiness struct {
	Relay    Identity
	Revision uint64
	Entries  []Entry
	Refused  []error // entries that were left out
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
	Sent           uint64 // µs of the sender's clock
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
	if err := p.Pool.check(); err != nil {
		return err
	}
	if p.Generation == 0 {
		return errors.New("a producer without a layout generation")
	}
	return p.Format.check()
}

func (id *PoolID) check() error {
	return errors.Join(id.Semantics.check("cache semantics"), id.Scope.check("routing scope"))
}

// check refuses a pool that cannot be used.
func (p *Pool) check() error {
	if err := p.Producer.check(); err != nil {
		return err
	}
	if err := p.Endpoint.check(); err != nil {
		return err
	}
	for i := range p.Models {
		m := &p.Models[i]
		if err := errors.Join(checkText("model", m.Name), checkText("base model", m.Base)); err != nil {
			return err
		}
		seen := map[string]bool{}
		for _, alias := range m.Aliases {
			if err := checkText("alias", alias); err != nil {
				return err
			}
			if seen[alias] {
				return fmt.Errorf("model %q has alias %q twice", m.Name, alias)
			}
			seen[alias] = true
		}
	}
	switch {
	case p.BlockSize < 1 || p.BlockSize > maxBlockSize:
		return fmt.Errorf("a block of %d tokens: want 1 to %d", p.BlockSize, maxBlockSize)
	case p.Format == 0:
		return errors.New("a pool without a hash format")
	case p.Format > Eagle:
		return fmt.Errorf("hash format %d: %w", p.Format, errUnsupported)
	case len(p.Roles) == 0:
		return errors.New("a pool without a role")
	}
	return checkRoles(p.Roles)
}

func (e Endpoint) check() error {
	return errors.Join(checkText("namespace", e.Namespace), checkText("component", e.Component), checkText("endpoint", e.Name))
}

// check refuses an entry that cannot be used. One that names a role which is not known is
// left out as a whole, as a missing role could make it look ready.
func (e *Entry) check() error {
	if err := errors.Join(checkText("namespace", e.Namespace), checkText("model", e.Model), e.State.check()); err != nil {
		return err
	}
	for _, roles := range [][]Role{e.Present, e.Missing, e.Duplicates} {
		if err := checkRoles(roles); err != nil {
			return err
		}
	}
	for _, role := range e.Duplicates {
		if role != Prefill && role != Decode {
			return fmt.Errorf("role %d of several endpoints: want prefill or decode", role)
		}
	}
	if len(e.Members) == 0 {
		return fmt.Errorf("model %q has no endpoint", e.Model)
	}
	seen := map[Endpoint]bool{}
	for i := range e.Members {
		m := &e.Members[i]
		switch err := errors.Join(m.Endpoint.check(), checkRoles(m.Roles)); {
		case err != nil:
			return err
		case len(m.Roles) == 0:
			return fmt.Errorf("endpoint %s has no role", m.Endpoint)
		case m.Endpoint.Namespace != e.Namespace:
			return fmt.Errorf("endpoint %s is not in namespace %q", m.Endpoint, e.Namespace)
		case seen[m.Endpoint]:
			return fmt.Errorf("endpoint %s is listed twice", m.Endpoint)
		}
		seen[m.Endpoint] = true
		if m.HasPool {
			if err := m.Pool.check(); err != nil {
				return err
			}
		}
	}
	names := map[string]bool{}
	for _, a := range e.Adapters {
		if err := errors.Join(checkText("adapter", a.Name), a.State.check(), checkRoles(a.Missing)); err != nil {
			return err
		}
		if names[a.Name] {
			return fmt.Errorf("adapter %q is listed twice", a.Name)
		}
		names[a.Name] = true
	}
	return nil
}

func (s State) check() error {
	if s > Ready {
		return fmt.Errorf("state %d: %w", s, errUnsupported)
	}
	return nil
}

func checkRoles(roles []Role) error {
	var seen [Legacy + 1]bool
	for _, r := range roles {
		switch {
		case r == 0:
			return errors.New("an unspecified role")
		case r > Legacy:
			return fmt.Errorf("role %d: %w", r, errUnsupported)
		case seen[r]:
			return fmt.Errorf("role %d is listed twice", r)
		}
		seen[r] = true
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
	case !utf8.ValidString(text):
		return fmt.Errorf("a %s that is no UTF-8", what)
	}
	return nil
}
