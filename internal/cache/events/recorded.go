package events

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"text/tabwriter"
	"time"

	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
)

// Bounds of a recording.
const (
	// maxRecordedBlocks is the number of blocks that all ranks may hold at once, of some 58
	// bytes each.
	maxRecordedBlocks = 1 << 25
	// recordedErrorText is the longest text of an error in a line, bytes.
	recordedErrorText = 200
)

// ReplayCommand applies a recording of KV events to an empty index and prints a
// summary.
type ReplayCommand struct {
	File         string        `arg:"" help:"File of --record-events, or of Dynamo's KvRecorder."`
	MaxCount     int           `group:"Replay of KV events" placeholder:"N" help:"Maximum number of events to replay. Default: all."`
	MaxTime      time.Duration `group:"Replay of KV events" placeholder:"DURATION" help:"Stop at the first event recorded more than this after the start of the recording. Default: never."`
	MaxErrors    int           `group:"Replay of KV events" default:"20" help:"Maximum number of invalid lines to list; all are counted."`
	PromptTokens []uint32      `group:"Replay of KV events" placeholder:"ID" help:"Token ids of a prompt, separated by commas: print the matched tokens of each worker at the end. Hashed in blocks of --block-size."`
	BlockSize    int           `group:"Replay of KV events" default:"64" help:"Tokens per block of --prompt-tokens."`
}

// Validate checks the settings.
func (c *ReplayCommand) Validate() error {
	if c.MaxCount < 0 || c.MaxTime < 0 || c.MaxErrors < 0 {
		return errors.New("--max-count, --max-time and --max-errors must not be negative")
	}
	if c.BlockSize < 1 {
		return errors.New("--block-size must be greater than 0")
	}
	return nil
}

// Run reads the file and writes the summary. An error means that the file cannot be read completely, or has no events.
func (c *ReplayCommand) Run(out io.Writer) error {
	file, err := os.Open(c.File)
	if err != nil {
		return err
	}
	defer file.Close()
	index := radix.NewTree()
	r, err := c.Replay(file, index)
	if r.events > 0 {
		r.print(out, c.File, index)
		c.printPrompt(out, index)
	} else if err == nil {
		err = errors.New("it contains no KV events: use a file of --record-events or of Dynamo's KvRecorder")
	}
	if err != nil {
		return fmt.Errorf("%s: %w", c.File, err)
	}
	return nil
}

// Replay applies the lines to the index, which must be empty, up to the limits of
// the settings.
func (c *ReplayCommand) Replay(in io.Reader, index radix.Index) (*Replayed, error) {
	r := &Replayed{index: index, ranks: map[kv.WorkerKey]*replayedRank{}, most: c.MaxErrors}
	err := jsonlines.Read(in, func(number int, text []byte, whole bool) error {
		if c.MaxCount > 0 && r.events >= c.MaxCount {
			return jsonlines.ErrStop
		}
		var line recordedLine
		err := json.Unmarshal(text, &line)
		switch {
		case err != nil && !whole:
			err = errors.New("it is incomplete")
		case err == nil && (line.Event == nil || line.Event.Event.Data == changeText{}):
			err = errors.New("it is not an event")
		case err == nil && c.MaxTime > 0 && line.Timestamp > uint64(c.MaxTime.Milliseconds()):
			return jsonlines.ErrStop
		}
		if err != nil {
			r.fail(number, err.Error())
			return nil
		}
		return r.apply(number, &line)
	})
	return r, err
}

// Replayed is the result of a replay so far.
type Replayed struct {
	index      radix.Index
	events     int
	recordings int    // in the file, one after the other
	last       uint64 // timestamp, ms
	ranks      map[kv.WorkerKey]*replayedRank
	live       map[kv.WorkerKey]*replayedRank // those of this recording
	held       int                            // blocks of all ranks

	errors []string // bounded
	most   int
	wrong  int // all of them
}

// replayedRank counts a rank's lines.
type replayedRank struct {
	stored, removed int // blocks that were
	cleared         int // times
	orphans         int // blocks that follow one which the rank does not hold
	notHeld         int // blocks that were to be removed
	lower           int // blocks in changes of lower tiers
	elsewhere       int // events of other owners than the worker
	missing         uint64
	held            int // blocks now
	next            uint64
	seen            bool // next is known
}

// fail notes the fault of a line.
func (r *Replayed) fail(number int, what string) {
	if r.wrong++; len(r.errors) < r.most {
		r.errors = append(r.errors, fmt.Sprintf("line %d: %.*s", number, recordedErrorText, what))
	}
}

// apply applies a line's event. An error ends the reading.
func (r *Replayed) apply(number int, line *recordedLine) error {
	if r.recordings == 0 || line.Timestamp < r.last { // a router starts with an empty index
		r.recordings++
		for key, rank := range r.live {
			_, _ = r.index.Apply(key, &radix.Change{Kind: radix.Cleared}) // cannot fail
			rank.held, rank.seen = 0, false
		}
		r.live, r.held = map[kv.WorkerKey]*replayedRank{}, 0
	}
	r.last = line.Timestamp
	r.events++
	e := line.Event
	key := kv.WorkerKey{Worker: e.WorkerID, Rank: e.Event.DPRank}
	rank := r.ranks[key]
	if rank == nil {
		if len(r.ranks) >= maxDumpRanks {
			return fmt.Errorf("line %d: more than %d workers and ranks", number, maxDumpRanks)
		}
		rank = new(replayedRank)
		r.ranks[key] = rank
	}
	r.live[key] = rank
	if rank.seen && e.Event.EventID > rank.next {
		rank.missing += e.Event.EventID - rank.next
	}
	rank.seen, rank.next = true, e.Event.EventID+1
	if !e.worker() {
		rank.elsewhere++
		return nil
	}
	if what := rank.change(r.index, key, e); what != "" {
		r.fail(number, fmt.Sprintf("worker %d rank %d: %s", key.Worker, key.Rank, what))
	}
	r.held -= rank.held
	rank.held = r.index.AllBlocks(key)
	if r.held += rank.held; r.held > maxRecordedBlocks {
		return fmt.Errorf("line %d: the workers have more than %d blocks", number, maxRecordedBlocks)
	}
	return nil
}

