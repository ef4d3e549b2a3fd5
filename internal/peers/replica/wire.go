package replica

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/router"
)

// The topics, each of which begins a message of two frames: the topic, and a msgpack
// map with names. The first two are those of Dynamo 1.6.1's selection service, and
// so are the shapes of their payloads; the third is between kvrouters.
const (
	SlotTopic    = "dynamo.slot-tracker.v1"
	SessionTopic = "dynamo.session-affinity.v1"
	replicaTopic = "kvrouter.v1"
)

// Limits of one message.
const (
	// sequenceLimit bounds its sequence hashes: those of 2^28 tokens in blocks of 64.
	sequenceLimit = 1 << 22
	// idLimit bounds the name of a request or session, bytes.
	idLimit = 512
)

// slotEvent is a change of a router's books on the wire.
type slotEvent struct {
	Model     string      `msgpack:"model_name"`
	Group     string      `msgpack:"routing_group"`
	BlockSize uint32      `msgpack:"block_size"` // tokens
	Event     slotChange  `msgpack:"event"`
	Detail    *slotDetail `msgpack:"kvrouter,omitempty"` // of an AddRequest, which Dynamo passes over; nil: it is Dynamo's
}

// slotChange is Dynamo's ActiveSequenceEvent.
type slotChange struct {
	Request string  `msgpack:"request_id"`
	Worker  rank    `msgpack:"worker"`
	Data    any     `msgpack:"data"` // the name of a change, or addRequest under its
	Router  uint64  `msgpack:"router_id"`
	LoRA    *string `msgpack:"lora_name"`
}

// rank is a worker's rank.
type rank struct {
	Worker uint64 `msgpack:"worker_id"`
	Rank   uint32 `msgpack:"dp_rank"`
}

// Names of changes.
const (
	dataAdd     = "AddRequest"
	dataFree    = "Free"
	dataPrefill = "MarkPrefillCompleted"
)

// addRequest begins a booking.
type addRequest struct {
	Sequence     []uint64     `msgpack:"token_sequence"`
	TrackPrefill bool         `msgpack:"track_prefill_tokens"`
	Expected     *uint32      `msgpack:"expected_output_tokens"`
	Hint         *prefillHint `msgpack:"prefill_load_hint"`
}

// prefillHint is how much of a prompt must be computed, and how long that takes.
type prefillHint struct {
	Tokens   uint64    `msgpack:"initial_effective_prefill_tokens"`
	Duration *struct{} `msgpack:"expected_prefill_duration"` // never sent, and ignored
}

// slotDetail is what a kvrouter sends of a booking beyond Dynamo.
type slotDetail struct {
	Tokens        uint64 `msgpack:"prompt_tokens"`
	Uncached      uint64 `msgpack:"prefill_tokens"`
	AnsweredWhole bool   `msgpack:"answered_whole"`
	Leg           uint64 `msgpack:"leg"`
	Loads         *loads `msgpack:"loads,omitempty"` // nil: it loads nothing
}

// loads are prompt tokens that a worker is expected to load from its lower tiers.
type loads struct {
	Host     uint64 `msgpack:"host"`
	Disk     uint64 `msgpack:"disk"`
	External uint64 `msgpack:"external"`
}

// sessionEvent is where a session is, on the wire.
type sessionEvent struct {
	Model    string  `msgpack:"model_name"`
	Group    string  `msgpack:"routing_group"`
	Session  string  `msgpack:"session_id"`
	Worker   uint64  `msgpack:"worker_id"`
	Rank     *uint32 `msgpack:"dp_rank"` // nil: any
	Sequence uint64  `msgpack:"sequence"`
	Writer   uint64  `msgpack:"writer_id"`
}

// Kinds of ownMessage.
const (
	kindDigest   = "digest"   // Sums: of the bookings in flight from here; Service: what tenants receive here
	kindAsk      = "ask"      // another router, Of, is asked to send Buckets again
	kindHeld     = "held"     // Requests are all that is in flight of a bucket
	kindEjection = "ejection" // Worker gets nothing from here for Milliseconds
	kindStored   = "stored"   // Worker has the responses Requests, which are Owner's
	kindRecall   = "recall"   // another router, Of, is asked to send all stored responses
	kindLeave    = "leave"    // nothing more comes
)

