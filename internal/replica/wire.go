package replica

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/router"
)

// The topics, each of which begins a message of two frames: the topic, and a msgpack
// map with names. The first two are those of Dynamo 1.6.1's selection service, and
// so are the shapes of their payloads; the third is between kvrouters.
const (
	slotTopic    = "dynamo.slot-tracker.v1"
	sessionTopic = "dynamo.session-affinity.v1"
	ownTopic     = "kvrouter.v1"
)

// Limits of one message.
const (
	// messageLimit bounds its bytes.
	messageLimit = 32 << 20
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
	kindDigest   = "digest"   // Sums: of the bookings in flight from here
	kindAsk      = "ask"      // another router, Of, is asked to send Buckets again
	kindHeld     = "held"     // Requests are all that is in flight of a bucket
	kindEjection = "ejection" // Worker gets nothing from here for Milliseconds
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

// slotOf puts a change into the form of the wire. number and id make up the name of a
// booking that has none.
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
	return &slotDetail{uint64(max(0, change.Tokens)), uint64(max(0, change.Uncached)), change.AnsweredWhole, uint64(change.Leg)}
}

// decoded is a change of another router's books.
type decoded struct {
	router    uint64
	blockSize uint64
	change    router.Change
}

// errShape means that a message does not have the shape of its topic.
var errShape = errors.New("its format does not match its topic")

// decodeSlot reads a message of slotTopic.
func decodeSlot(text []byte) (d decoded, err error) {
	c, detailed, seen := &d.change, false, 0
	err = eachField(text, func(name string, value []byte) error {
		switch name {
		case "block_size":
			seen++
			return readUint(value, math.MaxUint32, &d.blockSize)
		case "event":
			seen++
			return decodeEvent(value, &d)
		case "kvrouter":
			detailed = true
		}
		return nil
	})
	if err == nil && detailed && c.Kind == router.ChangeAdd {
		err = eachField(text, func(name string, value []byte) error {
			if name != "kvrouter" {
				return nil
			}
			return decodeDetail(value, c)
		})
	} else if c.Kind == router.ChangeAdd { // what Dynamo knows of its prompt: blocks, and tokens to compute
		c.Tokens = max(c.Uncached, len(c.Sequence)*int(d.blockSize))
	}
	if err == nil && (seen != 2 || c.Kind == "") {
		err = errShape
	}
	return d, err
}

func decodeEvent(text []byte, d *decoded) error {
	c, seen := &d.change, 0
	err := eachField(text, func(name string, value []byte) error {
		switch name {
		case "request_id":
			seen++
			return readText(value, &c.Request)
		case "worker":
			seen++
			return decodeRank(value, &c.Worker)
		case "data":
			seen++
			return decodeData(value, c)
		case "router_id":
			seen++
			return readUint(value, math.MaxUint64, &d.router)
		}
		return nil
	})
	if err == nil && (seen != 4 || c.Request == "") {
		err = errShape
	}
	return err
}

