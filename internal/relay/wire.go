package relay

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"google.golang.org/protobuf/encoding/protowire"
)

// The contract's messages are few, and their fields are known here by number alone. A field
// that is not known is skipped, as the contract demands; a value that is not known refuses
// the pool or entry that has it.

// markerField is the number of the marker, in every message that is not part of another.
const markerField = 127

// A field's number and wire type in one number, for switch.
const (
	varint  = int(protowire.VarintType)
	fixed32 = int(protowire.Fixed32Type)
	fixed64 = int(protowire.Fixed64Type)
	lengths = int(protowire.BytesType)
)

// maxFields is the maximum number of fields of a message, without those of the messages in
// it.
const maxFields = 16 << 10

// errTooMany refuses a message with more parts than a bound of relay.go allows.
var errTooMany = errors.New("more than allowed")

// eachField calls each for every field. number is that of a field without a length, text
// the content of one with. text is part of message.
func eachField(message []byte, each func(field int, number uint64, text []byte) error) error {
	for left := maxFields; len(message) > 0; left-- {
		if left == 0 {
			return fmt.Errorf("fields of a message: %w, %d", errTooMany, maxFields)
		}
		num, typ, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		var number uint64
		var text []byte
		switch typ {
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
			n = protowire.ConsumeFieldValue(num, typ, message)
		}
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if err := each(int(num)<<3|int(typ), number, text); err != nil {
			return err
		}
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

// head is what every answer has.
type head struct {
	version, marker uint64
	relay           Identity
	related         bool // relay is set
}

func (h *head) read(field int, number uint64, text []byte) (err error) {
	switch field {
	case 1<<3 | varint:
		h.version = number
	case 2<<3 | lengths:
		h.related = true
		h.relay, err = decodeIdentity(text)
	case markerField<<3 | fixed32:
		h.marker = number
	}
	return err
}

func (h *head) check() error {
	switch {
	case h.marker != contractMarker:
		return fmt.Errorf("marker %#x: want %#x, that of %s", h.marker, contractMarker, service)
	case h.version != protocolVersion:
		return fmt.Errorf("version %d of the contract: want %d", h.version, protocolVersion)
	case !h.related:
		return errors.New("a message without the identity of its relay")
	}
	return nil
}

func decodeIdentity(text []byte) (id Identity, err error) {
	err = eachField(text, func(field int, number uint64, _ []byte) error {
		switch field {
		case 1<<3 | fixed64:
			id.Instance = number
		case 2<<3 | fixed64:
			id.Incarnation = number
		}
		return nil
	})
	return id, err
}

func decodeDigest(text []byte, what string) (d Digest, err error) {
	has := false
	err = eachField(text, func(field int, number uint64, text []byte) error {
		switch field {
		case 1<<3 | lengths:
			if has = len(text) == len(d.Sum); !has {
				return fmt.Errorf("%s of %d bytes: want %d", what, len(text), len(d.Sum))
			}
			copy(d.Sum[:], text)
		case 2<<3 | varint:
			d.Source = Source(min(number, 255))
		}
		return nil
	})
	if err == nil && !has {
		err = fmt.Errorf("no %s", what)
	}
	return d, err
}

func decodePoolID(text []byte) (id PoolID, err error) {
	var version uint64
	var domain []byte
	err = eachField(text, func(field int, number uint64, text []byte) error {
		switch field {
		case 1<<3 | varint:
			version = number
		case 2<<3 | lengths:
			domain = text
		case 3<<3 | fixed64:
			id.DataCenter = number
		}
		return nil
	})
	if err != nil {
		return id, err
	}
	if version != identityVersion {
		return id, fmt.Errorf("version %d of a pool's identity: %w", version, errUnsupported)
	}
	var semantics, scope []byte
	if err = eachField(domain, func(field int, _ uint64, text []byte) error {
		switch field {
		case 1<<3 | lengths:
			semantics = text
		case 2<<3 | lengths:
			scope = text
		}
		return nil
	}); err != nil {
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
	if err = eachField(text, func(field int, number uint64, text []byte) error {
		switch field {
		case 1<<3 | lengths:
			pool = text
		case 2<<3 | fixed64:
			p.Incarnation = number
		case 3<<3 | varint:
			p.Generation = number
		case 4<<3 | lengths:
			format = text
		}
		return nil
	}); err != nil {
		return p, err
	}
	if p.Pool, err = decodePoolID(pool); err != nil {
		return p, err
	}
	var version, bits, slots, buckets uint64
	if err = eachField(format, func(field int, number uint64, _ []byte) error {
		switch field {
		case 1<<3 | varint:
			version = number
		case 2<<3 | fixed64:
			p.Format.Seed = number
		case 3<<3 | varint:
			buckets = number
		case 4<<3 | varint:
			bits = number
		case 5<<3 | varint:
			slots = number
		}
		return nil
	}); err != nil {
		return p, err
	}
	if version != filterVersion || bits != fingerprintBits || slots != slotsPerBucket {
		return p, fmt.Errorf("a filter of version %d with %d slots of %d bits: %w", version, slots, bits, errUnsupported)
	}
	p.Format.Buckets = int(min(buckets, maxBuckets+1))
	return p, p.check()
}

func decodeText(what string, text []byte) (string, error) {
	if len(text) > maxText || !utf8.Valid(text) {
		return "", fmt.Errorf("a %s of %d bytes: want UTF-8 of at most %d", what, len(text), maxText)
	}
	return string(text), nil
}

func decodeEndpoint(text []byte) (e Endpoint, err error) {
	err = eachField(text, func(field int, _ uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			e.Namespace, err = decodeText("namespace", text)
		case 2<<3 | lengths:
			e.Component, err = decodeText("component", text)
		case 3<<3 | lengths:
			e.Name, err = decodeText("endpoint", text)
		}
		return err
	})
	return e, err
}

// decodeModel leaves Base empty if the target is of a kind that is not known: it must not
// be taken for a base model.
func decodeModel(text []byte) (m Model, err error) {
	err = eachField(text, func(field int, _ uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			m.Name, err = decodeText("model", text)
		case 2<<3 | lengths:
			err = eachField(text, func(field int, _ uint64, text []byte) error {
				if field != 1<<3|lengths && field != 2<<3|lengths {
					return nil
				}
				m.Base, m.Adapter = "", "" // the last kind counts
				adapter := field == 2<<3|lengths
				err := eachField(text, func(field int, _ uint64, text []byte) (err error) {
					switch {
					case field == 1<<3|lengths:
						m.Base, err = decodeText("base model", text)
					case field == 2<<3|lengths && adapter:
						m.Adapter, err = decodeText("adapter", text)
					}
					return err
				})
				if err == nil && adapter {
					err = checkText("adapter", m.Adapter)
				}
				return err
			})
		case 3<<3 | lengths:
			var alias string
			if alias, err = decodeText("alias", text); err == nil {
				if len(m.Aliases) == maxAliases {
					return fmt.Errorf("aliases of a model: %w, %d", errTooMany, maxAliases)
				}
				m.Aliases = append(m.Aliases, alias)
			}
		}
		return err
	})
	if err == nil && m.Base == "" {
		err = fmt.Errorf("the target of model %.200q: %w", m.Name, errUnsupported)
	}
	return m, err
}

// decodeRoles appends the roles of a field, packed or not. Values that are not known become
// one that checkRoles refuses.
func decodeRoles(roles []Role, number uint64, text []byte) ([]Role, error) {
	if text == nil {
		text = protowire.AppendVarint(nil, number)
	}
	for len(text) > 0 {
		v, n := protowire.ConsumeVarint(text)
		if n < 0 {
			return roles, protowire.ParseError(n)
		}
		if text = text[n:]; len(roles) > int(Legacy) {
			return roles, fmt.Errorf("roles: %w, %d", errTooMany, Legacy)
		}
		roles = append(roles, Role(min(v, 255)))
	}
	return roles, nil
}

func decodePool(text []byte) (p Pool, err error) {
	err = eachField(text, func(field int, number uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			p.encoded = bytes.Clone(text)
			p.Producer, err = decodeProducer(text)
		case 2<<3 | lengths:
			p.Endpoint, err = decodeEndpoint(text)
		case 3<<3 | lengths:
			if len(p.Models) == maxModels {
				return fmt.Errorf("models of a pool: %w, %d", errTooMany, maxModels)
			}
			var m Model
			m, err = decodeModel(text)
			p.Models = append(p.Models, m)
		case 4<<3 | lengths:
			err = eachField(text, func(field int, number uint64, _ []byte) error {
				switch field {
				case 1<<3 | varint:
					p.BlockSize = int(min(number, maxBlockSize+1))
				case 2<<3 | varint:
					p.Format = HashFormat(min(number, 255))
				}
				return nil
			})
		case 5<<3 | varint, 5<<3 | lengths:
			p.Roles, err = decodeRoles(p.Roles, number, text)
		}
		return err
	})
	switch {
	case err != nil:
		return p, err
	case p.encoded == nil:
		return p, errors.New("a pool without a producer")
	}
	return p, p.check()
}