// ownMessage is a message between kvrouters beyond Dynamo.
type ownMessage struct {
	Router       uint64   `msgpack:"router_id"`
	Kind         string   `msgpack:"kind"`
	Sums         []uint64 `msgpack:"sums,omitempty"` // one for each bucket; none: nothing is in flight
	Of           uint64   `msgpack:"of,omitempty"`
	Buckets      uint64   `msgpack:"buckets,omitempty"` // a bit for each
	Bucket       uint64   `msgpack:"bucket,omitempty"`
	Requests     []string `msgpack:"requests,omitempty"`
	Worker       *rank    `msgpack:"worker,omitempty"`
	Milliseconds uint64   `msgpack:"milliseconds,omitempty"`
	Owner        uint64   `msgpack:"owner,omitempty"` // a hash; 0: none, or a router that does not say

	Service []tenantService `msgpack:"service,omitempty"` // at most fair.MostReported
}

// tenantService is a fair.Service, with whole ms.
type tenantService struct {
	Tenant   string `msgpack:"tenant"`
	Class    string `msgpack:"class"`
	Received uint64 `msgpack:"received"`
	Running  uint64 `msgpack:"running"`
}

// servicesOf puts services into the form of the wire. Those of tenants with longer names than a
// message takes are left out.
func servicesOf(all []fair.Service) (services []tenantService) {
	for _, s := range all {
		if len(s.Tenant) <= idLimit {
			services = append(services, tenantService{s.Tenant, s.Class.String(), uint64(min(s.Received, maxService)),
				uint64(min(s.Running, maxService))})
		}
	}
	return services
}

// maxService is more than counts of a service, ms.
const maxService = 1 << 40

// services returns the services of a message. Those of classes that are unknown here say nothing.
func (m *ownMessage) services() (all []fair.Service) {
	for _, s := range m.Service {
		if class, ok := fair.ClassOf(s.Class); ok {
			all = append(all, fair.Service{Tenant: s.Tenant, Class: class, Received: float64(s.Received), Running: float64(s.Running)})
		}
	}
	return all
}

// encode writes a message as rmp_serde's to_vec_named does.
func encode(message any) []byte {
	var out bytes.Buffer
	e := msgpack.NewEncoder(&out)
	e.UseCompactInts(true)
	if err := e.Encode(message); err != nil {
		return nil // no type of this package fails
	}
	return out.Bytes()
}

// slotOf puts a change of a booking into the form of the wire. id is that of the router.
func slotOf(change router.Change, request string, id uint64) slotChange {
	out := slotChange{Request: request, Worker: rank{change.Worker.Worker, change.Worker.Rank}, Router: id}
	if change.LoRA != "" {
		out.LoRA = &change.LoRA
	}
	switch change.Kind {
	case router.ChangeFree:
		out.Data = dataFree
	case router.ChangePrefill:
		out.Data = dataPrefill
	default:
		add := addRequest{Sequence: change.Sequence}
		if change.Leg != kv.LegDecode && change.Uncached > 0 { // Dynamo takes what waits for a prefill elsewhere for prefill
			add.TrackPrefill, add.Hint = true, &prefillHint{Tokens: uint64(change.Uncached)}
		}
		if change.Expected > 0 {
			expected := uint32(min(change.Expected, math.MaxUint32))
			add.Expected = &expected
		}
		out.Data = map[string]addRequest{dataAdd: add}
	}
	return out
}

// detailOf returns what Dynamo's form of a booking lacks.
func detailOf(change router.Change) *slotDetail {
	d := &slotDetail{uint64(max(0, change.Tokens)), uint64(max(0, change.Uncached)), change.AnsweredWhole, uint64(change.Leg), nil}
	if l := change.Loads; l.Total() > 0 {
		d.Loads = &loads{uint64(l.Host), uint64(l.Disk), uint64(l.External)}
	}
	return d
}

