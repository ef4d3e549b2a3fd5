package web

import "encoding/binary"

// Frame follows the frames of one direction of a WebSocket connection (RFC 6455, section 5.2), byte
// by byte. The zero value is at the beginning of a connection.
type Frame struct {
	head   [14]byte
	have   int    // bytes of the head; 0: between two frames
	left   uint64 // bytes of the payload
	passed uint64 // those before
}

// InHead reports whether the next byte belongs to a head.
func (f *Frame) InHead() bool { return f.have < f.size() }

// Within reports whether a frame has begun and not ended.
func (f *Frame) Within() bool { return f.have > 0 }

// Head takes a byte of a head. It reports whether the head is complete; then Pass must follow, with
// 0 for an empty payload.
func (f *Frame) Head(c byte) (whole bool) {
	f.head[f.have] = c
	if f.have++; f.InHead() {
		return false
	}
	switch short := f.head[1] & 0x7f; short {
	case 126:
		f.left = uint64(binary.BigEndian.Uint16(f.head[2:]))
	case 127:
		f.left = binary.BigEndian.Uint64(f.head[2:])
	default:
		f.left = uint64(short)
	}
	f.passed = 0
	return true
}

// Left returns the number of bytes of the payload that are to come.
func (f *Frame) Left() uint64 { return f.left }

// Pass takes n bytes of the payload, at most Left. It reports whether the frame has ended; what is
// known of it stays until the next one begins.
func (f *Frame) Pass(n uint64) (ended bool) {
	if f.left, f.passed = f.left-n, f.passed+n; f.left > 0 {
		return false
	}
	f.have = 0
	return true
}

// Unmask returns the next byte of the payload, given as it came.
func (f *Frame) Unmask(c byte) byte {
	if f.head[1]&0x80 == 0 {
		return c
	}
	return c ^ f.head[f.size()-4:][f.passed%4]
}

// IsControl reports whether it is a control frame, which belongs to no message.
func (f *Frame) IsControl() bool { return f.head[0]&0x8 != 0 }

// IsText reports whether it begins a message of text.
func (f *Frame) IsText() bool { return f.head[0]&0xf == 1 }

// BeginsMessage reports whether a message begins with it.
func (f *Frame) BeginsMessage() bool { return f.IsText() || f.head[0]&0xf == 2 }

// IsLast reports whether it ends a message.
func (f *Frame) IsLast() bool { return f.head[0]&0x80 != 0 }

// size returns the length of the head, as far as it is known.
func (f *Frame) size() int {
	size := 2
	if f.have < size {
		return size
	}
	switch f.head[1] & 0x7f {
	case 126:
		size += 2
	case 127:
		size += 8
	}
	if f.head[1]&0x80 != 0 {
		size += 4
	}
	return size
}
