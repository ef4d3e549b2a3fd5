package telemetry

import (
	"cmp"
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/proxy"
)

const (
	// recordQueue is the maximum number of lines that wait for the disk.
	recordQueue = 10_000
	// recordHashBits keeps hash ids below 2^53, which every JSON reader represents
	// exactly.
	recordHashBits = 53
)

// RecordLine is one line of the file. The first five fields are those of a
// Mooncake trace and its block size, so that one reader reads both.
type RecordLine struct {
	Timestamp     float64  `json:"timestamp"` // ms since the recording began
	InputLength   int      `json:"input_length"`
	OutputLength  int      `json:"output_length"` // 0 if the worker reported none
	HashIDs       []uint64 `json:"hash_ids"`
	HashBlockSize int      `json:"hash_block_size"` // tokens per entry of HashIDs

	Arrived         time.Time `json:"arrived"`
	Route           string    `json:"route"`
	Status          int       `json:"status"`
	Policy          string    `json:"policy"`
	Worker          string    `json:"worker"`
	Rank            uint32    `json:"dp_rank"`
	CellWorker      string    `json:"cell_worker,omitempty"`        // of a router below this one: the worker that it chose
	CellTokens      *int      `json:"cell_cached_tokens,omitempty"` // that it predicted there
	PredictedTokens int       `json:"predicted_cached_tokens"`
	CachedTokens    *int      `json:"cached_tokens"`   // null: not reported
	FirstTokenMS    *float64  `json:"first_token_ms"`  // from the arrival; null: not a stream
	DurationMS      float64   `json:"duration_ms"`     // the same to the end of the answer
	DecisionMS      float64   `json:"decision_ms"`     // hashing, lookup, choice
	TokensSource    string    `json:"tokens_source"`   // source of the prompt's tokens
	PromptMismatch  bool      `json:"prompt_mismatch"` // the worker reported another number of prompt tokens

	Hints *hints.Recorded `json:"hints,omitempty"`

	// explanations, with --record-decisions: of all attempts, of a disaggregated one the prefill worker's first
	Decisions []*router.Receipt `json:"decisions,omitempty"`
}

// RecordSettings are the settings of a Recorder.
type RecordSettings struct {
	File      string // that lines are appended to
	Policy    string // written to each line
	BlockSize int    // tokens; of requests for which no worker was chosen
	Decisions bool   // lines explain the routing decisions (--record-decisions)
}

// Recorder appends one line for each finished request to a file that kvrouter simulate
// can replay. A nil Recorder records nothing. It is safe for concurrent use.
type Recorder struct {
	*jsonlines.Writer
	settings RecordSettings
	epoch    time.Time // of the timestamps
}

// NewRecorder opens the file and removes an incomplete last line. The caller calls
// Close. An error means that the file cannot be opened or is not a record.
func NewRecorder(settings RecordSettings, log *slog.Logger) (*Recorder, error) {
	epoch, err := readEpoch(settings.File)
	if err != nil {
		return nil, err
	}
	f, torn, err := jsonlines.Open(settings.File)
	if err != nil {
		return nil, fmt.Errorf("--record: %w", err)
	}
	if torn > 0 {
		log.Warn("truncated an incomplete last line of the record of requests", "file", settings.File, "bytes", torn)
	}
	if epoch.IsZero() {
		epoch = time.Now()
	}
	return &Recorder{settings: settings, epoch: epoch, Writer: jsonlines.New(f, recordQueue, "the record of requests", log)}, nil
}

// NewLostLines returns the metric of the lines that could not be written to the files
// of --record and --record-events.
func NewLostLines(files ...interface{ Lost() uint64 }) prometheus.Collector {
	return prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "kvrouter_record_lines_lost_total",
		Help: "Lines lost from the files of --record and --record-events because the disk was full or slow, or the file of events reached its " +
			"maximum size.",
	}, func() float64 {
		lost := uint64(0)
		for _, file := range files {
			lost += file.Lost()
		}
		return float64(lost)
	})
}

// NewWriteFailures returns the metric of the failed writes of files that are replaced as
// a whole: snapshot of --index-snapshot, state of --thompson-state.
func NewWriteFailures(snapshot, state func() uint64) prometheus.Collector {
	return writeFailures{
		desc: prometheus.NewDesc("kvrouter_file_write_failures_total",
			"Failed writes of a file that is replaced as a whole. The previous file is unchanged.", []string{"file"}, nil),
		counts: []func() uint64{snapshot, state},
	}
}

// writeFailures is the metric of NewWriteFailures.
type writeFailures struct {
	desc   *prometheus.Desc
	counts []func() uint64 // of writtenFiles
}

// writtenFiles are the values of its label.
var writtenFiles = [...]string{"index_snapshot", "thompson_state"}

