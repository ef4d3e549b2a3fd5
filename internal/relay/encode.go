package relay

import (
	"google.golang.org/protobuf/encoding/protowire"
)

// The encoder writes fields in the order of their numbers and omits zeros, as the relay
// does, so that its bytes are the same.

func putText(dst []byte, number protowire.Number, text string) []byte {
	if text == "" {
		return dst
	}
	return protowire.AppendString(protowire.AppendTag(dst, number, protowire.BytesType), text)
}

func putVarint(dst []byte, number protowire.Number, v uint64) []byte {
	if v == 0 {
		return dst
	}
	return protowire.AppendVarint(protowire.AppendTag(dst, number, protowire.VarintType), v)
}

func putFixed64(dst []byte, number protowire.Number, v uint64) []byte {
	if v == 0 {
		return dst
	}
	return protowire.AppendFixed64(protowire.AppendTag(dst, number, protowire.Fixed64Type), v)
}

// putMessage appends a message that is part of another, which may be empty.
func putMessage(dst []byte, number protowire.Number, message []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(dst, number, protowire.BytesType), message)
}

func putRoles(dst []byte, number protowire.Number, roles []Role) []byte {
	if len(roles) == 0 {
		return dst
	}
	var packed []byte
	for _, r := range roles {
		packed = protowire.AppendVarint(packed, uint64(r))
	}
	return putMessage(dst, number, packed)
}

// begin starts an answer, end ends any message that is not part of another.
func begin(relay Identity) []byte {
	return putMessage(putVarint(nil, 1, protocolVersion), 2, putFixed64(putFixed64(nil, 1, relay.Instance), 2, relay.Incarnation))
}

func end(dst []byte) []byte {
	return protowire.AppendFixed32(protowire.AppendTag(dst, markerField, protowire.Fixed32Type), contractMarker)
}

func (d Digest) encode() []byte {
	return putVarint(putMessage(nil, 1, d.Sum[:]), 2, uint64(d.Source))
}

func (id *PoolID) encode() []byte {
	domain := putMessage(putMessage(nil, 1, id.Semantics.encode()), 2, id.Scope.encode())
	return putFixed64(putMessage(putVarint(nil, 1, identityVersion), 2, domain), 3, id.DataCenter)
}

// Encode returns the ProducerIdentity, as a subscription names it.
func (p *Producer) Encode() []byte {
	format := putVarint(nil, 1, filterVersion)
	format = putFixed64(format, 2, p.Format.Seed)
	format = putVarint(format, 3, uint64(p.Format.Buckets))
	format = putVarint(format, 4, fingerprintBits)
	format = putVarint(format, 5, slotsPerBucket)
	dst := putMessage(nil, 1, p.Pool.encode())
	dst = putFixed64(dst, 2, p.Incarnation)
	dst = putVarint(dst, 3, p.Generation)
	return putMessage(dst, 4, format)
}

func (e Endpoint) encode() []byte {
	return putText(putText(putText(nil, 1, e.Namespace), 2, e.Component), 3, e.Name)
}

func (m *Model) encode() []byte {
	target := putMessage(nil, 1, putText(nil, 1, m.Base))
	if m.Adapter != "" {
		target = putMessage(nil, 2, putText(putText(nil, 1, m.Base), 2, m.Adapter))
	}
	dst := putMessage(putText(nil, 1, m.Name), 2, target)
	for _, alias := range m.Aliases {
		dst = putText(dst, 3, alias)
	}
	return dst
}

func (p *Pool) encode() []byte {
	dst := putMessage(nil, 1, p.Producer.Encode())
	dst = putMessage(dst, 2, p.Endpoint.encode())
	for i := range p.Models {
		dst = putMessage(dst, 3, p.Models[i].encode())
	}
	dst = putMessage(dst, 4, putVarint(putVarint(nil, 1, uint64(p.BlockSize)), 2, uint64(p.Format)))
	return putRoles(dst, 5, p.Roles)
}

// EncodeInfo returns the RelayInfo of the catalog's relay.
func (c *Catalog) EncodeInfo() []byte { return end(begin(c.Relay)) }

// Encode returns the KvPoolCatalogUpdate of a catalog.
func (c *Catalog) Encode() []byte {
	var pools []byte
	for i := range c.Pools {
		pools = putMessage(pools, 1, c.Pools[i].encode())
	}
	return end(putMessage(putVarint(begin(c.Relay), 3, c.Revision), 4, pools))
}

// Encode returns the FilterUpdate of an update.
func (u *Update) Encode() []byte {
	dst := putMessage(begin(u.Relay), 3, u.Producer.Encode())
	dst = putVarint(dst, 4, u.Base)
	dst = putVarint(dst, 5, u.Sequence)
	dst = putVarint(dst, 6, u.Sent)
	dst = putVarint(dst, 7, uint64(u.Kind))
	if len(u.Payload) > 0 {
		dst = putMessage(dst, 8, u.Payload)
	}
	return end(dst)
}

// Encode returns the KvPoolLoadUpdate of a window.
func (l *Load) Encode() []byte {
	dst := putVarint(begin(l.Relay), 3, l.Window)
	dst = putVarint(dst, 4, l.Observed)
	dst = putVarint(dst, 5, l.Length)
	for i := range l.Pools {
		p := &l.Pools[i]
		one := putMessage(nil, 1, p.Producer.Encode())
		one = putVarint(one, 2, p.Used)
		one = putVarint(one, 3, p.Total)
		one = putVarint(one, 4, uint64(p.Observed))
		one = putVarint(one, 5, uint64(p.Expected))
		dst = putMessage(dst, 6, one)
	}
	return end(dst)
}

// Encode returns the ServingReadinessUpdate of a readiness.
func (r *Readiness) Encode() []byte {
	dst := putVarint(begin(r.Relay), 3, r.Revision)
	for i := range r.Entries {
		dst = putMessage(dst, 4, r.Entries[i].encode())
	}
	return end(dst)
}

func (e *Entry) encode() []byte {
	dst := putText(putText(nil, 1, e.Namespace), 2, e.Model)
	dst = putVarint(dst, 3, uint64(e.State))
	dst = putRoles(putRoles(dst, 4, e.Present), 5, e.Missing)
	for i := range e.Members {
		m := &e.Members[i]
		one := putRoles(putMessage(nil, 1, m.Endpoint.encode()), 2, m.Roles)
		if m.HasPool {
			one = putMessage(one, 3, m.Pool.encode())
		}
		dst = putMessage(dst, 6, one)
	}
	dst = putRoles(dst, 7, e.Duplicates)
	if e.Legacy {
		dst = putVarint(dst, 8, 1)
	}
	for _, a := range e.Adapters {
		dst = putMessage(dst, 9, putRoles(putVarint(putText(nil, 1, a.Name), 2, uint64(a.State)), 3, a.Missing))
	}
	return dst
}

// Requests. expected is nil but for SubscribeKvPool.

func encodeRequest(subscriber string, expected *Producer) []byte {
	dst := putText(nil, 1, subscriber)
	if expected != nil {
		dst = putMessage(dst, 2, expected.Encode())
	}
	return end(dst)
}
