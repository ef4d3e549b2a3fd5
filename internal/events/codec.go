package events

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"kvrouter/internal/kv"
)

// Bounds of one event, and of the memory that a decoder keeps for the next one.
const (
	maxEventBlocks = 1 << 20 // blocks
	maxEventTokens = 1 << 24 // tokens
	keptBlocks     = 1 << 14 // blocks
	keptTokens     = 1 << 18 // tokens
)

// errBrokenPayload means that a payload is not msgpack from some byte on:
// the rest cannot be separated from the bad value and is lost.
var errBrokenPayload = errors.New("payload is cut short or is not msgpack")

// eventKind is the effect of an event on a worker's blocks.
type eventKind uint8

const (
	eventUnknown eventKind = iota // a type this version does not know
	eventStored                   // blocks became available
	eventRemoved                  // blocks were evicted
	eventCleared                  // the whole cache was reset
)

// kvEvent is one decoded KV-cache event. Its slices belong to the decoder and
// are overwritten by the next event.
type kvEvent struct {
	kind eventKind
	tag  []byte // the type as sent

	hashes    []uint64 // the engine's block ids, in prompt order
	parent    uint64   // block id before hashes[0]; valid if hasParent
	hasParent bool
	tokens    []uint32 // blockSize tokens for each hash; with lookahead one more behind the last
	pairs     bool     // a block depends on the token behind it, too: SGLang with EAGLE
	ahead     []uint32 // behind tokens for each hash, on which it depends too: vLLM with EAGLE or MTP
	behind    int      // 0: none
	blockSize int      // tokens
	lora      []byte   // adapter name; empty: none
	loraID    []byte   // adapter number as msgpack; nil: none
	extra     []int    // payload offset of each block's extra keys; nil: none
	salt      []byte   // cache salt of the whole prompt, as SGLang sends it; empty: none

	medium    []byte // "GPU" or empty: the engine's own cache
	locality  []byte // "REMOTE": held by another process
	ownership []byte // name of the store that holds it; empty: none
	group     int    // KV-cache group of a hybrid model; valid if hasGroup
	hasGroup  bool
	specKind  []byte // attention kind of the group; empty: unknown
	window    int    // tokens of the group's sliding window; 0: none
}

// The fields of an event in the order in which engines up to vLLM 0.23 send
// them, as an array behind the tag; trailing defaults are left out. Newer
// engines send a map with these names.
var (
	storedFields = [...]string{
		"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
		"extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality",
	}
	removedFields = [...]string{"block_hashes", "medium", "group_idx", "locality"}
)

// batchDecoder reads event batches: msgpack [ts, [events], dp_rank?]. Before a
// value is decoded its extent is checked against the payload, so a length can
// never exceed the bytes that are there, nothing recurses, and an event that
// makes no sense can be stepped over. The zero value is not ready: use
// newEventDecoder. Not safe for concurrent use.
type batchDecoder struct {
	data   []byte
	reader *bytes.Reader
	dec    *msgpack.Decoder
	left   int // events not read yet
	event  kvEvent
	media  []kv.Media // of the block that blocks is at
	words  []uint64   // of the same
	joined []uint32   // its tokens and those behind it
}

func newBatchDecoder() *batchDecoder {
	r := bytes.NewReader(nil)
	return &batchDecoder{reader: r, dec: msgpack.NewDecoder(r)}
}

// start begins with a new payload and returns the batch's time stamp (Unix
// seconds). The payload must stay unchanged until the next call.
func (d *batchDecoder) start(payload []byte) (ts float64, err error) {
	d.data, d.left = payload, 0
	d.reader.Reset(payload)
	n, err := d.arrayLen()
	if err != nil {
		return 0, fmt.Errorf("event batch: %w", err)
	}
	if n < 2 {
		return 0, fmt.Errorf("event batch has %d fields, want a timestamp and a list of events", n)
	}
	if ts, err = d.dec.DecodeFloat64(); err != nil {
		return 0, fmt.Errorf("event batch: timestamp: %w", err)
	}
	if d.left, err = d.arrayLen(); err != nil {
		return 0, fmt.Errorf("event batch: list of events: %w", err)
	}
	return ts, nil
}