// Describe implements prometheus.Collector.
func (w writeFailures) Describe(to chan<- *prometheus.Desc) { to <- w.desc }

// Collect implements prometheus.Collector.
func (w writeFailures) Collect(to chan<- prometheus.Metric) {
	for i, count := range w.counts {
		to <- prometheus.MustNewConstMetric(w.desc, prometheus.CounterValue, float64(count()), writtenFiles[i])
	}
}

// recordStart is the start of each line of a record.
const recordStart = `{"timestamp":`

// readEpoch returns the start of a record, computed from its first complete line; zero:
// it has none, or the file does not exist. It changes nothing.
func readEpoch(file string) (epoch time.Time, err error) {
	info, err := os.Lstat(file)
	if err != nil || !info.Mode().IsRegular() {
		return epoch, nil // jsonlines.Open reports the error
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
			return jsonlines.ErrStop
		case err != nil && jsonlines.Begins(text, recordStart): // torn, by itself or with the next one glued to it
			return nil
		}
		return fmt.Errorf("--record %s: the file is not a record of requests; choose another name", file)
	})
	return epoch, err
}

// Began implements openai.Observer.
func (r *Recorder) Began(*http.Request, *proxy.Exchange) {}

// Accepted implements openai.Observer.
func (r *Recorder) Accepted(*proxy.Exchange, *jsonbody.Body) {}

// Decided implements openai.Observer.
func (r *Recorder) Decided(*proxy.Exchange, *router.Pair) {}

// hashIDs returns the sequence hash of every full block of a prompt, its upper
// recordHashBits; known: there is something of it. Blocks have size tokens.
func (r *Recorder) hashIDs(request *router.Request, size int) (hashes []uint64, known bool) {
	if len(request.Tokens) == 0 && len(request.Local) == 0 {
		return nil, false
	}
	local := request.Local
	if len(request.Tokens) > 0 {
		local = request.Hashes(nil, size)
	}
	hashes = kv.SequenceHashes(make([]uint64, 0, len(local)), local)
	for i := range hashes {
		hashes[i] >>= 64 - recordHashBits
	}
	return hashes, true
}

// Finished implements openai.Observer: it records a finished request whose prompt
// was known, if it was for the default model: a record is a trace of one model. It
// never waits.
func (r *Recorder) Finished(x *proxy.Exchange, now time.Time) {
	if r == nil || x.Request == nil || !x.Default || x.Request.Text {
		return
	}
	size := cmp.Or(x.Decision.BlockSize, r.settings.BlockSize)
	hashes, known := r.hashIDs(x.Request, size)
	if !known {
		return
	}
	tokens := max(x.Request.NumTokens, len(x.Request.Tokens))
	line := RecordLine{
		InputLength: tokens, OutputLength: x.Usage.OutputTokens, HashIDs: hashes, HashBlockSize: size,
		Hints:   hints.Record(x.Request.Prefix),
		Arrived: x.Arrived, Route: x.Route, Status: x.Status, Policy: r.settings.Policy, Worker: x.Worker, Rank: x.Decision.Target.Key.Rank,
		CellWorker:      x.Below.Worker,
		PredictedTokens: x.Decision.OverlapTokens, DurationMS: milliseconds(now.Sub(x.Arrived)),
		DecisionMS:   milliseconds(x.Decision.HashTime + x.Decision.LookupTime + x.Decision.ScheduleTime),
		TokensSource: x.Source, PromptMismatch: x.Usage.Known && x.Usage.PromptTokens != tokens,
	}
	if r.settings.Decisions {
		line.Decisions = nameless(x.Receipts)
	}
	if x.Below.Worker != "" {
		line.CellTokens = &x.Below.Overlap
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

// Estimated sizes of parts of a line in memory, bytes; upper bounds.
const (
	lineMemory      = 1 << 10
	receiptMemory   = 1 << 10
	candidateMemory = 512
)

// memory returns the estimated memory of the line, bytes.
func (l *RecordLine) memory() int {
	size := lineMemory + 8*len(l.HashIDs)
	for _, receipt := range l.Decisions {
		size += receiptMemory + candidateMemory*len(receipt.Candidates)
	}
	return size
}

// nameless returns receipts without the client's names of its request and series, of
// which a record has at most hashes.
func nameless(receipts []*router.Receipt) (list []*router.Receipt) {
	for _, receipt := range receipts {
		without := *receipt
		without.RequestID, without.Series = "", ""
		list = append(list, &without)
	}
	return list
}

// Lost returns the number of lines lost so far.
func (r *Recorder) Lost() uint64 {
	if r == nil {
		return 0
	}
	return r.Writer.Lost()
}

// Close writes the remaining lines and closes the file.
func (r *Recorder) Close() {
	if r != nil {
		r.Writer.Close()
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