// decoded is a change of another router's books.
type decoded struct {
	router uint64
	change router.Change
}

// errShape means that a message does not have the shape of its topic.
var errShape = errors.New("its format does not match its topic")

// field is a field of a msgpack map.
type field struct {
	name string
	read func(value []byte) error
}

// readFields reads the fields of a map, of which the first required ones must be there.
// Fields beside them are ignored.
func readFields(text []byte, required int, fields ...field) error {
	found := 0
	err := eachField(text, func(name string, value []byte) error {
		at := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if at < 0 {
			return nil
		}
		if at < required {
			found++
		}
		return fields[at].read(value)
	})
	if err == nil && found != required {
		err = errShape
	}
	return err
}

// decodeSlot reads a message of SlotTopic.
func decodeSlot(text []byte) (d decoded, err error) {
	var blockSize uint64
	c, detail := &d.change, []byte(nil)
	err = readFields(text, 2,
		field{"block_size", uintTo(math.MaxUint32, &blockSize)},
		field{"event", func(value []byte) error { return decodeEvent(value, &d) }},
		field{"kvrouter", func(value []byte) error {
			detail = value
			return nil
		}},
	)
	c.BlockSize = int(blockSize)
	switch {
	case err != nil:
		return d, err
	case c.Kind == "":
		return d, errShape
	case c.Kind == router.ChangeAdd && detail != nil:
		if err = decodeDetail(detail, c); err != nil {
			err = fmt.Errorf("kvrouter: %w", err)
		}
	case c.Kind == router.ChangeAdd: // what Dynamo knows of its prompt: blocks, and tokens to compute
		c.Tokens = max(c.Uncached, len(c.Sequence)*c.BlockSize)
	}
	return d, err
}

func decodeEvent(text []byte, d *decoded) error {
	c := &d.change
	err := readFields(text, 4,
		field{"request_id", textTo(&c.Request)},
		field{"worker", workerTo(&c.Worker)},
		field{"data", func(value []byte) error { return decodeData(value, c) }},
		field{"router_id", uintTo(math.MaxUint64, &d.router)},
		field{"lora_name", func(value []byte) error {
			_ = readText(value, &c.LoRA) // without a name of that length it is a booking all the same
			return nil
		}},
	)
	if err == nil && c.Request == "" {
		err = errShape
	}
	return err
}

// decodeData reads a change: a name, or a map of the name to its payload.
func decodeData(text []byte, c *router.Change) error {
	var kind string
	if readText(text, &kind) == nil {
		switch kind {
		case dataFree:
			c.Kind = router.ChangeFree
		case dataPrefill:
			c.Kind = router.ChangePrefill
		default:
			return fmt.Errorf("the change %.40q is unknown", kind)
		}
		return nil
	}
	return eachField(text, func(name string, value []byte) error {
		if name != dataAdd {
			return fmt.Errorf("the change %.40q is unknown", name)
		}
		c.Kind = router.ChangeAdd
		return decodeAdd(value, c)
	})
}

func decodeAdd(text []byte, c *router.Change) error {
	track, hint := true, uint64(0)
	err := readFields(text, 0,
		field{"token_sequence", unlessNil(uintsTo(sequenceLimit, &c.Sequence))},
		field{"track_prefill_tokens", unlessNil(boolTo(&track))},
		field{"expected_output_tokens", unlessNil(uintTo(math.MaxInt, &c.Expected))},
		field{"prefill_load_hint", unlessNil(func(value []byte) error {
			return readFields(value, 0, field{"initial_effective_prefill_tokens", uintTo(math.MaxUint64, &hint)})
		})},
	)
	if track {
		c.Uncached = int(min(hint, math.MaxInt))
	}
	return err
}