// trim gives up the memory that unusually large events took. No event is valid
// after it.
func (d *batchDecoder) trim() {
	if e := &d.event; cap(e.hashes) > keptBlocks || cap(e.extra) > keptBlocks || cap(e.tokens) > keptTokens {
		*e = kvEvent{}
	}
	if cap(d.media) > keptBlocks {
		d.media = nil
	}
}

// mark is a place in a batch.
type mark struct{ pos, left int }

// mark returns the place before the next event.
func (d *batchDecoder) mark() mark { return mark{d.pos(), d.left} }

// reset goes back to a place in the same batch.
func (d *batchDecoder) reset(to mark) {
	d.seek(to.pos)
	d.left = to.left
}

// more reports whether the batch has another event.
func (d *batchDecoder) more() bool { return d.left > 0 }

// next decodes one event. After an error that is not errBrokenPayload the
// event's kind is still right as far as it was readable, and decoding continues
// with the following event; after errBrokenPayload the batch is at its end.
func (d *batchDecoder) next() (*kvEvent, error) {
	d.left--
	e := &d.event
	*e = kvEvent{hashes: e.hashes[:0], tokens: e.tokens[:0], extra: e.extra[:0], ahead: e.ahead[:0]}
	end, err := ValueEnd(d.data, d.pos())
	if err != nil {
		d.left = 0
		return e, err
	}
	err = d.decodeEvent(e)
	d.seek(end)
	if err != nil {
		return e, fmt.Errorf("event %.40q: %w", e.tag, err)
	}
	return e, nil
}

// rank returns the data-parallel rank that ends a batch; ok is false where the
// publisher did not name one. Call it after the last event.
func (d *batchDecoder) rank() (rank int, ok bool) {
	if d.reader.Len() == 0 || d.isNil() {
		return 0, false
	}
	rank, err := d.int()
	return rank, err == nil
}

func (d *batchDecoder) decodeEvent(e *kvEvent) error {
	code, err := d.dec.PeekCode()
	if err != nil {
		return errBrokenPayload
	}
	if code == msgpcode.Map16 || code == msgpcode.Map32 || msgpcode.IsFixedMap(code) {
		return d.decodeMap(e)
	}
	return d.decodeArray(e)
}

func (d *batchDecoder) decodeMap(e *kvEvent) error {
	n, err := d.dec.DecodeMapLen()
	if err != nil {
		return err
	}
	fields := d.pos()
	// The tag comes first in practice; it is looked for, so that the fields of
	// an unknown event are never read as those of a known one.
	for range n {
		name, err := d.text()
		if err != nil {
			return fmt.Errorf("field name: %w", err)
		}
		if string(name) == "type" {
			if e.tag, err = d.text(); err != nil {
				return fmt.Errorf("type: %w", err)
			}
			break
		}
		if err := d.skip(); err != nil {
			return err
		}
	}
	if err := e.setKind(); err != nil || e.kind == eventUnknown || e.kind == eventCleared {
		return err
	}
	d.seek(fields)
	for range n {
		name, err := d.text()
		if err != nil {
			return fmt.Errorf("field name: %w", err)
		}
		if err := d.field(e, string(name)); err != nil {
			return fmt.Errorf("%.40s: %w", name, err)
		}
	}
	return nil
}

func (d *batchDecoder) decodeArray(e *kvEvent) error {
	n, err := d.arrayLen()
	if err != nil {
		return err
	}
	if n == 0 {
		return errors.New("empty, want a type")
	}
	if e.tag, err = d.text(); err != nil {
		return fmt.Errorf("type: %w", err)
	}
	if err := e.setKind(); err != nil {
		return err
	}
	var names []string
	switch e.kind {
	case eventStored:
		names = storedFields[:]
	case eventRemoved:
		names = removedFields[:]
	default:
		return nil
	}
	for i := 0; i < n-1 && i < len(names); i++ {
		if err := d.field(e, names[i]); err != nil {
			return fmt.Errorf("%s: %w", names[i], err)
		}
	}
	return nil
}

