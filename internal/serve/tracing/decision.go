package tracing

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
)

// Bounds of a decision's attributes in a span.
const (
	maxTerms      = 16  // of the chosen worker's score
	maxCandidates = 16  // that are listed; the best go first
	maxCandidate  = 400 // bytes of each
)

// Decided adds a span for a choice that began at the given time and has ended now,
// with the explained decisions: one, or those of a prefill worker and of a decode
// worker. err is the reason why no worker was chosen.
func (q *Request) Decided(began time.Time, err error, decisions ...*router.Decision) {
	if !q.Sampled() {
		return
	}
	_, span := q.tracer.Start(q.ctx, "decision", trace.WithTimestamp(began))
	for _, d := range decisions {
		if d.Booking != nil || len(d.Receipts) > 0 {
			span.SetAttributes(decisionAttributes(d)...)
		}
	}
	if err != nil {
		fail(span, "refused", err)
	}
	span.End()
}

// decisionAttributes describe a decision. Those of a prompt's worker have a prefix of
// their own.
func decisionAttributes(d *router.Decision) []attribute.KeyValue {
	var receipt *router.Receipt
	if len(d.Receipts) > 0 {
		receipt = d.Receipts[len(d.Receipts)-1]
	}
	prefix := "kvrouter.decision."
	if receipt != nil && receipt.Leg == kv.LegPrefill {
		prefix += "prefill."
	}
	var list []attribute.KeyValue
	number := func(name string, value float64) { list = append(list, attribute.Float64(prefix+name, value)) }
	if d.Booking != nil {
		list = append(list, attribute.Int64(prefix+"worker", int64(d.Target.Key.Worker)),
			attribute.Int64(prefix+"rank", int64(d.Target.Key.Rank)),
			attribute.Int(prefix+"prompt_tokens", d.Tokens), attribute.Int(prefix+"predicted_tokens", d.OverlapTokens))
		if receipt != nil && receipt.WorkerName != "" {
			list = append(list, attribute.String(prefix+"worker_name", clip(receipt.WorkerName)))
		}
	}
	if d.QueueTime > 0 {
		number("queue_seconds", d.QueueTime.Seconds())
	}
	if receipt == nil {
		return list
	}
	list = append(list, attribute.String(prefix+"policy", receipt.Policy), attribute.String(prefix+"how", string(receipt.How)))
	if receipt.Rule != "" {
		list = append(list, attribute.String(prefix+"rule", receipt.Rule))
	}
	if receipt.Margin != nil {
		number("margin", *receipt.Margin)
	}
	if receipt.Ties > 0 {
		list = append(list, attribute.Int(prefix+"ties", receipt.Ties))
	}
	for name, set := range map[string]bool{"retry": receipt.Retry, "trial": receipt.Trial} {
		if set {
			list = append(list, attribute.Bool(prefix+name, true))
		}
	}
	chosen := func(c *router.ReceiptCandidate) bool {
		return receipt.Worker != nil && c.Worker == *receipt.Worker && c.Rank == receipt.Rank
	}
	best := make([]*router.ReceiptCandidate, len(receipt.Candidates))
	for i := range receipt.Candidates {
		best[i] = &receipt.Candidates[i]
	}
	slices.SortStableFunc(best, func(a, b *router.ReceiptCandidate) int {
		return cmp.Or(compareBool(chosen(b), chosen(a)), compareBool(a.Excluded != "", b.Excluded != ""),
			cmp.Compare(totalOf(b.Score), totalOf(a.Score)))
	})
	if len(best) > 0 && chosen(best[0]) && best[0].Score != nil {
		number("score", best[0].Total)
		for _, term := range best[0].Terms[:min(len(best[0].Terms), maxTerms)] {
			number("term."+term.Name, term.Value)
		}
	}
	if left := len(best) - maxCandidates; left > 0 {
		list = append(list, attribute.Int(prefix+"candidates_left_out", left))
		best = best[:maxCandidates]
	}
	lines := make([]string, len(best))
	for i, c := range best {
		lines[i] = candidateLine(c)
	}
	return append(list, attribute.StringSlice(prefix+"candidates", lines))
}

// candidateLine describes one candidate.
func candidateLine(c *router.ReceiptCandidate) string {
	line := "worker " + cmp.Or(c.WorkerName, strconv.FormatUint(c.Worker, 10))
	if c.Rank > 0 {
		line += fmt.Sprintf(" rank %d", c.Rank)
	}
	switch {
	case c.Excluded != "":
		line += ": " + c.Excluded
	case c.Score != nil:
		line += fmt.Sprintf(": %.6g", c.Total)
	}
	line += fmt.Sprintf(", overlap %d blocks, in flight %d, prefill %d tokens", c.Overlap, c.InFlight, c.PrefillTokens)
	return line[:min(len(line), maxCandidate)]
}

func totalOf(s *policy.Score) float64 {
	if s == nil {
		return 0
	}
	return s.Total
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}