func decodeRank(text []byte, w *kv.WorkerKey) error {
	seen := 0
	err := eachField(text, func(name string, value []byte) error {
		switch name {
		case "worker_id":
			seen++
			return readUint(value, math.MaxUint64, &w.Worker)
		case "dp_rank":
			seen++
			var n uint64
			err := readUint(value, math.MaxUint32, &n)
			w.Rank = uint32(n)
			return err
		}
		return nil
	})
	if err == nil && seen != 2 {
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
	err := eachField(text, func(name string, value []byte) error {
		if isNil(value) {
			return nil
		}
		switch name {
		case "token_sequence":
			return readUints(value, sequenceLimit, &c.Sequence)
		case "track_prefill_tokens":
			return readBool(value, &track)
		case "expected_output_tokens":
			return readInt(value, &c.Expected)
		case "prefill_load_hint":
			return eachField(value, func(name string, value []byte) error {
				if name != "initial_effective_prefill_tokens" {
					return nil
				}
				return readUint(value, math.MaxUint64, &hint)
			})
		}
		return nil
	})
	if track {
		c.Uncached = int(min(hint, math.MaxInt))
	}
	return err
}

func decodeDetail(text []byte, c *router.Change) error {
	return eachField(text, func(name string, value []byte) error {
		switch name {
		case "prompt_tokens":
			return readInt(value, &c.Tokens)
		case "prefill_tokens":
			return readInt(value, &c.Uncached)
		case "answered_whole":
			return readBool(value, &c.AnsweredWhole)
		case "leg":
			var leg uint64
			err := readUint(value, uint64(kv.LegDecode), &leg)
			c.Leg = kv.Leg(leg)
			return err
		}
		return nil
	})
}

// decodeSession reads a message of sessionTopic.
func decodeSession(text []byte) (b router.SessionBinding, err error) {
	seen := 0
	err = eachField(text, func(name string, value []byte) error {
		seen++
		switch name {
		case "session_id":
			return readText(value, &b.ID)
		case "worker_id":
			return readUint(value, math.MaxUint64, &b.Worker.Worker)
		case "dp_rank":
			var n uint64
			if b.AnyRank = isNil(value); b.AnyRank {
				return nil
			}
			err := readUint(value, math.MaxUint32, &n)
			b.Worker.Rank = uint32(n)
			return err
		case "sequence":
			return readUint(value, math.MaxUint64, &b.Sequence)
		case "writer_id":
			return readUint(value, math.MaxUint64, &b.Writer)
		}
		seen--
		return nil
	})
	if err == nil && seen != 5 {
		err = errShape
	}
	return b, err
}

// decodeOwn reads a message of ownTopic.
func decodeOwn(text []byte) (m ownMessage, err error) {
	err = eachField(text, func(name string, value []byte) error {
		switch name {
		case "router_id":
			return readUint(value, math.MaxUint64, &m.Router)
		case "kind":
			return readText(value, &m.Kind)
		case "sums":
			return readUints(value, buckets, &m.Sums)
		case "of":
			return readUint(value, math.MaxUint64, &m.Of)
		case "buckets":
			return readUint(value, math.MaxUint64, &m.Buckets)
		case "bucket":
			return readUint(value, buckets-1, &m.Bucket)
		case "requests":
			return eachItem(value, bookingLimit, func(value []byte) error {
				var id string
				err := readText(value, &id)
				m.Requests = append(m.Requests, id)
				return err
			})
		case "worker":
			var w kv.WorkerKey
			err := decodeRank(value, &w)
			m.Worker = &rank{w.Worker, w.Rank}
			return err
		case "milliseconds":
			return readUint(value, uint64(math.MaxInt64/time.Millisecond), &m.Milliseconds)
		}
		return nil
	})
	if err == nil && (m.Router == 0 || m.Kind == "" || m.Kind == kindEjection && m.Worker == nil || len(m.Sums) != 0 && len(m.Sums) != buckets) {
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

func readBool(value []byte, to *bool) error {
	if len(value) != 1 || value[0] != msgpcode.True && value[0] != msgpcode.False {
		return errShape
	}
	*to = value[0] == msgpcode.True
	return nil
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

// readUint reads a number of 0 to most.
func readUint(value []byte, most uint64, to *uint64) error {
	if len(value) == 0 {
		return errShape
	}
	var n uint64
	switch code := value[0]; {
	case code <= msgpcode.PosFixedNumHigh:
		n = uint64(code)
	case code >= msgpcode.Uint8 && code <= msgpcode.Uint64, code >= msgpcode.Int8 && code <= msgpcode.Int64 && len(value) > 1 && value[1] < 0x80:
		for _, b := range value[1:] {
			n = n<<8 | uint64(b)
		}
	default:
		return errShape
	}
	if n > most {
		return fmt.Errorf("%d, want at most %d", n, most)
	}
	*to = n
	return nil
}

func readInt(value []byte, to *int) error {
	var n uint64
	err := readUint(value, math.MaxInt, &n)
	*to = int(n)
	return err
}

// readUints reads a list of at most that many numbers.
func readUints(value []byte, most int, to *[]uint64) error {
	*to = nil
	return eachItem(value, most, func(value []byte) error {
		var n uint64
		err := readUint(value, math.MaxUint64, &n)
		*to = append(*to, n)
		return err
	})
}