func (e *kvEvent) setKind() error {
	switch string(e.tag) {
	case "BlockStored":
		e.kind = eventStored
	case "BlockRemoved":
		e.kind = eventRemoved
	case "AllBlocksCleared":
		e.kind = eventCleared
	case "":
		return errors.New("no type")
	}
	return nil
}

// field reads the value of one field; nil leaves an optional one unset.
func (d *batchDecoder) field(e *kvEvent, name string) (err error) {
	switch name {
	case "block_hashes":
		e.hashes, err = d.hashes(e.hashes[:0])
	case "parent_block_hash":
		if d.isNil() {
			return d.skip()
		}
		e.hasParent = true
		e.parent, err = d.hash()
	case "token_ids":
		e.tokens, e.pairs, err = d.tokens(e.tokens[:0])
	case "lookahead_token_ids":
		e.ahead, e.behind, err = d.lookahead(e.ahead[:0])
	case "block_size":
		e.blockSize, err = d.int()
	case "lora_id":
		e.loraID, err = d.raw()
	case "lora_name":
		e.lora, err = d.optionalText()
	case "cache_salt":
		e.salt, err = d.optionalText()
	case "medium":
		e.medium, err = d.optionalText()
	case "locality":
		e.locality, err = d.optionalText()
	case "ownership":
		e.ownership, err = d.optionalText()
	case "kv_cache_spec_kind":
		e.specKind, err = d.optionalText()
	case "kv_cache_spec_sliding_window":
		if d.isNil() {
			return d.skip()
		}
		e.window, err = d.int()
	case "extra_keys":
		e.extra, err = d.extraKeys(e.extra[:0])
	case "group_idx":
		if d.isNil() {
			return d.skip()
		}
		e.hasGroup = true
		e.group, err = d.int()
	default:
		err = d.skip()
	}
	return err
}

func (d *batchDecoder) hashes(dst []uint64) ([]uint64, error) {
	n, err := d.arrayLen()
	if err != nil {
		return dst, err
	}
	if n > maxEventBlocks {
		return dst, fmt.Errorf("%d block hashes, want at most %d", n, maxEventBlocks)
	}
	for range n {
		h, err := d.hash()
		if err != nil {
			return dst, err
		}
		dst = append(dst, h)
	}
	return dst, nil
}

// hash reads an engine's block id: an integer as it is, or bytes, of which
// vLLM's own integer form takes the last eight, big-endian.
func (d *batchDecoder) hash() (uint64, error) {
	code, err := d.dec.PeekCode()
	if err != nil {
		return 0, errBrokenPayload
	}
	if !msgpcode.IsBin(code) && !msgpcode.IsString(code) {
		if code == msgpcode.Nil {
			return 0, errors.New("nil, want a block hash")
		}
		return d.dec.DecodeUint64()
	}
	b, err := d.text()
	if err != nil {
		return 0, err
	}
	if len(b) >= 8 {
		return binary.BigEndian.Uint64(b[len(b)-8:]), nil
	}
	if len(b) == 0 {
		return 0, errors.New("empty block hash")
	}
	var h uint64
	for _, c := range b {
		h = h<<8 | uint64(c)
	}
	return h, nil
}

// tokens reads a list of token ids. With EAGLE, SGLang sends each token in a pair with
// the next one (mem_cache/events.py, record_store); then the last one of all follows
// the others, and pairs is true.
func (d *batchDecoder) tokens(dst []uint32) (_ []uint32, pairs bool, err error) {
	n, err := d.arrayLen()
	if err != nil {
		return dst, false, err
	}
	if n > maxEventTokens {
		return dst, false, fmt.Errorf("%d token ids, want at most %d", n, maxEventTokens)
	}
	if n == 0 {
		return dst, false, nil
	}
	code, err := d.dec.PeekCode()
	if err != nil {
		return dst, false, errBrokenPayload
	}
	if msgpcode.IsFixedArray(code) {
		dst, err = d.pairs(dst, n)
		return dst, true, err
	}
	for range n {
		t, err := d.token()
		if err != nil {
			return dst, false, err
		}
		dst = append(dst, t)
	}
	return dst, false, nil
}

