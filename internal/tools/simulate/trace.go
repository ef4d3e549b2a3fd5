package simulate

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/hints"
)

// TraceRequest is one request of a trace.
type TraceRequest struct {
	Arrival time.Duration // since the trace began
	Prompt  int           // tokens
	Output  int           // tokens
	Next    *TraceRequest // next turn of the conversation; nil: none
	Think   time.Duration // time from the end of this answer to Next, whose Arrival is not used
	AtOnce  bool          // is sent with the previous one, regardless of the concurrency
	Hints   hints.Prefix  // of its client
	Adapter string        // LoRA adapter; empty: none
	Hashes  []uint64      // of the parts of the prompt and of the known answer; each covers all tokens up to its end
	Part    int           // tokens per entry of hashes
	known   int           // tokens that hashes stand for
	ended   time.Duration // when the recorded answer did
	tenant  *tenant       // nil: the common one
}

// traceBlock is the number of tokens that one of a Mooncake trace's hash_ids stands for.
const traceBlock = 512

// mooncakeLine is one line of a trace in Mooncake's format, or of a recording,
// which says how many tokens a hash stands for.
type mooncakeLine struct {
	Timestamp    *float64        `json:"timestamp"` // ms
	InputLength  int             `json:"input_length"`
	OutputLength int             `json:"output_length"`
	HashIDs      []uint64        `json:"hash_ids"`
	HashBlock    int             `json:"hash_block_size"` // tokens; 0: traceBlock
	DurationMS   float64         `json:"duration_ms"`
	Hints        *hints.Recorded `json:"hints"`
}

// ReadTrace reads a trace, one JSON object a line, compressed by gzip or not:
// Mooncake's {"timestamp": ms, "input_length", "output_length", "hash_ids"}, or
// what --record wrote. The requests are in the order of their arrival.
func ReadTrace(name string) ([]TraceRequest, error) {
	requests, _, err := readTrace(name)
	return requests, err
}

// readTrace is ReadTrace that also returns the number of torn lines left out.
func readTrace(name string) (requests []TraceRequest, torn int, err error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, 0, fmt.Errorf("trace: %w", err)
	}
	defer file.Close()
	if requests, torn, err = parseTrace(file); err != nil {
		return nil, 0, fmt.Errorf("trace %s: %w", name, err)
	}
	return requests, torn, nil
}

// lineStart is the beginning of the lines of a trace. One that does and is no JSON
// was torn by a full disk or a killed recorder.
const lineStart = `{"timestamp":`

func parseTrace(from io.Reader) (requests []TraceRequest, torn int, err error) {
	buffered := bufio.NewReader(from)
	if magic, _ := buffered.Peek(2); bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		unzipped, err := gzip.NewReader(buffered)
		if err != nil {
			return nil, 0, err
		}
		buffered = bufio.NewReader(unzipped)
	}
	err = jsonlines.Read(buffered, func(number int, line []byte, whole bool) error {
		if (!whole || len(line) >= len(lineStart)) && jsonlines.Begins(line, lineStart) && !json.Valid(line) {
			torn++
			return nil
		}
		request, err := ParseTraceLine(line)
		if err != nil {
			return fmt.Errorf("line %d: %w", number, err)
		}
		requests = append(requests, request)
		return nil
	})
	switch {
	case err != nil:
		return nil, 0, err
	case len(requests) == 0:
		return nil, 0, errors.New("it has no requests")
	}
	slices.SortStableFunc(requests, func(a, b TraceRequest) int { return cmp.Compare(a.Arrival, b.Arrival) })
	findAnswers(requests)
	return requests, torn, nil
}

// openTurns is how many prompts with the same full blocks findAnswers remembers,
// the latest ones.
const openTurns = 16

// findAnswers gives the requests of a recording, in the order of arrival, the
// hashes of their answers, which later requests find cached: a recording
// has only those of prompts. A prompt that has all full blocks of an earlier
// one, and is longer than that one and its answer, is taken for the chat's next
// turn, which repeats the answer. Of several earlier ones it follows the longest,
// and then the latest, that no other follows.
func findAnswers(requests []TraceRequest) {
	open := map[uint64][]*TraceRequest{} // not followed, by the hash of the last full block
	for i := range requests {
		r := &requests[i]
		if r.ended == 0 || len(r.Hashes) < r.Prompt/r.Part {
			continue // no recording, or not of the whole prompt
		}
		follows := func(before *TraceRequest) bool {
			return before.Part == r.Part && before.ended <= r.Arrival && before.Prompt+before.Output < r.Prompt
		}
		for n := len(r.Hashes) - 1; n > 0; n-- {
			turns := open[r.Hashes[n-1]]
			at := len(turns) - 1
			for at >= 0 && !follows(turns[at]) {
				at--
			}
			if at < 0 {
				continue
			}
			before := turns[at]
			before.known = before.Prompt + before.Output
			before.Hashes = r.Hashes[:before.known/r.Part]
			open[r.Hashes[n-1]] = slices.Delete(turns, at, at+1)
			break
		}
		if n := len(r.Hashes); n > 0 {
			turns := append(open[r.Hashes[n-1]], r)
			open[r.Hashes[n-1]] = turns[max(0, len(turns)-openTurns):]
		}
	}
}

