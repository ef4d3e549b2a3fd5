package simulate

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Report is the result of a run. Times of requests start at the arrival at the
// router.
type Report struct {
	Source      string  `json:"source"`
	Policy      string  `json:"policy"`
	Approximate bool    `json:"no_kv_events"`
	Workers     int     `json:"workers"`
	Prefills    int     `json:"prefill_workers,omitempty"`
	Concurrency int     `json:"concurrency,omitempty"`
	Speedup     float64 `json:"speedup,omitempty"`
	EventLagMS  float64 `json:"event_lag_ms"`
	Seed        uint64  `json:"seed"`
	Requests    int     `json:"requests"`
	// Conversations equals Requests if no request follows another.
	Conversations int `json:"conversations"`
	// Reuse is the prompt tokens found cached, at every admission, over all prompt
	// tokens; Predicted is the router's prediction of the first admissions.
	Reuse           float64        `json:"reuse"`
	Predicted       float64        `json:"predicted_reuse"`
	PredictionError float64        `json:"prediction_error_tokens"` // mean |predicted − actual| of the first admissions
	Lower           *TierReport    `json:"lower_tiers,omitempty"`   // nil: the workers have none
	Adapters        *AdapterReport `json:"adapters,omitempty"`      // nil: no request has one
	Pairs           int            `json:"pairs,omitempty"`         // disaggregated requests
	MakespanS       float64        `json:"makespan_s"`
	OutputPerSec    float64        `json:"output_tokens_per_s"`
	TTFT            Distribution   `json:"ttft_ms"`
	ITL             Distribution   `json:"itl_ms"` // of the means of the requests, without answers of one token
	EndToEnd        Distribution   `json:"end_to_end_ms"`
	Balance         []WorkerReport `json:"balance"`

	Priority *Distribution  `json:"priority_ttft_ms,omitempty"` // of prioritized requests
	Tenants  []TenantReport `json:"tenants,omitempty"`          // in the order of --tenants
	Queue    *QueueReport   `json:"queue,omitempty"`            // of the routers; nil: no request was queued
	Lost     map[string]int `json:"lost,omitempty"`             // requests that ended with an error, by reason; all other fields exclude them
	Retries  int            `json:"retries,omitempty"`
	Denied   int            `json:"retries_denied,omitempty"` // retries denied by the budget
	Faults   []FaultReport  `json:"faults,omitempty"`
}

// WorkerReport is one worker's share of a run. Both workers of a pair count
// its request.
type WorkerReport struct {
	Worker   int     `json:"worker"`
	Role     string  `json:"role,omitempty"` // with disaggregation
	Requests int     `json:"requests"`
	Busy     float64 `json:"busy"`  // share of the makespan inside passes, 0..1
	Reuse    float64 `json:"reuse"` // share of its prompt tokens found cached
}

// Distribution summarizes measured values.
type Distribution struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// distribution sorts values and sums them up; none give zeros.
func distribution(values []float64) Distribution {
	if len(values) == 0 {
		return Distribution{}
	}
	slices.Sort(values)
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	at := func(q float64) float64 { // linear between the two nearest
		x := q * float64(len(values)-1)
		i := int(x)
		if i+1 == len(values) {
			return values[i]
		}
		return values[i] + (x-float64(i))*(values[i+1]-values[i])
	}
	return Distribution{Mean: sum / float64(len(values)), P50: at(0.5), P90: at(0.9), P99: at(0.99)}
}