// lookahead reads lists of tokens of one length, which it returns; 0 for nil or no lists.
func (d *batchDecoder) lookahead(dst []uint32) (_ []uint32, behind int, err error) {
	if d.isNil() {
		return dst, 0, d.skip()
	}
	n, err := d.arrayLen()
	if err != nil {
		return dst, 0, err
	}
	if n > maxEventBlocks {
		return dst, 0, fmt.Errorf("%d lists, want at most %d", n, maxEventBlocks)
	}
	for i := range n {
		count, err := d.arrayLen()
		switch {
		case err != nil:
			return dst, 0, err
		case count < 1 || count > kv.MaxLookahead || i > 0 && count != behind:
			return dst, 0, fmt.Errorf("list %d has %d tokens, want 1 to %d, as many as the others", i, count, kv.MaxLookahead)
		}
		behind = count
		for range count {
			t, err := d.token()
			if err != nil {
				return dst, 0, err
			}
			dst = append(dst, t)
		}
	}
	return dst, behind, nil
}

// pairs reads n pairs of a token and the next one, at least one pair.
func (d *batchDecoder) pairs(dst []uint32, n int) ([]uint32, error) {
	var next uint32
	for i := range n {
		if count, err := d.arrayLen(); err != nil || count != 2 {
			return dst, fmt.Errorf("token %d is not in a pair as the others", i)
		}
		t, err := d.token()
		if err != nil {
			return dst, err
		}
		if i > 0 && t != next {
			return dst, fmt.Errorf("pair %d of tokens begins with %d, the one before ends with %d", i, t, next)
		}
		if next, err = d.token(); err != nil {
			return dst, err
		}
		dst = append(dst, t)
	}
	return append(dst, next), nil
}

func (d *batchDecoder) token() (uint32, error) {
	if d.isNil() {
		return 0, errors.New("nil, want a token id")
	}
	t, err := d.dec.DecodeUint64()
	if err != nil {
		return 0, err
	}
	if t > math.MaxUint32 {
		return 0, fmt.Errorf("token id %d, want 0 to %d", int64(t), uint32(math.MaxUint32))
	}
	return uint32(t), nil
}

// extraKeys notes where each block's list of extra keys begins; blocks reads
// them.
func (d *batchDecoder) extraKeys(dst []int) ([]int, error) {
	if d.isNil() {
		return dst, d.skip()
	}
	n, err := d.arrayLen()
	if err != nil {
		return dst, err
	}
	if n > maxEventBlocks {
		return dst, fmt.Errorf("extra keys of %d blocks, want at most %d", n, maxEventBlocks)
	}
	for range n {
		dst = append(dst, d.pos())
		if err := d.skip(); err != nil {
			return dst, err
		}
	}
	return dst, nil
}

func (d *batchDecoder) pos() int { return len(d.data) - d.reader.Len() }

func (d *batchDecoder) seek(to int) {
	_, _ = d.reader.Seek(int64(to), io.SeekStart) // fails below zero only
}

func (d *batchDecoder) isNil() bool {
	code, err := d.dec.PeekCode()
	return err == nil && code == msgpcode.Nil
}

func (d *batchDecoder) skip() error {
	end, err := ValueEnd(d.data, d.pos())
	if err != nil {
		return err
	}
	d.seek(end)
	return nil
}

// raw returns the bytes of the next value, nil if it is nil.
func (d *batchDecoder) raw() ([]byte, error) {
	if d.isNil() {
		return nil, d.skip()
	}
	start := d.pos()
	err := d.skip()
	return d.data[start:d.pos()], err
}

