package telemetry

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"time"

	"kvrouter/internal/hints"
	"kvrouter/internal/jsonbody"
	"kvrouter/internal/jsonlines"
	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/router"
)

const (
	// recordQueue is how many lines may wait for the disk.
	recordQueue = 10_000
	// recordHashBits keeps hash ids below 2^53, which every JSON reader takes
	// without rounding.
	recordHashBits = 53
)

// RecordLine is one line of the file. The first five fields are those of a
// Mooncake trace and its block size, so that one reader reads both.
type RecordLine struct {
	Timestamp     float64  `json:"timestamp"` // ms since the recording began
	InputLength   int      `json:"input_length"`
	OutputLength  int      `json:"output_length"` // 0 where the worker reported none
	HashIDs       []uint64 `json:"hash_ids"`
	HashBlockSize int      `json:"hash_block_size"` // tokens that one of HashIDs stands for

	Arrived         time.Time `json:"arrived"`
	Route           string    `json:"route"`
	Status          int       `json:"status"`
	Policy          string    `json:"policy"`
	Worker          string    `json:"worker"`
	Rank            uint32    `json:"dp_rank"`
	PredictedTokens int       `json:"predicted_cached_tokens"`
	CachedTokens    *int      `json:"cached_tokens"`   // null: not reported
	FirstTokenMS    *float64  `json:"first_token_ms"`  // from the arrival; null: not a stream
	DurationMS      float64   `json:"duration_ms"`     // the same to the end of the answer
	DecisionMS      float64   `json:"decision_ms"`     // hashing, look-up, choosing
	TokensSource    string    `json:"tokens_source"`   // where the prompt's tokens came from
	PromptMismatch  bool      `json:"prompt_mismatch"` // the worker counted other prompt tokens

	Hints *hints.Recorded `json:"hints,omitempty"`

	Decisions []*router.Receipt `json:"decisions,omitempty"` // why its workers were chosen, with --record-decisions; those of all tries, of a shared one the prefill worker's first
}

// Recorder writes one line a finished request to a file, for simulate to replay.
// A nil one records nothing. It is safe for concurrent use.
type Recorder struct {
	*jsonlines.Writer
	Decisions bool // the lines say why workers were chosen
	policy    string
	blockSize int
	epoch     time.Time // of the timestamps; constant
}

// NewRecorder opens file, which lines are appended to; a torn last line is mended.
// Close must follow. An error says that the file cannot be opened, or holds
// something else.
func NewRecorder(file, policy string, blockSize int, log *slog.Logger) (*Recorder, error) {
	epoch, err := readEpoch(file)
	if err != nil {
		return nil, err
	}
	f, torn, err := jsonlines.Open(file)
	if err != nil {
		return nil, fmt.Errorf("--record: %w", err)
	}
	if torn > 0 {
		log.Warn("the last line of the record of requests was torn and is cut off", "file", file, "bytes", torn)
	}
	if epoch.IsZero() {
		epoch = time.Now()
	}
	return &Recorder{policy: policy, blockSize: blockSize, epoch: epoch, Writer: jsonlines.New(f, recordQueue, "the record of requests", log)}, nil
}

// recordStart is what each line of a record begins with.
const recordStart = `{"timestamp":`

// errEpochFound ends the reading of a record.
var errEpochFound = errors.New("found")

// readEpoch returns when a record began, from its first whole line; zero: it has
// none, or there is no file. It changes nothing: what is no record stays as it is.
func readEpoch(file string) (epoch time.Time, err error) {
	info, err := os.Lstat(file)
	if err != nil || !info.Mode().IsRegular() {
		return epoch, nil // opening it tells what is wrong
	}
	f, err := os.Open(file)
	if err != nil {
		return epoch, fmt.Errorf("--record: %w", err)
	}
	defer f.Close()
	err = jsonlines.Read(f, func(_ int, text []byte, _ bool) error {
		var line RecordLine
		switch err := json.Unmarshal(text, &line); {
		case err == nil && !line.Arrived.IsZero():
			epoch = line.Arrived.Add(-time.Duration(math.Round(line.Timestamp * float64(time.Millisecond))))
			return errEpochFound
		case err != nil && jsonlines.Begins(text, recordStart): // torn, by itself or with the next one glued to it
			return nil
		}
		return fmt.Errorf("--record %s: the file holds something else than records; give another name", file)
	})
	if errors.Is(err, errEpochFound) {
		err = nil
	}
	return epoch, err
}

