package thompson

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"kvrouter/internal/base/jsonlines"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// traceFile is the name of the original's file in debug.trace_dir.
const traceFile = "router_traces.jsonl"

// OpenTraces makes the policy write traces to the file of its parameters. It returns
// nil if they do not enable traces. The caller closes the result.
func (p *Policy) OpenTraces(log *slog.Logger) (*jsonlines.Writer, error) {
	if !p.parameters.traces {
		return nil, nil
	}
	const flag = "debug.trace_dir"
	file := filepath.Join(p.traceDir, traceFile)
	if err := os.MkdirAll(p.traceDir, 0o700); err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	f, torn, err := jsonlines.Open(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", flag, err)
	}
	if torn > 0 {
		log.Warn("truncated an incomplete last line in the traces of policy thompson", "file", file, "bytes", torn)
	}
	p.trace = jsonlines.New(f, p.traceBuffer, "the traces of policy thompson", log)
	return p.trace, nil
}

// traceMemory is about the memory of a trace, and of each worker in it, bytes.
const traceMemory = 512

// traceHead is what all kinds of traces begin with, under the original's names.
type traceHead struct {
	TS       float64 `json:"ts"` // Unix time, s
	Kind     string  `json:"kind"`
	Decision string  `json:"decision_id"`
}

func newTraceHead(now time.Time, kind string, decision uint64) traceHead {
	return traceHead{TS: float64(now.UnixMicro()) / 1e6, Kind: kind, Decision: strconv.FormatUint(decision, 10)}
}

type traceDecision struct {
	traceHead
	Prefix  string                 `json:"prefix_id"`
	Chosen  string                 `json:"chosen"`
	Workers map[string]traceWorker `json:"workers"`
}

// traceWorker is a candidate of a decision.
type traceWorker struct {
	Score   float64 `json:"score"`
	Chance  float64 `json:"prob"`
	Decode  float64 `json:"decode_cost"`
	Prefill float64 `json:"prefill_cost"`
	IAT     float64 `json:"iat_factor"`
	Overlap float64 `json:"overlap"`
	Reuse   int     `json:"reuse_after"`
	Load    float64 `json:"load_mod"`
}

type traceFeedback struct {
	traceHead
	Worker    string  `json:"wid"`
	LatencyMS float64 `json:"latency_ms"`
	TokensOut int     `json:"tokens_out"`
	Metric    float64 `json:"metric"`
	PerToken  bool    `json:"per_tok"`
	Baseline  float64 `json:"baseline_used"`
	After     float64 `json:"baseline_after"`
	Reward    float64 `json:"reward"`
	Success   bool    `json:"success"`
	Finish    string  `json:"finish_reason"`
}

type traceTimeout struct {
	traceHead
	Worker     string  `json:"wid"`
	Reward     float64 `json:"reward"`
	Age        float64 `json:"age"` // s
	Prefix     string  `json:"prefix_id"`
	OSL        string  `json:"osl"`
	PrefillBin string  `json:"prefill_bin"`
}

// traceName names a worker; one of several ranks as worker.rank.
func traceName(key kv.WorkerKey) string {
	name := strconv.FormatUint(key.Worker, 10)
	if key.Rank > 0 {
		name += "." + strconv.FormatUint(uint64(key.Rank), 10)
	}
	return name
}

func (p *Policy) traceDecision(q policy.Query, t *requestTerms, chosen int) {
	if p.trace == nil {
		return
	}
	line := traceDecision{traceHead: newTraceHead(q.Now, "decision", q.Decision), Prefix: q.Prefix.ID, Chosen: traceName(p.choices[chosen].worker.key), Workers: map[string]traceWorker{}}
	for i := range p.choices {
		c := &p.choices[i]
		line.Workers[traceName(c.worker.key)] = traceWorker{
			Score: p.scores[i], Chance: p.chances[i], Decode: t.decode, Prefill: c.prefill, IAT: t.iat, Overlap: c.overlap, Reuse: t.reuse, Load: c.loadFactor,
		}
	}
	p.trace.Write(line, traceMemory*(1+len(line.Workers)))
}

func (p *Policy) traceFeedback(d *pendingDecision, f policy.Feedback, j *judgement) {
	if p.trace == nil {
		return
	}
	p.trace.Write(traceFeedback{
		traceHead: newTraceHead(f.Now, "feedback", f.Decision), Worker: traceName(d.worker), LatencyMS: milliseconds(f.Latency), TokensOut: f.TokensOut,
		Metric: j.metric, PerToken: j.perToken, Baseline: j.baseline, After: j.after, Reward: j.reward, Success: f.Ending == policy.Finished,
		Finish: traceFinish(f),
	}, traceMemory)
}

// maxTraceFinish bounds a finish reason from a client or an engine, bytes.
const maxTraceFinish = 64

// traceFinish is a feedback's finish reason; of a failure without one it is that
// of the original's processor.
func traceFinish(f policy.Feedback) string {
	if f.Finish == "" && f.Ending == policy.Failed {
		return "error"
	}
	return f.Finish[:min(len(f.Finish), maxTraceFinish)]
}

func (p *Policy) traceTimeout(d *pendingDecision, now time.Time) {
	if p.trace == nil {
		return
	}
	p.trace.Write(traceTimeout{
		traceHead: newTraceHead(now, "timeout", d.decision), Worker: traceName(d.worker), Reward: p.timeoutReward, Age: p.timeout.Seconds(),
		Prefix: d.series, OSL: hints.LevelNames[d.osl], PrefillBin: hints.LevelNames[d.bin],
	}, traceMemory)
}