func (d *batchDecoder) arrayLen() (int, error) {
	n, err := d.dec.DecodeArrayLen()
	if err != nil {
		return 0, err
	}
	if n < 0 {
		return 0, errors.New("nil, want a list")
	}
	return n, nil
}

func (d *batchDecoder) int() (int, error) {
	if d.isNil() {
		return 0, errors.New("nil, want an integer")
	}
	n, err := d.dec.DecodeInt64()
	return int(n), err
}

// text returns the bytes of a string or binary value; they point into the
// payload.
func (d *batchDecoder) text() ([]byte, error) {
	n, err := d.dec.DecodeBytesLen()
	if err != nil {
		return nil, err
	}
	if n < 0 {
		return nil, errors.New("nil, want a string")
	}
	start := d.pos()
	if n > len(d.data)-start {
		return nil, errBrokenPayload
	}
	d.seek(start + n)
	return d.data[start : start+n : start+n], nil
}

func (d *batchDecoder) optionalText() ([]byte, error) {
	if d.isNil() {
		return nil, d.skip()
	}
	return d.text()
}

// ValueEnd returns where the msgpack value that begins at pos ends, or
// errBrokenPayload. It only counts the remaining values, so nesting costs neither
// stack nor memory, and a count larger than the remaining bytes fails at once.
func ValueEnd(data []byte, pos int) (int, error) {
	for owed := 1; owed > 0; owed-- {
		if pos >= len(data) {
			return 0, errBrokenPayload
		}
		c := data[pos]
		pos++
		size, items := 0, 0 // bytes of content behind the code, values inside
		width := 0          // bytes of a length behind the code
		switch {
		case c < 0x80 || c >= msgpcode.NegFixedNumLow: // small integers
		case c == msgpcode.Uint16 || c == msgpcode.Int16:
			size = 2
		case c == msgpcode.Uint32 || c == msgpcode.Int32 || c == msgpcode.Float:
			size = 4
		case c == msgpcode.Uint64 || c == msgpcode.Int64 || c == msgpcode.Double:
			size = 8
		case c == msgpcode.Uint8 || c == msgpcode.Int8:
			size = 1
		case c == msgpcode.Nil || c == msgpcode.False || c == msgpcode.True:
		case msgpcode.IsFixedString(c):
			size = int(c & msgpcode.FixedStrMask)
		case msgpcode.IsFixedArray(c):
			items = int(c & msgpcode.FixedArrayMask)
		case msgpcode.IsFixedMap(c):
			items = 2 * int(c&msgpcode.FixedMapMask)
		case msgpcode.IsFixedExt(c):
			size = 1 + 1<<(c-msgpcode.FixExt1) // its type, then 1 to 16 bytes
		case c == msgpcode.Str8 || c == msgpcode.Bin8 || c == msgpcode.Ext8:
			width = 1
		case c == msgpcode.Str16 || c == msgpcode.Bin16 || c == msgpcode.Ext16 || c == msgpcode.Array16 || c == msgpcode.Map16:
			width = 2
		case c == msgpcode.Str32 || c == msgpcode.Bin32 || c == msgpcode.Ext32 || c == msgpcode.Array32 || c == msgpcode.Map32:
			width = 4
		default: // 0xc1 is never used
			return 0, errBrokenPayload
		}
		if width > 0 {
			if width > len(data)-pos {
				return 0, errBrokenPayload
			}
			n := 0
			for _, b := range data[pos : pos+width] {
				n = n<<8 | int(b)
			}
			pos += width
			switch c {
			case msgpcode.Array16, msgpcode.Array32:
				items = n
			case msgpcode.Map16, msgpcode.Map32:
				items = 2 * n
			case msgpcode.Ext8, msgpcode.Ext16, msgpcode.Ext32:
				size = 1 + n
			default:
				size = n
			}
		}
		if size+items > len(data)-pos {
			return 0, errBrokenPayload
		}
		pos += size
		owed += items
	}
	return pos, nil
}