// decodeInfo decodes the answer to GetRelayInfo.
func decodeInfo(message []byte) (Identity, error) {
	var h head
	if err := eachField(message, h.read); err != nil {
		return Identity{}, err
	}
	return h.relay, h.check()
}

// decodeCatalog decodes a KvPoolCatalogUpdate. A pool that cannot be used is in Refused. An
// error means that none of the catalog may be used.
func decodeCatalog(message []byte) (*Catalog, error) {
	var h head
	c := &Catalog{}
	var snapshot []byte
	if err := eachField(message, func(field int, number uint64, text []byte) error {
		switch field {
		case 3<<3 | varint:
			c.Revision = number
		case 4<<3 | lengths:
			snapshot = text
		}
		return h.read(field, number, text)
	}); err != nil {
		return nil, err
	}
	if err := h.check(); err != nil {
		return nil, err
	}
	c.Relay = h.relay
	seen := map[PoolID]bool{}
	err := eachField(snapshot, func(field int, _ uint64, text []byte) error {
		if field != 1<<3|lengths {
			return nil
		}
		if len(c.Pools)+len(c.Refused) == maxPools {
			return fmt.Errorf("pools of a relay: %w, %d", errTooMany, maxPools)
		}
		p, err := decodePool(text)
		if err != nil {
			c.Refused = append(c.Refused, err)
			return nil
		}
		if seen[p.Producer.Pool] {
			return fmt.Errorf("pool %s is listed twice", p.Endpoint)
		}
		seen[p.Producer.Pool] = true
		c.Pools = append(c.Pools, p)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// decodeUpdate decodes a FilterUpdate. Its payload is part of message.
func decodeUpdate(message []byte) (*Update, error) {
	var h head
	u := &Update{}
	var producer []byte
	if err := eachField(message, func(field int, number uint64, text []byte) error {
		switch field {
		case 3<<3 | lengths:
			producer = text
		case 4<<3 | varint:
			u.Base = number
		case 5<<3 | varint:
			u.Sequence = number
		case 6<<3 | varint:
			u.Sent = number
		case 7<<3 | varint:
			u.Kind = Kind(min(number, 255))
		case 8<<3 | lengths:
			u.Payload = text
		}
		return h.read(field, number, text)
	}); err != nil {
		return nil, err
	}
	if err := h.check(); err != nil {
		return nil, err
	}
	u.Relay = h.relay
	var err error
	u.Producer, err = decodeProducer(producer)
	if err != nil {
		return nil, err
	}
	return u, nil
}

// decodeReadiness decodes a ServingReadinessUpdate. An entry that cannot be used is in
// Refused.
func decodeReadiness(message []byte) (*Readiness, error) {
	var h head
	r := &Readiness{}
	type key struct{ namespace, model string }
	seen := map[key]bool{}
	if err := eachField(message, func(field int, number uint64, text []byte) error {
		switch field {
		case 3<<3 | varint:
			r.Revision = number
		case 4<<3 | lengths:
			if len(r.Entries)+len(r.Refused) == maxModels {
				return fmt.Errorf("models of a relay: %w, %d", errTooMany, maxModels)
			}
			e, err := decodeEntry(text)
			if err != nil {
				r.Refused = append(r.Refused, err)
				return nil
			}
			if k := (key{e.Namespace, e.Model}); seen[k] {
				return fmt.Errorf("model %q of namespace %q is listed twice", e.Model, e.Namespace)
			} else {
				seen[k] = true
			}
			r.Entries = append(r.Entries, e)
		}
		return h.read(field, number, text)
	}); err != nil {
		return nil, err
	}
	if err := h.check(); err != nil {
		return nil, err
	}
	r.Relay = h.relay
	return r, nil
}

func decodeEntry(text []byte) (e Entry, err error) {
	err = eachField(text, func(field int, number uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			e.Namespace, err = decodeText("namespace", text)
		case 2<<3 | lengths:
			e.Model, err = decodeText("model", text)
		case 3<<3 | varint:
			e.State = State(min(number, 255))
		case 4<<3 | varint, 4<<3 | lengths:
			e.Present, err = decodeRoles(e.Present, number, text)
		case 5<<3 | varint, 5<<3 | lengths:
			e.Missing, err = decodeRoles(e.Missing, number, text)
		case 6<<3 | lengths:
			if len(e.Members) == maxMembers {
				return fmt.Errorf("endpoints of a model: %w, %d", errTooMany, maxMembers)
			}
			var m Member
			m, err = decodeMember(text)
			e.Members = append(e.Members, m)
		case 7<<3 | varint, 7<<3 | lengths:
			e.Duplicates, err = decodeRoles(e.Duplicates, number, text)
		case 8<<3 | varint:
			e.Legacy = number != 0
		case 9<<3 | lengths:
			if len(e.Adapters) == maxModels {
				return fmt.Errorf("adapters of a model: %w, %d", errTooMany, maxModels)
			}
			var a AdapterState
			err = eachField(text, func(field int, number uint64, text []byte) (err error) {
				switch field {
				case 1<<3 | lengths:
					a.Name, err = decodeText("adapter", text)
				case 2<<3 | varint:
					a.State = State(min(number, 255))
				case 3<<3 | varint, 3<<3 | lengths:
					a.Missing, err = decodeRoles(a.Missing, number, text)
				}
				return err
			})
			e.Adapters = append(e.Adapters, a)
		}
		return err
	})
	if err == nil {
		err = e.check()
	}
	return e, err
}

func decodeMember(text []byte) (m Member, err error) {
	err = eachField(text, func(field int, number uint64, text []byte) (err error) {
		switch field {
		case 1<<3 | lengths:
			m.Endpoint, err = decodeEndpoint(text)
		case 2<<3 | varint, 2<<3 | lengths:
			m.Roles, err = decodeRoles(m.Roles, number, text)
		case 3<<3 | lengths:
			m.HasPool = true
			m.Pool, err = decodePoolID(text)
		}
		return err
	})
	return m, err
}
