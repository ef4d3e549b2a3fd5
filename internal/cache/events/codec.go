package events

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
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
	if isMap(code) {
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
		read := d.field
		if names[i] == "lora_name" && d.isMap() {
			read = d.metadata
		}
		if err := read(e, names[i]); err != nil {
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

// metadata reads the map that SGLang up to 0.5.19 sends in place of the adapter's name for prompts with a
// salt: {"cache_salt": "..."}.
func (d *batchDecoder) metadata(e *kvEvent, _ string) error {
	n, err := d.dec.DecodeMapLen()
	for ; n > 0 && err == nil; n-- {
		var name []byte
		if name, err = d.text(); err != nil {
			break
		}
		if string(name) == "cache_salt" {
			e.salt, err = d.optionalText()
		} else {
			err = d.skip()
		}
	}
	return err
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
