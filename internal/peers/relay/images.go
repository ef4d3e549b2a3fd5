package relay

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/zeebo/xxh3"
)

// The frames of a filter, CBI1: a header, then the words of a part of a snapshot, or the
// words of single buckets. All numbers are little-endian. A word has four fingerprints of
// 16 bits, the first in the lowest bits; 0 is a free slot.
const (
	frameMagic   = "CBI1"
	frameVersion = 1
	headerSize   = 48
	chunkHead    = 16        // number, count and first bucket of a part
	deltaHead    = 12        // base sequence and number of images
	imageSize    = 12        // bucket and word
	chunkBuckets = 512 << 10 // of a part, at most; only the last may have fewer
	maxFrame     = headerSize + chunkHead + 8*chunkBuckets
	maxImages    = (maxFrame - headerSize - deltaHead) / imageSize
	flagSnapshot = 1
	flagDelta    = 2
)

// frame is a decoded frame. Its body is part of the payload.
type frame struct {
	delta    bool
	sequence uint64
	base     uint64 // of a delta
	chunk    uint32 // of a snapshot
	chunks   uint32
	first    uint64 // bucket of a part
	body     []byte // words, or images
}

// parseFrame decodes the payload of a message of p.
func parseFrame(p *Producer, payload []byte) (f frame, err error) {
	le := binary.LittleEndian
	switch {
	case len(payload) < headerSize:
		return f, fmt.Errorf("a frame of %d bytes: want at least %d", len(payload), headerSize)
	case len(payload) > maxFrame:
		return f, fmt.Errorf("a frame of %d bytes: want at most %d", len(payload), maxFrame)
	case string(payload[:4]) != frameMagic:
		return f, errors.New("a frame that does not begin with " + frameMagic)
	case le.Uint16(payload[4:]) != frameVersion:
		return f, fmt.Errorf("a frame of version %d: want %d", le.Uint16(payload[4:]), frameVersion)
	case payload[8] != fingerprintBits || payload[9] != slotsPerBucket || le.Uint16(payload[10:]) != filterVersion:
		return f, fmt.Errorf("a filter of version %d with %d slots of %d bits: want version %d with %d of %d", le.Uint16(payload[10:]),
			payload[9], payload[8], filterVersion, slotsPerBucket, fingerprintBits)
	case le.Uint64(payload[12:]) != p.Format.Seed || le.Uint64(payload[20:]) != uint64(p.Format.Buckets):
		return f, errors.New("a frame of a filter with another seed or size")
	case le.Uint64(payload[28:]) != p.Pool.DataCenter:
		return f, errors.New("a frame of another data center")
	case le.Uint32(payload[44:]) != uint32(xxh3.Hash(payload[headerSize:])):
		return f, errors.New("a frame with a wrong checksum")
	}
	f.sequence = le.Uint64(payload[36:])
	body := payload[headerSize:]
	switch flags := le.Uint16(payload[6:]); {
	case flags == flagSnapshot && len(body) >= chunkHead:
		f.chunk, f.chunks, f.first, f.body = le.Uint32(body), le.Uint32(body[4:]), le.Uint64(body[8:]), body[chunkHead:]
		if len(f.body)%8 != 0 || f.chunk >= f.chunks || f.first > maxBuckets || f.first+uint64(len(f.body)/8) > uint64(p.Format.Buckets) {
			return f, errors.New("a part of a snapshot that does not fit the filter")
		}
	case flags == flagDelta && len(body) >= deltaHead:
		f.delta, f.base, f.body = true, le.Uint64(body), body[deltaHead:]
		if images := le.Uint32(body[8:]); images > maxImages || len(f.body) != int(images)*imageSize {
			return f, fmt.Errorf("a delta of %d images in %d bytes", images, len(f.body))
		}
	default:
		return f, fmt.Errorf("a frame with flags %d and a body of %d bytes", flags, len(body))
	}
	return f, nil
}

// image returns the bucket and the word of a delta's image.
func (f *frame) image(i int) (bucket uint32, word uint64) {
	at := f.body[i*imageSize:]
	return binary.LittleEndian.Uint32(at), binary.LittleEndian.Uint64(at[4:])
}

// chunksOf returns the number of parts of a snapshot.
func chunksOf(buckets int) int { return (buckets + chunkBuckets - 1) / chunkBuckets }

// alternateSeed sets the second bucket of a fingerprint apart from the first.
const alternateSeed = 0x9E3779B97F4A7C15

// place returns the fingerprint of a sequence hash and the first of its two buckets.
func (f Format) place(sequence uint64) (fingerprint uint64, bucket uint32) {
	var b [8]byte
	binary.LittleEndian.PutUint64(b[:], sequence)
	mixed := xxh3.HashSeed(b[:], f.Seed)
	return max(1, mixed&0xffff), uint32(mixed>>16) & uint32(f.Buckets-1)
}

// other returns the second bucket of a fingerprint that may be in the first, and back.
func (f Format) other(bucket uint32, fingerprint uint64) uint32 {
	b := [2]byte{byte(fingerprint), byte(fingerprint >> 8)}
	return bucket ^ max(1, uint32(xxh3.HashSeed(b[:], f.Seed^alternateSeed))&uint32(f.Buckets-1))
}