// report sums up a finished run.
func (s *simulator) report() *Report {
	var ttft, itl, endToEnd, prior []float64
	prompts, cached := make([]int, s.Workers), make([]int, s.Workers)
	prompt, hit, predicted, wrong, output, pairs := 0, 0, 0, 0, 0, 0
	var last time.Duration
	for _, f := range s.ledger {
		ttft = append(ttft, milliseconds(f.first-f.simulated.asked))
		endToEnd = append(endToEnd, milliseconds(f.end-f.simulated.asked))
		if f.simulated.prior {
			prior = append(prior, milliseconds(f.first-f.simulated.asked))
		}
		if f.Output > 1 {
			itl = append(itl, milliseconds(f.end-f.first)/float64(f.Output-1))
		}
		prompts[f.worker] += f.Prompt
		cached[f.worker] += f.Reused
		prompt += f.Prompt
		computes := f // the leg that computes the prompt
		if f.prefill != nil {
			computes = f.prefill
			pairs++
			prompts[computes.worker] += f.Prompt
			cached[computes.worker] += computes.Reused
		}
		hit += computes.Reused
		predicted += computes.overlap
		wrong += max(computes.overlap-computes.Cached, computes.Cached-computes.overlap)
		output += f.Output
		last = max(last, f.end)
	}
	r := &Report{
		Source: s.Source, Policy: s.Policy, Approximate: s.Index.NoKVEvents || s.Index.HasTrees(s.Policy), Workers: s.Workers,
		Prefills: s.Prefills, Pairs: pairs, Concurrency: s.Concurrency, EventLagMS: milliseconds(s.EventLag), Seed: s.Seed,
		Requests: len(s.ledger), Conversations: len(s.Requests),
		Reuse:     float64(hit) / float64(prompt),
		Predicted: float64(predicted) / float64(prompt), PredictionError: float64(wrong) / float64(len(s.ledger)),
		MakespanS: last.Seconds(), OutputPerSec: float64(output) / last.Seconds(),
		TTFT: distribution(ttft), ITL: distribution(itl), EndToEnd: distribution(endToEnd),
	}
	r.Lower, r.Adapters = s.tierReport(), s.adapterReport()
	if s.Concurrency == 0 {
		r.Speedup = s.Speedup
	}
	if len(prior) > 0 {
		waits := distribution(prior)
		r.Priority = &waits
	}
	r.Tenants = s.tenantReports()
	if len(s.waits) > 0 {
		r.Queue = &QueueReport{Waited: len(s.waits), WaitMS: distribution(s.waits)}
	}
	if len(s.lost) > 0 {
		r.Lost = s.lost
	}
	r.Retries, r.Denied, r.Faults = s.retried, s.denied, s.faultReports()
	for w, worker := range s.workers {
		share := WorkerReport{Worker: w, Requests: worker.sent, Busy: worker.busy.Seconds() / last.Seconds(),
			Reuse: float64(cached[w]) / float64(max(1, prompts[w]))}
		if s.Prefills > 0 {
			share.Role = s.part(w).Role.String()
		}
		r.Balance = append(r.Balance, share)
	}
	return r
}

// writeReportsJSON writes one JSON object a line.
func writeReportsJSON[R any](out io.Writer, reports []R) error {
	encoder := json.NewEncoder(out)
	for _, r := range reports {
		if err := encoder.Encode(r); err != nil {
			return err
		}
	}
	return nil
}

// writeReports writes tables as text: one row a policy, then every worker's
// share.
func writeReports(out io.Writer, reports []*Report) error {
	first := reports[0]
	load := fmt.Sprintf("%d in flight", first.Concurrency)
	if first.Concurrency == 0 {
		load = fmt.Sprintf("own arrival times / %g", first.Speedup)
	}
	if first.Approximate {
		load += ", no KV events"
	}
	conversations := ""
	if first.Conversations < first.Requests {
		conversations = fmt.Sprintf(" in %d conversations", first.Conversations)
	}
	workers := fmt.Sprintf("%d workers", first.Workers)
	if first.Prefills > 0 {
		workers = fmt.Sprintf("%d prefill and %d decode workers", first.Prefills, first.Workers-first.Prefills)
	}
	fmt.Fprintf(out, "%s: %d requests%s, %s, %s, event lag %g ms, seed %d\n\n",
		first.Source, first.Requests, conversations, workers, load, first.EventLagMS, first.Seed)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table,
		"policy\treuse\tprediction error\tmakespan s\tout tok/s\tTTFT ms mean\tp50\tp90\tp99\tITL ms mean\tp50\tp90\tp99\te2e ms "+
			"mean\tp50\tp90\tp99\t")
	for _, r := range reports {
		fmt.Fprintf(table, "%s\t%.3f\t%.1f\t%.1f\t%.0f\t", r.Policy, r.Reuse, r.PredictionError, r.MakespanS, r.OutputPerSec)
		for _, d := range []Distribution{r.TTFT, r.ITL, r.EndToEnd} {
			fmt.Fprintf(table, "%.1f\t%.1f\t%.1f\t%.1f\t", d.Mean, d.P50, d.P90, d.P99)
		}
		fmt.Fprintln(table)
	}
	fmt.Fprintln(table)
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range reports {
		if r.Lower != nil {
			fmt.Fprintf(out, "%s: %.3f of the prompt tokens were loaded from host memory, %.3f from disk\n", r.Policy, r.Lower.Host, r.Lower.Disk)
			if r.Lower.Pulls > 0 {
				fmt.Fprintf(out, "%s: %.3f of the prompt tokens were pulled from other workers, by %d requests\n", r.Policy, r.Lower.Peer,
					r.Lower.Pulls)
			}
		}
		if r.Adapters != nil {
			fmt.Fprintf(out, "%s: %.1f loads of adapters per 1,000 requests, each adapter on %.2f workers\n", r.Policy, r.Adapters.Loads,
				r.Adapters.Spread)
		}
		r.writeTroubles(out)
	}
	writeTenants(table, reports)
	for _, r := range reports {
		row := func(name, format string, of func(WorkerReport) any) {
			fmt.Fprintf(table, "%s\t", name)
			for _, w := range r.Balance {
				fmt.Fprintf(table, format+"\t", of(w))
			}
			fmt.Fprintln(table)
		}
		row(r.Policy+": worker", "%d", func(w WorkerReport) any { return w.Worker })
		if r.Prefills > 0 {
			row("role", "%s", func(w WorkerReport) any { return w.Role })
		}
		row("requests", "%d", func(w WorkerReport) any { return w.Requests })
		row("busy", "%.2f", func(w WorkerReport) any { return w.Busy })
		row("reuse", "%.3f", func(w WorkerReport) any { return w.Reuse })
		fmt.Fprintln(table)
	}
	return table.Flush()
}