// Began implements openai.Observer.
func (r *Recorder) Began(*http.Request, *proxy.Exchange) {}

// Accepted implements openai.Observer.
func (r *Recorder) Accepted(*proxy.Exchange, *jsonbody.Body) {}

// Decided implements openai.Observer.
func (r *Recorder) Decided(*proxy.Exchange, *router.Pair) {}

// hashIDs returns the sequence hash of every full block of a prompt, its upper
// recordHashBits; known: there is something of it.
func (r *Recorder) hashIDs(request *router.Request) (hashes []uint64, known bool) {
	if len(request.Tokens) == 0 && len(request.Local) == 0 {
		return nil, false
	}
	local := request.Local
	if len(request.Tokens) > 0 {
		local = request.Hashes(nil, r.blockSize)
	}
	hashes = kv.SequenceHashes(make([]uint64, 0, len(local)), local)
	for i := range hashes {
		hashes[i] >>= 64 - recordHashBits
	}
	return hashes, true
}

// Finished implements openai.Observer: it records a request that has ended, if its
// prompt was known and it was for the default model: a record is a trace of one model.
// It never waits.
func (r *Recorder) Finished(x *proxy.Exchange, now time.Time) {
	if r == nil || x.Request == nil || !x.Default {
		return
	}
	hashes, known := r.hashIDs(x.Request)
	if !known {
		return
	}
	tokens := max(x.Request.NumTokens, len(x.Request.Tokens))
	line := RecordLine{
		InputLength: tokens, OutputLength: x.Usage.OutputTokens, HashIDs: hashes, HashBlockSize: r.blockSize, Hints: hints.Record(x.Request.Prefix),
		Arrived: x.Arrived, Route: x.Route, Status: x.Status, Policy: r.policy, Worker: x.Worker, Rank: x.Decision.Target.Key.Rank,
		PredictedTokens: x.Decision.OverlapTokens, DurationMS: milliseconds(now.Sub(x.Arrived)),
		DecisionMS:   milliseconds(x.Decision.HashTime + x.Decision.LookupTime + x.Decision.ScheduleTime),
		TokensSource: x.Source, PromptMismatch: x.Usage.Known && x.Usage.PromptTokens != tokens,
	}
	if r.Decisions {
		line.Decisions = nameless(x.Receipts)
	}
	if x.Usage.CachedKnown {
		cached := x.Usage.CachedTokens
		line.CachedTokens = &cached
	}
	if !x.FirstChunk.IsZero() {
		first := milliseconds(x.FirstChunk.Sub(x.Arrived))
		line.FirstTokenMS = &first
	}
	line.Timestamp = max(0, milliseconds(line.Arrived.Sub(r.epoch)))
	r.Write(line, line.memory())
}

// Sizes of parts of a line in memory, bytes: about, and rather too large.
const (
	lineMemory      = 1 << 10
	receiptMemory   = 1 << 10
	candidateMemory = 512
)

// memory is how much memory the line takes, bytes.
func (l *RecordLine) memory() int {
	size := lineMemory + 8*len(l.HashIDs)
	for _, receipt := range l.Decisions {
		size += receiptMemory + candidateMemory*len(receipt.Candidates)
	}
	return size
}

// nameless returns receipts without what the client called its request and series: a
// record has at most hashes of those.
func nameless(receipts []*router.Receipt) (list []*router.Receipt) {
	for _, receipt := range receipts {
		without := *receipt
		without.RequestID, without.Series = "", ""
		list = append(list, &without)
	}
	return list
}

// Lost returns how many lines are missing in the record so far.
func (r *Recorder) Lost() uint64 {
	if r == nil {
		return 0
	}
	return r.Writer.Lost()
}

// Close writes what is left and closes the file.
func (r *Recorder) Close() {
	if r != nil {
		r.Writer.Close()
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
