package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/zeebo/xxh3"
)

// TraceRequest is one request of a trace.
type TraceRequest struct {
	Arrival time.Duration // since the trace began
	Prompt  int           // tokens
	Output  int           // tokens
	hashes  []uint64      // of the prompt's parts, in order
	part    int           // tokens that one of hashes stands for
}

// traceBlock is how many tokens one of a Mooncake trace's hash_ids stands for.
const traceBlock = 512

// mooncakeLine is one line of a trace in Mooncake's format, or of a recording,
// which says how many tokens a hash stands for.
type mooncakeLine struct {
	Timestamp    *float64 `json:"timestamp"` // ms
	InputLength  int      `json:"input_length"`
	OutputLength int      `json:"output_length"`
	HashIDs      []uint64 `json:"hash_ids"`
	HashBlock    int      `json:"hash_block_size"` // tokens; 0: traceBlock
}

// ReadTrace reads a trace, one JSON object a line, compressed by gzip or not:
// Mooncake's {"timestamp": ms, "input_length", "output_length", "hash_ids"}, or
// what --record wrote. The requests are in the order of their arrival.
func ReadTrace(name string) ([]TraceRequest, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("trace: %w", err)
	}
	defer file.Close()
	requests, err := parseTrace(file)
	if err != nil {
		return nil, fmt.Errorf("trace %s: %w", name, err)
	}
	return requests, nil
}

// maxTraceLine is the longest line of a trace, bytes.
const maxTraceLine = 64 << 20

func parseTrace(from io.Reader) ([]TraceRequest, error) {
	buffered := bufio.NewReader(from)
	if magic, _ := buffered.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, err
		}
		buffered = bufio.NewReader(unzipped)
	}
	var requests []TraceRequest
	lines := bufio.NewScanner(buffered)
	lines.Buffer(make([]byte, 64<<10), maxTraceLine)
	number := 0
	for lines.Scan() {
		number++
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		request, err := parseTraceLine(lines.Bytes())
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		requests = append(requests, request)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("after line %d: %w", number, err)
	}
	if len(requests) == 0 {
		return nil, errors.New("it has no requests")
	}
	slices.SortStableFunc(requests, func(a, b TraceRequest) int { return int(a.Arrival - b.Arrival) })
	return requests, nil
}

func parseTraceLine(text []byte) (TraceRequest, error) {
	var line mooncakeLine
	if err := json.Unmarshal(text, &line); err != nil {
		return TraceRequest{}, fmt.Errorf("%w; a line is {\"timestamp\": ms, \"input_length\": n, \"output_length\": n, \"hash_ids\": [...]}", err)
	}
	part := line.HashBlock
	if part == 0 {
		part = traceBlock
	}
	switch {
	case part < 0:
		return TraceRequest{}, fmt.Errorf("hash_block_size %d; it is a number of tokens", part)
	case line.Timestamp == nil || *line.Timestamp < 0:
		return TraceRequest{}, errors.New("timestamp is missing or negative; it is the arrival in ms")
	case line.InputLength < 1 || line.OutputLength < 0:
		return TraceRequest{}, fmt.Errorf("input_length %d, output_length %d; they are numbers of tokens", line.InputLength, line.OutputLength)
	case line.HashBlock == 0 && len(line.HashIDs) < line.InputLength/part: // a recording knows nothing of what follows an image
		return TraceRequest{}, fmt.Errorf("%d hash_ids for %d tokens; each stands for %d", len(line.HashIDs), line.InputLength, part)
	}
	return TraceRequest{
		Arrival: time.Duration(*line.Timestamp * float64(time.Millisecond)),
		Prompt:  line.InputLength,
		Output:  max(1, line.OutputLength),
		hashes:  line.HashIDs,
		part:    part,
	}, nil
}

// Blocks returns the prompt's full blocks of that many tokens: the local hash of
// each is made of the hash of the part it lies in and its place there, and the
// engine's is the sequence hash. Both slices are new.
func (r TraceRequest) Blocks(blockSize int) (local []uint64, blocks []StoredBlock) {
	n := min(r.Prompt, len(r.hashes)*r.part) / blockSize
	local = make([]uint64, n)
	var word [16]byte
	for i := range local {
		at := i * blockSize
		binary.LittleEndian.PutUint64(word[:8], r.hashes[at/r.part])
		binary.LittleEndian.PutUint64(word[8:], uint64(at%r.part))
		local[i] = xxh3.HashSeed(word[:], HashSeed)
	}
	blocks = make([]StoredBlock, n)
	for i, h := range SequenceHashes(make([]uint64, 0, n), local) {
		blocks[i] = StoredBlock{Engine: h, Local: local[i]}
	}
	return local, blocks
}