// worker reports whether an event is about the caches of a worker, rather than those of
// another owner.
func (e *routerEvent) worker() bool {
	domain := string(e.Domain)
	return domain == "" || domain == "null" || domain == `"worker"`
}

// change applies an event to the index and returns its fault.
func (r *replayedRank) change(index radix.Index, key kv.WorkerKey, e *routerEvent) string {
	c, err := e.change()
	if c.Kind == radix.DoubtSettled {
		c.Set.Doubt = index.LowerOf(key).Doubt
	}
	var done radix.Applied
	if err == nil {
		done, err = index.Apply(key, &c)
	}
	if c.Tier != kv.Device || errors.Is(err, errNoTier) {
		r.lower += c.Size()
		if done.Unknown > 0 {
			return fmt.Sprintf("%d of %d blocks removed from %s were not in the index", done.Unknown, c.Size(), c.Tier)
		}
	} else {
		r.count(&c, done, err)
		switch {
		case errors.Is(err, radix.ErrParentUnknown):
			return fmt.Sprintf("the parent of %d stored blocks, block %d, is not in the index", c.Size(), c.Parent)
		case done.Unknown > 0 && c.Group == 0:
			return fmt.Sprintf("%d of %d removed blocks were not in the index", done.Unknown, c.Size())
		}
	}
	if err != nil {
		return err.Error()
	}
	return ""
}

// count counts a change of the device.
func (r *replayedRank) count(c *radix.Change, done radix.Applied, err error) {
	switch c.Kind {
	case radix.Stored:
		if err == nil {
			r.stored += c.Size()
		} else if errors.Is(err, radix.ErrParentUnknown) || errors.Is(err, errNoParent) {
			r.orphans += c.Size()
		}
	case radix.Removed:
		if c.Group == 0 {
			r.removed += c.Size() - done.Unknown
			r.notHeld += done.Unknown
		}
	case radix.Cleared, radix.DeviceCleared:
		r.cleared++
	case radix.Held, radix.Forgotten, radix.LayoutSet, radix.LookaheadStored, radix.ChunkSet, radix.LowerRestored, radix.DoubtSettled:
	}
}

// print writes the summary.
func (r *Replayed) print(out io.Writer, name string, index radix.Index) {
	times := "one recording"
	if r.recordings > 1 {
		times = fmt.Sprintf("%d recordings, each of which begins with an empty index", r.recordings)
	}
	fmt.Fprintf(out, "%s: %d events of %s, the last after %v\n", name, r.events, times, time.Duration(min(r.last, 1<<40))*time.Millisecond)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table,
		"worker\trank\tstored\tremoved\tcleared\tunknown parent\tunknown removed\tlower tiers\tother owners\tevents missing\tblocks\t")
	for _, key := range slices.SortedFunc(maps.Keys(r.ranks), kv.WorkerKey.Compare) {
		rank := r.ranks[key]
		fmt.Fprintf(table, "%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t\n", key.Worker, key.Rank,
			rank.stored, rank.removed, rank.cleared, rank.orphans, rank.notHeld, rank.lower, rank.elsewhere, rank.missing, index.Blocks(key))
	}
	_ = table.Flush()
	for _, text := range r.errors {
		fmt.Fprintln(out, text)
	}
	if more := r.wrong - len(r.errors); more > 0 {
		fmt.Fprintf(out, "... and %d more lines (--max-errors)\n", more)
	}
}

// printPrompt writes how much of the prompt each worker holds.
func (c *ReplayCommand) printPrompt(out io.Writer, index radix.Index) {
	if len(c.PromptTokens) == 0 {
		return
	}
	local := kv.HashBlocks(nil, c.PromptTokens, c.BlockSize, "", "")
	matches := index.Match(local, len(local), 0, nil)
	for _, l := range index.Lookaheads() {
		ahead := kv.HashLookaheadBlocks(nil, c.PromptTokens, c.BlockSize, l.Tokens, "", "", nil)
		matches = index.Match(ahead, len(ahead), 0, matches)
	}
	slices.SortStableFunc(matches, func(a, b kv.Match) int { return cmp.Compare(b.Blocks, a.Blocks) })
	fmt.Fprintf(out, "the prompt has %d blocks of %d tokens; %d ranks hold its beginning\n", len(local), c.BlockSize, len(matches))
	for _, m := range matches {
		fmt.Fprintf(out, "worker %d rank %d holds %d blocks, %d tokens", m.Worker.Worker, m.Worker.Rank, m.Blocks, m.Blocks*c.BlockSize)
		for _, tier := range kv.LowerTiers {
			if n := m.Lower.Of(tier); n > 0 {
				fmt.Fprintf(out, ", and %d blocks on %s", n, tier)
			}
		}
		fmt.Fprintln(out)
	}
}
