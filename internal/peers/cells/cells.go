// Package cells lets a router be the worker of another one. A Reporter sends the routers above the
// prefixes that this router's workers have cached and the waits of requests, over GET /cell; a
// Client follows it.
//
// The answer is a stream of frames without an end: the length of the rest as 4 bytes, little
// endian, a kind, and the rest. The first is a Hello, the second an Info, the third a State.
// States come in each interval, also while nothing changes: they are the signs of life. Nothing
// in it is a time of day: the clocks of two machines need not agree.
package cells

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"time"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/policy"
)

// Path is that of the stream on the OpenAI port.
const Path = "/cell"

// Protocol is the version of the stream. A router of another one is used without its stream:
// not at all.
const Protocol = 1

// HashKind names how sequence hashes are made: see kv.SequenceHashes.
const HashKind = "xxh3-64/1337"

// Kinds of frames.
const (
	frameHello   = 'h'
	frameInfo    = 'i'
	frameState   = 's'
	frameSummary = 'm' // of package summary
)

// Bounds of what a cell reports.
const (
	maxJSON   = 256 << 10 // bytes of a frame
	maxNames  = 512       // models, adapters or routers: together less than maxJSON
	maxName   = 128       // bytes of one
	maxBlock  = 1 << 16   // tokens of a block
	maxBlocks = 1 << 40   // of all its workers
	maxTokens = 1 << 40   // of all its requests
	maxWait   = time.Hour
)

// Hello has what is constant while a router runs.
type Hello struct {
	Protocol  int    `json:"protocol"`
	Router    string `json:"router"` // names the process in Via headers
	Version   string `json:"version"`
	BlockSize int    `json:"block_size"` // tokens
	Hash      string `json:"hash"`       // HashKind
	Summary   bool   `json:"summary"`    // the stream has one
	Epoch     uint64 `json:"epoch"`      // of the summary; another one cannot be resumed
}

// Info has what changes seldom.
type Info struct {
	Models     []string       `json:"models"` // of the default model, its own name first
	Adapters   []string       `json:"adapters,omitempty"`
	Root       string         `json:"root,omitempty"`
	Engine     kv.Engine      `json:"engine"`
	Lookaheads []kv.Lookahead `json:"lookaheads,omitempty"`
	Below      []string       `json:"below,omitempty"`      // Hello.Router of all routers below it
	BlockSize  int            `json:"block_size,omitempty"` // of its workers, tokens; 0: Hello's
}

// State has what changes continuously.
type State struct {
	Ready   bool       `json:"ready"`   // it accepts requests
	Leaving bool       `json:"leaving"` // it drains, and will end
	Workers int        `json:"workers"` // ranks that are up
	Waits   [3]float64 `json:"waits_ms"`
	Running int        `json:"running"`
	Waiting int        `json:"waiting"`
	Usage   float64    `json:"kv_usage"`
	Blocks  int        `json:"blocks"`
	Context int        `json:"context"` // prompt tokens of the requests that decode
}

// Waits returns the waits of a State.
func Waits(waits [len(fair.Classes)]time.Duration) (ms [len(fair.Classes)]float64) {
	for i, w := range waits {
		ms[i] = float64(w) / float64(time.Millisecond)
	}
	return ms
}

// Report returns the state for policies. at is when it came.
func (s *State) Report(at time.Time, network time.Duration) policy.CellReport {
	r := policy.CellReport{Workers: max(1, s.Workers), Network: network, Context: s.Context,
		Load: policy.Published{Running: s.Running, Waiting: s.Waiting, KVUsage: s.Usage, At: at}}
	for i, ms := range s.Waits {
		r.Waits[i] = time.Duration(ms * float64(time.Millisecond))
	}
	return r
}

// clamp brings foreign numbers within their bounds.
func (s *State) clamp() {
	within := func(n *int, most int) { *n = min(max(*n, 0), most) }
	within(&s.Workers, policy.MaxCellWorkers)
	within(&s.Running, kv.MaxTokens)
	within(&s.Waiting, kv.MaxTokens)
	within(&s.Blocks, maxBlocks)
	within(&s.Context, maxTokens)
	real := func(f *float64, most float64) {
		if !(*f >= 0) { // NaN too
			*f = 0
		}
		*f = min(*f, most)
	}
	for i := range s.Waits {
		real(&s.Waits[i], float64(maxWait/time.Millisecond))
	}
	real(&s.Usage, 1)
}

// clip bounds foreign lists, and leaves out what is out of range.
func (i *Info) clip() {
	for _, list := range []*[]string{&i.Models, &i.Adapters, &i.Below} {
		few := slices.Clone((*list)[:min(len(*list), maxNames)])
		*list = slices.DeleteFunc(few, func(name string) bool { return name == "" || len(name) > maxName })
	}
	if len(i.Root) > maxName {
		i.Root = ""
	}
	few := slices.Clone(i.Lookaheads[:min(len(i.Lookaheads), kv.MaxLookaheads)])
	i.Lookaheads = slices.DeleteFunc(few, func(l kv.Lookahead) bool {
		return l.Tokens < 1 || l.Tokens > kv.MaxLookahead || l.Cut < 0 || l.Cut > kv.MaxLookahead
	})
}

// appendFrame appends a frame.
func appendFrame(dst []byte, kind byte, body []byte) []byte {
	dst = binary.LittleEndian.AppendUint32(dst, uint32(1+len(body)))
	return append(append(dst, kind), body...)
}

// appendJSON appends a frame with a value.
func appendJSON(dst []byte, kind byte, value any) ([]byte, error) {
	text, err := json.Marshal(value)
	if err != nil {
		return dst, fmt.Errorf("cell: frame %q: %w", kind, err)
	}
	return appendFrame(dst, kind, text), nil
}

// readFrame reads a frame into memory, which is reused if it is large enough.
func readFrame(from io.Reader, memory []byte) (kind byte, body, grown []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(from, head[:]); err != nil {
		return 0, nil, memory, err
	}
	size := binary.LittleEndian.Uint32(head[:])
	most := uint32(maxJSON)
	if head[4] == frameSummary {
		most = summary.MaxMessage
	}
	if size == 0 || size-1 > most {
		return 0, nil, memory, fmt.Errorf("%w: a frame %q of %d bytes: at most %d are read", ErrContent, head[4], size, most)
	}
	if size--; uint32(cap(memory)) < size {
		memory = make([]byte, size)
	}
	body = memory[:size]
	if _, err := io.ReadFull(from, body); err != nil {
		return 0, nil, memory, err
	}
	return head[4], body, memory, nil
}
