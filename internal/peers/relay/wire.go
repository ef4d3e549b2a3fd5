package relay

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// The contract's messages are few, and their fields are known here by number alone. A field
// that is not used is skipped, as the contract demands; a value that is not known refuses the
// pool that has it, and no other one. Generated code would refuse the whole message for a name
// that is no UTF-8, and take memory for each field before it is counted.

const (
	// markerField is the number of the marker, in every message that is not part of another.
	markerField = 127
	// maxFields is the maximum number of fields of a message, without those of the messages in
	// it.
	maxFields = 16 << 10
)

// errTooMany refuses a message with more parts than a bound of relay.go allows.
var errTooMany = errors.New("more than allowed")

// fields are where the fields of a message belong, by number: a *uint64, a *[]byte, which
// becomes part of the message, a *string, or an each. Of a field that is repeated the last one
// counts.
type fields map[protowire.Number]any

// each is called for each field of a number: number is that of one without a length, text the
// content of one with, otherwise nil.
type each func(number uint64, text []byte) error

// read reads a message.
func (f fields) read(message []byte) error {
	for left := maxFields; len(message) > 0; left-- {
		if left == 0 {
			return fmt.Errorf("fields of a message: %w, %d", errTooMany, maxFields)
		}
		at, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		var number uint64
		var text []byte
		switch kind {
		case protowire.VarintType:
			number, n = protowire.ConsumeVarint(message)
		case protowire.Fixed32Type:
			var v uint32
			v, n = protowire.ConsumeFixed32(message)
			number = uint64(v)
		case protowire.Fixed64Type:
			number, n = protowire.ConsumeFixed64(message)
		case protowire.BytesType:
			text, n = protowire.ConsumeBytes(message)
		default:
			n = protowire.ConsumeFieldValue(at, kind, message)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if err := put(f[at], number, text); err != nil {
			return err
		}
	}
	return nil
}

// put puts a field where it belongs. One of another kind is skipped.
func put(where any, number uint64, text []byte) error {
	switch where := where.(type) {
	case *uint64:
		if text == nil {
			*where = number
		}
	case *[]byte:
		if text != nil {
			*where = text
		}
	case *string:
		if text == nil {
			return nil
		}
		if len(text) > maxText || !utf8.Valid(text) {
			return fmt.Errorf("a text of %d bytes: want UTF-8 of at most %d", len(text), maxText)
		}
		*where = string(text)
	case each:
		return where(number, text)
	}
	return nil
}

// encodeRequest returns a request. producer is nil but for SubscribeKvPool.
func encodeRequest(producer []byte) []byte {
	dst := protowire.AppendString(protowire.AppendTag(nil, 1, protowire.BytesType), subscriber)
	if producer != nil {
		dst = protowire.AppendBytes(protowire.AppendTag(dst, 2, protowire.BytesType), producer)
	}
	return appendMarker(dst)
}

func appendMarker(dst []byte) []byte {
	return protowire.AppendFixed32(protowire.AppendTag(dst, markerField, protowire.Fixed32Type), contractMarker)
}

// readAnswer reads an answer, and checks what every one has. f are its other fields.
func readAnswer(message []byte, f fields) (relay Identity, err error) {
	var version, marker uint64
	var identity []byte
	f[1], f[2], f[markerField] = &version, &identity, &marker
	if err := f.read(message); err != nil {
		return relay, err
	}
	switch {
	case marker != contractMarker:
		return relay, fmt.Errorf("marker %#x: want %#x, that of %s", marker, contractMarker, service)
	case version != protocolVersion:
		return relay, fmt.Errorf("version %d of the contract: want %d", version, protocolVersion)
	case identity == nil:
		return relay, errors.New("a message without the identity of its relay")
	}
	return relay, fields{1: &relay.Instance, 2: &relay.Incarnation}.read(identity)
}

func decodeDigest(text []byte, what string) (d Digest, err error) {
	var sum []byte
	var source uint64
	if err := (fields{1: &sum, 2: &source}).read(text); err != nil {
		return d, err
	}
	if len(sum) != len(d.Sum) {
		return d, fmt.Errorf("%s of %d bytes: want %d", what, len(sum), len(d.Sum))
	}
	d = Digest{[16]byte(sum), Source(min(source, 255))}
	return d, d.check(what)
}

func decodePoolID(text []byte) (id PoolID, err error) {
	var version uint64
	var domain, semantics, scope []byte
	if err := (fields{1: &version, 2: &domain, 3: &id.DataCenter}).read(text); err != nil {
		return id, err
	}
	if version != identityVersion {
		return id, fmt.Errorf("version %d of a pool's identity: %w", version, errUnsupported)
	}
	if err := (fields{1: &semantics, 2: &scope}).read(domain); err != nil {
		return id, err
	}
	if id.Semantics, err = decodeDigest(semantics, "cache semantics"); err != nil {
		return id, err
	}
	id.Scope, err = decodeDigest(scope, "routing scope")
	return id, err
}

func decodeProducer(text []byte) (p Producer, err error) {
	var pool, format []byte
	var version, bits, slots, buckets uint64
	if err := (fields{1: &pool, 2: &p.Incarnation, 3: &p.Generation, 4: &format}).read(text); err != nil {
		return p, err
	}
	if p.Pool, err = decodePoolID(pool); err != nil {
		return p, err
	}
	if err := (fields{1: &version, 2: &p.Format.Seed, 3: &buckets, 4: &bits, 5: &slots}).read(format); err != nil {
		return p, err
	}
	if version != filterVersion || bits != fingerprintBits || slots != slotsPerBucket {
		return p, fmt.Errorf("a filter of version %d with %d slots of %d bits: %w", version, slots, bits, errUnsupported)
	}
	p.Format.Buckets = int(min(buckets, maxBuckets+1))
	return p, p.check()
}

// decodeModel leaves Base empty if the target is of a kind that is not known: it must not
// be taken for a base model.
func decodeModel(text []byte) (m Model, err error) {
	var target []byte
	if err := (fields{1: &m.Name, 2: &target, 3: each(func(_ uint64, text []byte) error {
		if len(m.Aliases) == maxAliases {
			return fmt.Errorf("aliases of a model: %w, %d", errTooMany, maxAliases)
		}
		m.Aliases = append(m.Aliases, "")
		return put(&m.Aliases[len(m.Aliases)-1], 0, text)
	})}).read(text); err != nil {
		return m, err
	}
	if err := (fields{1: each(func(_ uint64, text []byte) error {
		m.Base, m.Adapter = "", "" // the last kind counts
		return fields{1: &m.Base}.read(text)
	}), 2: each(func(_ uint64, text []byte) error {
		m.Base, m.Adapter = "", ""
		return errors.Join(fields{1: &m.Base, 2: &m.Adapter}.read(text), checkText("adapter", m.Adapter))
	})}).read(target); err != nil {
		return m, err
	}
	if m.Base == "" {
		return m, fmt.Errorf("the target of model %.200q: %w", m.Name, errUnsupported)
	}
	return m, m.check()
}

func decodePool(text []byte) (p Pool, err error) {
	var producer, hashing []byte
	var size, format uint64
	if err := (fields{1: &producer, 3: each(func(_ uint64, text []byte) error {
		if len(p.Models) == maxModels {
			return fmt.Errorf("models of a pool: %w, %d", errTooMany, maxModels)
		}
		m, err := decodeModel(text)
		p.Models = append(p.Models, m)
		return err
	}), 4: &hashing, 5: each(p.decodeRoles)}).read(text); err != nil {
		return p, err
	}
	if p.Producer, err = decodeProducer(producer); err != nil {
		return p, err
	}
	if err := (fields{1: &size, 2: &format}).read(hashing); err != nil {
		return p, err
	}
	p.encoded, p.BlockSize, p.Format = bytes.Clone(producer), int(min(size, maxBlockSize+1)), HashFormat(min(format, 255))
	return p, p.check()
}

// decodeRoles appends the roles of a field, packed or not.
func (p *Pool) decodeRoles(number uint64, text []byte) error {
	if text == nil {
		text = protowire.AppendVarint(nil, number)
	}
	for len(text) > 0 {
		role, n := protowire.ConsumeVarint(text)
		if n < 0 {
			return protowire.ParseError(n)
		}
		if role == 0 || role > uint64(Legacy) {
			return fmt.Errorf("role %d: %w", role, errUnsupported)
		}
		p.Roles |= 1 << role
		text = text[n:]
	}
	return nil
}

// decodeCatalog decodes a KvPoolCatalogUpdate. A pool that cannot be used is in Refused. An
// error means that none of the catalog may be used.
func decodeCatalog(message []byte) (*Catalog, error) {
	var snapshot []byte
	relay, err := readAnswer(message, fields{4: &snapshot})
	if err != nil {
		return nil, err
	}
	c, seen := &Catalog{Relay: relay}, map[PoolID]bool{}
	return c, fields{1: each(func(_ uint64, text []byte) error {
		if len(c.Pools)+len(c.Refused) == maxPools {
			return fmt.Errorf("pools of a relay: %w, %d", errTooMany, maxPools)
		}
		p, err := decodePool(text)
		if err != nil {
			c.Refused = append(c.Refused, err)
			return nil
		}
		if seen[p.Producer.Pool] {
			return errors.New("a pool is listed twice")
		}
		seen[p.Producer.Pool] = true
		c.Pools = append(c.Pools, p)
		return nil
	})}.read(snapshot)
}

// decodeUpdate decodes a FilterUpdate. Its payload is part of message.
func decodeUpdate(message []byte) (u *Update, err error) {
	u = &Update{}
	var producer []byte
	var kind uint64
	if u.Relay, err = readAnswer(message, fields{3: &producer, 4: &u.Base, 5: &u.Sequence, 7: &kind, 8: &u.Payload}); err != nil {
		return nil, err
	}
	u.Kind = Kind(min(kind, 255))
	u.Producer, err = decodeProducer(producer)
	return u, err
}

// decodeReadiness decodes a ServingReadinessUpdate. It skips entries that are malformed, and
// identities of pools that are not known. The size of the message bounds both.
func decodeReadiness(message []byte) (r *Readiness, err error) {
	r = &Readiness{Unavailable: map[served]bool{}}
	r.Relay, err = readAnswer(message, fields{4: each(func(_ uint64, text []byte) error {
		var model string
		var state uint64
		var pools []PoolID
		if (fields{2: &model, 3: &state, 6: each(func(_ uint64, text []byte) error {
			var pool []byte
			err := fields{3: &pool}.read(text)
			if id, unfit := decodePoolID(pool); unfit == nil {
				pools = append(pools, id)
			}
			return err
		})}).read(text) != nil || state != stateUnavailable {
			return nil
		}
		for _, id := range pools {
			r.Unavailable[served{id, model}] = true
		}
		return nil
	})})
	return r, err
}