func decodeDetail(text []byte, c *router.Change) error {
	return readFields(text, 0,
		field{"prompt_tokens", uintTo(math.MaxInt, &c.Tokens)},
		field{"prefill_tokens", uintTo(math.MaxInt, &c.Uncached)},
		field{"answered_whole", boolTo(&c.AnsweredWhole)},
		field{"leg", uintTo(uint64(kv.LegDecode), &c.Leg)},
		field{"loads", func(value []byte) error {
			return readFields(value, 0,
				field{"host", uintTo(kv.MaxTokens, &c.Loads.Host)},
				field{"disk", uintTo(kv.MaxTokens, &c.Loads.Disk)},
				field{"external", uintTo(kv.MaxTokens, &c.Loads.External)},
			)
		}},
	)
}

// decodeSession reads a message of SessionTopic.
func decodeSession(text []byte) (b router.SessionBinding, err error) {
	err = readFields(text, 5,
		field{"session_id", textTo(&b.ID)},
		field{"worker_id", uintTo(math.MaxUint64, &b.Worker.Worker)},
		field{"dp_rank", func(value []byte) error {
			b.AnyRank = isNil(value)
			return unlessNil(uintTo(math.MaxUint32, &b.Worker.Rank))(value)
		}},
		field{"sequence", uintTo(math.MaxUint64, &b.Sequence)},
		field{"writer_id", uintTo(math.MaxUint64, &b.Writer)},
	)
	return b, err
}

// decodeOwn reads a message of replicaTopic.
func decodeOwn(text []byte) (m ownMessage, err error) {
	var w kv.WorkerKey
	err = readFields(text, 0,
		field{"router_id", uintTo(math.MaxUint64, &m.Router)},
		field{"kind", textTo(&m.Kind)},
		field{"sums", uintsTo(buckets, &m.Sums)},
		field{"of", uintTo(math.MaxUint64, &m.Of)},
		field{"buckets", uintTo(math.MaxUint64, &m.Buckets)},
		field{"bucket", uintTo(buckets-1, &m.Bucket)},
		field{"requests", func(value []byte) error {
			return eachItem(value, bookingLimit, func(value []byte) error {
				var id string
				err := readText(value, &id)
				m.Requests = append(m.Requests, id)
				return err
			})
		}},
		field{"worker", func(value []byte) error {
			err := workerTo(&w)(value)
			m.Worker = &rank{w.Worker, w.Rank}
			return err
		}},
		field{"owner", uintTo(math.MaxUint64, &m.Owner)},
		field{"milliseconds", uintTo(uint64(math.MaxInt64/time.Millisecond), &m.Milliseconds)},
		field{"service", func(value []byte) error {
			return eachItem(value, fair.MostReported, func(value []byte) error {
				var s tenantService
				err := readFields(value, 0,
					field{"tenant", textTo(&s.Tenant)},
					field{"class", textTo(&s.Class)},
					field{"received", uintTo(math.MaxUint64, &s.Received)},
					field{"running", uintTo(math.MaxUint64, &s.Running)},
				)
				m.Service = append(m.Service, s)
				return err
			})
		}},
	)
	if err == nil && (m.Router == 0 || m.Kind == "" || (m.Kind == kindEjection || m.Kind == kindStored) && m.Worker == nil ||
		len(m.Sums) != 0 && len(m.Sums) != buckets) {
		err = errShape
	}
	return m, err
}

// eachField calls take for each field of a msgpack map. Nothing recurses but take:
// the extent of a value is known before it is read.
func eachField(text []byte, take func(name string, value []byte) error) error {
	count, at, err := header(text, msgpcode.FixedMapLow, msgpcode.Map16, msgpcode.Map32)
	for ; count > 0 && err == nil; count-- {
		var start, end int
		if start, err = events.ValueEnd(text, at); err != nil {
			break
		}
		if end, err = events.ValueEnd(text, start); err != nil {
			break
		}
		var name string
		if err = readText(text[at:start], &name); err == nil {
			if err = take(name, text[start:end]); err != nil {
				err = fmt.Errorf("%s: %w", name, err)
			}
		}
		at = end
	}
	return err
}