// writeTenants adds a row for each policy and group of tenants, where there are any.
func writeTenants(table io.Writer, reports []*Report) {
	if !slices.ContainsFunc(reports, func(r *Report) bool { return len(r.Tenants) > 0 }) {
		return
	}
	fmt.Fprintln(table,
		"policy\ttenants\tclass\tweight\trequests\tlost\tcomputed tok\tout tok\tTTFT ms mean\tp50\tp99\te2e ms mean\tp50\tp99\t")
	for _, r := range reports {
		for _, t := range r.Tenants {
			fmt.Fprintf(table, "%s\t%s*%d\t%s\t%g\t%d\t%d\t%d\t%d\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t%.1f\t\n", r.Policy, t.Tenant, t.Tenants, t.Class,
				t.Weight,
				t.Requests, t.Lost, t.Computed, t.Answered, t.TTFT.Mean, t.TTFT.P50, t.TTFT.P99, t.EndToEnd.Mean, t.EndToEnd.P50, t.EndToEnd.P99)
		}
	}
	fmt.Fprintln(table)
	writeObjectives(table, reports)
}

// writeObjectives adds a row for each policy and group of tenants with an objective, where there
// are any.
func writeObjectives(table io.Writer, reports []*Report) {
	titled := false
	for _, r := range reports {
		for _, t := range r.Tenants {
			o := t.Objective
			if o == nil {
				continue
			}
			if !titled {
				fmt.Fprintln(table, "policy\ttenants\tin time\tlate\tof all %\tshed\tshed late\tspared\tin time\tshed in vain %\t")
				titled = true
			}
			fmt.Fprintf(table, "%s\t%s*%d\t%d\t%d\t%.1f\t%d\t%d\t%d\t%d\t%.1f\t\n", r.Policy, t.Tenant, t.Tenants,
				o.Kept, o.Missed, 100*o.Goodput(t.Lost), o.Shed, o.ShedLate, o.Spared, o.SparedKept, 100*o.Wrong())
		}
	}
	if titled {
		fmt.Fprintln(table)
	}
}

// writeTroubles prints the queue, lost requests and faults, where there was
// any.
func (r *Report) writeTroubles(out io.Writer) {
	var text []string
	if r.Queue != nil {
		text = append(text, fmt.Sprintf("%d queued in the router, ms mean %.1f p50 %.1f p99 %.1f", r.Queue.Waited, r.Queue.WaitMS.Mean,
			r.Queue.WaitMS.P50, r.Queue.WaitMS.P99))
	}
	if r.Priority != nil {
		text = append(text, fmt.Sprintf("TTFT of prioritized requests, ms mean %.1f p99 %.1f", r.Priority.Mean, r.Priority.P99))
	}
	if len(r.Lost) > 0 {
		counts := []string{}
		for _, why := range slices.Sorted(maps.Keys(r.Lost)) {
			counts = append(counts, fmt.Sprintf("%d %s", r.Lost[why], why))
		}
		text = append(text, fmt.Sprintf("%.2f %% lost (%s)", 100*r.LostShare(), strings.Join(counts, ", ")))
	}
	if r.Retries+r.Denied > 0 {
		text = append(text, fmt.Sprintf("%d retries, %d denied", r.Retries, r.Denied))
	}
	for _, f := range r.Faults {
		line := fmt.Sprintf("worker %d %s at %g s: %d first attempts, %d attempts in all, %d requests lost", f.Worker, f.Kind, f.AtS, f.First,
			f.Attempts, f.Lost)
		if f.KnownS != nil {
			line += fmt.Sprintf(", ejected after %.2f s", *f.KnownS)
		}
		if f.BackS != nil {
			line += fmt.Sprintf(", readmitted %.2f s after its end", *f.BackS)
		}
		text = append(text, line)
	}
	if len(text) > 0 {
		fmt.Fprintf(out, "%s: %s\n\n", r.Policy, strings.Join(text, "; "))
	}
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
