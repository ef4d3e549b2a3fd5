package events

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/vmihailenco/msgpack/v5/msgpcode"

	"kvrouter/internal/base/kv"
)

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

func (d *batchDecoder) isMap() bool {
	code, err := d.dec.PeekCode()
	return err == nil && isMap(code)
}

func isMap(code byte) bool {
	return code == msgpcode.Map16 || code == msgpcode.Map32 || msgpcode.IsFixedMap(code)
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