// eachItem calls take for each item of a msgpack array.
func eachItem(text []byte, most int, take func(value []byte) error) error {
	count, at, err := header(text, msgpcode.FixedArrayLow, msgpcode.Array16, msgpcode.Array32)
	if err == nil && count > most {
		err = fmt.Errorf("%d items, want at most %d", count, most)
	}
	for ; count > 0 && err == nil; count-- {
		var end int
		if end, err = events.ValueEnd(text, at); err == nil {
			err = take(text[at:end])
		}
		at = end
	}
	return err
}

// header reads the count of a map or an array and where its content begins.
func header(text []byte, fixed, short, long byte) (count, at int, err error) {
	switch {
	case len(text) > 0 && text[0]&0xf0 == fixed:
		return int(text[0] & 0x0f), 1, nil
	case len(text) > 2 && text[0] == short:
		return int(binary.BigEndian.Uint16(text[1:])), 3, nil
	case len(text) > 4 && text[0] == long:
		return int(binary.BigEndian.Uint32(text[1:])), 5, nil
	}
	return 0, 0, errShape
}

func isNil(value []byte) bool { return len(value) == 1 && value[0] == msgpcode.Nil }

// unlessNil leaves what read reads unset if the value is nil.
func unlessNil(read func(value []byte) error) func(value []byte) error {
	return func(value []byte) error {
		if isNil(value) {
			return nil
		}
		return read(value)
	}
}

func boolTo(to *bool) func(value []byte) error {
	return func(value []byte) error {
		if len(value) != 1 || value[0] != msgpcode.True && value[0] != msgpcode.False {
			return errShape
		}
		*to = value[0] == msgpcode.True
		return nil
	}
}

func textTo(to *string) func(value []byte) error {
	return func(value []byte) error { return readText(value, to) }
}

// readText reads a string of at most idLimit bytes.
func readText(value []byte, to *string) error {
	at := 0
	switch {
	case len(value) == 0:
	case msgpcode.IsFixedString(value[0]):
		at = 1
	case value[0] == msgpcode.Str8:
		at = 2
	case value[0] == msgpcode.Str16:
		at = 3
	}
	if at == 0 || at > len(value) || len(value)-at > idLimit {
		return errShape
	}
	*to = string(value[at:])
	return nil
}

// uintTo reads a number of 0 to most.
func uintTo[T int | uint32 | uint64 | kv.Leg](most uint64, to *T) func(value []byte) error {
	return func(value []byte) error {
		n, err := readUint(value, most)
		*to = T(n)
		return err
	}
}

// readUint returns a number of 0 to most.
func readUint(value []byte, most uint64) (n uint64, err error) {
	if len(value) == 0 {
		return 0, errShape
	}
	switch code := value[0]; {
	case code <= msgpcode.PosFixedNumHigh:
		n = uint64(code)
	case code >= msgpcode.Uint8 && code <= msgpcode.Uint64,
		code >= msgpcode.Int8 && code <= msgpcode.Int64 && len(value) > 1 && value[1] < 0x80:
		for _, b := range value[1:] {
			n = n<<8 | uint64(b)
		}
	default:
		return 0, errShape
	}
	if n > most {
		return 0, fmt.Errorf("%d, want at most %d", n, most)
	}
	return n, nil
}

// uintsTo reads a list of at most that many numbers.
func uintsTo(most int, to *[]uint64) func(value []byte) error {
	return func(value []byte) error {
		*to = nil
		return eachItem(value, most, func(value []byte) error {
			n, err := readUint(value, math.MaxUint64)
			*to = append(*to, n)
			return err
		})
	}
}

// workerTo reads a rank.
func workerTo(to *kv.WorkerKey) func(value []byte) error {
	return func(value []byte) error {
		return readFields(value, 2, field{"worker_id", uintTo(math.MaxUint64, &to.Worker)}, field{"dp_rank", uintTo(math.MaxUint32, &to.Rank)})
	}
}