// Bounds of a line of a trace: tokens of a prompt or an answer, tokens of one
// of its hashes, and ms (30 years), so that no sum of them overflows.
const (
	maxTraceTokens = 1 << 24
	maxTracePart   = 1 << 16
	maxTraceMS     = 1e12
)

// ParseTraceLine reads one line of a trace.
func ParseTraceLine(text []byte) (TraceRequest, error) {
	var line mooncakeLine
	if err := json.Unmarshal(text, &line); err != nil {
		return TraceRequest{}, fmt.Errorf("%w; a line is {\"timestamp\": ms, \"input_length\": n, \"output_length\": n, \"hash_ids\": [...]}",
			err)
	}
	part := line.HashBlock
	if part == 0 {
		part = traceBlock
	}
	switch {
	case part < 0 || part > maxTracePart:
		return TraceRequest{}, fmt.Errorf("hash_block_size %d; it is a number of tokens", part)
	case line.Timestamp == nil || !(*line.Timestamp >= 0 && *line.Timestamp <= maxTraceMS) || !(math.Abs(line.DurationMS) <= maxTraceMS):
		return TraceRequest{},
			errors.New("timestamp is missing, negative or too large, or duration_ms is; they are the arrival and how long the answer took, in ms")
	case line.InputLength < 1 || line.OutputLength < 0 || line.InputLength > maxTraceTokens || line.OutputLength > maxTraceTokens:
		return TraceRequest{}, fmt.Errorf("input_length %d, output_length %d; they are numbers of tokens", line.InputLength, line.OutputLength)
	case line.Hints != nil && (line.Hints.Total < 0 || line.Hints.Budget != nil && *line.Hints.Budget < 0):
		return TraceRequest{}, errors.New("total_requests or reuse_budget of the hints is negative; they are numbers of requests")
	case line.HashBlock == 0 && len(line.HashIDs) < line.InputLength/part: // a recording knows nothing of what follows an image
		return TraceRequest{}, fmt.Errorf("%d hash_ids for %d tokens; each stands for %d", len(line.HashIDs), line.InputLength, part)
	}
	arrival := time.Duration(*line.Timestamp * float64(time.Millisecond))
	ended := time.Duration(0)
	if line.HashBlock > 0 {
		ended = arrival + time.Duration(line.DurationMS*float64(time.Millisecond))
	}
	request := TraceRequest{
		Arrival: arrival,
		Prompt:  line.InputLength,
		Output:  max(1, line.OutputLength),
		Hashes:  line.HashIDs,
		Part:    part,
		known:   min(line.InputLength, len(line.HashIDs)*part),
		ended:   ended,
	}
	if line.Hints != nil {
		request.Hints = hints.Prefix(*line.Hints)
	}
	return request, nil
}

// Blocks returns the local hashes of the prompt's full blocks of that many tokens,
// and these blocks followed by those of the known answer. The local hash of a block
// is derived from the hash of the part in which it ends and its position there; the
// engine's hash is the sequence hash. Both slices are new.
func (r *TraceRequest) Blocks(blockSize int) (local []uint64, blocks []kv.StoredBlock) {
	local = make([]uint64, r.known/blockSize)
	var word [16]byte
	for i := range local {
		last := (i+1)*blockSize - 1
		binary.LittleEndian.PutUint64(word[:8], r.Hashes[last/r.Part])
		binary.LittleEndian.PutUint64(word[8:], uint64(last%r.Part))
		local[i] = xxh3.HashSeed(word[:], kv.HashSeed)
	}
	blocks = make([]kv.StoredBlock, len(local))
	for i, h := range kv.SequenceHashes(make([]uint64, 0, len(local)), local) {
		blocks[i] = kv.StoredBlock{Engine: h, Local: local[i]}
	}
	return local[:min(len(local), r.Prompt/blockSize)], blocks
}
