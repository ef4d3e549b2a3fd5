package router

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/prompt/hints"
)

// Bounds of the receipts that are kept; the oldest go first.
const (
	// MaxReceipts is the maximum number of them.
	MaxReceipts = 1000
	// maxReceiptCandidates is how many candidates they have together, of some 500
	// bytes each.
	maxReceiptCandidates = 32_000
	// maxReceiptText bounds each text of a client's in one, bytes.
	maxReceiptText = 256
	// receiptsWanted is how long decisions are explained after a request for receipts.
	receiptsWanted = time.Minute
)

// Receipt explains one decision. It contains nothing of the prompt and never
// changes.
type Receipt struct {
	At        time.Time `json:"at"`
	RequestID string    `json:"request_id,omitempty"` // of its booking, if the caller gave one
	Model     string    `json:"model,omitempty"`
	Series    string    `json:"prefix_id,omitempty"`
	Session   string    `json:"session,omitempty"` // result for its session: new, kept, moved; empty: no session
	Leg       kv.Leg    `json:"leg"`
	Tokens    int       `json:"tokens"`     // of the prompt; 0: unknown
	Blocks    int       `json:"blocks"`     // full ones of it
	BlockSize int       `json:"block_size"` // tokens of the blocks that are counted here
	QueryOnly bool      `json:"query_only,omitempty"`
	Retry     bool      `json:"retry,omitempty"` // the request has failed on another worker before
	Trial     bool      `json:"trial,omitempty"` // it is the trial request of an ejected worker
	policy.Explanation
	Worker     *uint64            `json:"worker_id"` // the chosen worker; null: none
	WorkerName string             `json:"worker_name,omitempty"`
	Rank       uint32             `json:"dp_rank"`
	Margin     *float64           `json:"margin"`         // to the best of the others; null: there was no other
	Ties       int                `json:"ties,omitempty"` // number of candidates with the best score, if several; one was chosen at random
	Error      string             `json:"error,omitempty"`
	Candidates []ReceiptCandidate `json:"candidates"` // every worker that is up, by key
}

// ReceiptCandidate is the state of a worker at a decision.
type ReceiptCandidate struct {
	Worker     uint64 `json:"worker_id"`
	WorkerName string `json:"worker_name,omitempty"`
	Rank       uint32 `json:"dp_rank"`
	// Known is how the worker's KV cache is known; empty: exactly.
	Known   kv.Knowledge `json:"known,omitzero"`
	Overlap int          `json:"overlap_blocks"` // on its device, by the policy's reckoning
	// Host, Disk and External are the blocks that continue them in lower tiers; Doubtful:
	// these may have been emptied.
	Host     int  `json:"host_blocks,omitempty"`
	Disk     int  `json:"disk_blocks,omitempty"`
	External int  `json:"external_blocks,omitempty"`
	Doubtful bool `json:"doubtful,omitempty"`
	// Held is the number of leading blocks in the worker's first KV-cache group, and
	// LimitedBy the engine's number of the group that accepts fewer; nil: none does.
	Held          int      `json:"held_blocks,omitempty"`
	LimitedBy     *int     `json:"limited_by_group,omitempty"`
	NewBlocks     int      `json:"new_blocks"`
	InFlight      int      `json:"in_flight"`
	PrefillTokens int      `json:"prefill_tokens"`
	ActiveBlocks  int      `json:"active_blocks"`
	Waiting       *int     `json:"waiting"`            // as published; null: no recent value
	KVUsage       *float64 `json:"kv_usage"`           // the same
	Excluded      string   `json:"excluded,omitempty"` // why it could not be chosen: an exclusion, or the policy's reason
	*policy.Score          // nil: it was not weighed
}

// Receipts explains decisions, while that is wanted, and keeps the last receipts. router.mu guards it.
type Receipts struct {
	router     *Router
	asked      time.Time  // time of the last request for them; zero: never
	kept       []*Receipt // the oldest first
	candidates int        // that they have together
}

// keep adds a receipt.
func (k *Receipts) keep(receipt *Receipt) {
	k.kept = append(k.kept, receipt)
	k.candidates += len(receipt.Candidates)
	for len(k.kept) > MaxReceipts || k.candidates > maxReceiptCandidates && len(k.kept) > 1 {
		k.candidates -= len(k.kept[0].Candidates)
		k.kept[0] = nil
		k.kept = k.kept[1:]
	}
}

// Last returns the receipts of the last decisions, at most so many, newest first,
// and whether decisions were explained before this call. A call enables
// explanations for a minute.
func (k *Receipts) Last(most int) (list []*Receipt, explained bool) {
	k.router.mu.Lock()
	defer k.router.mu.Unlock()
	now := k.router.now()
	explained = k.wanted(now)
	k.asked = now
	list = slices.Clone(k.kept[max(0, len(k.kept)-max(0, most)):])
	slices.Reverse(list)
	return list, explained
}

// wanted reports whether decisions are explained now.
func (k *Receipts) wanted(now time.Time) bool {
	return k.router.settings.RecordDecisions || k.logs() || !k.asked.IsZero() && now.Sub(k.asked) < receiptsWanted
}

// logs reports whether each decision gets a line in the log.
func (k *Receipts) logs() bool {
	level := slog.LevelDebug
	if k.router.decider.traits.Logged {
		level = slog.LevelInfo
	}
	return k.router.log != nil && k.router.log.Enabled(context.Background(), level)
}

// explain returns the receipt of the decision for a candidate, before it is booked,
// and keeps it.
func (k *Receipts) explain(p *prompt, e *policy.Explanation, chosen int, now time.Time) *Receipt {
	r := k.router
	target := r.decider.candidates[chosen].Target
	receipt := k.begin(p, now)
	worker := target.Key.Worker // a copy: r.decider.candidates is reused
	receipt.Worker, receipt.WorkerName, receipt.Rank = &worker, r.names.Name(worker), target.Key.Rank
	if _, due := r.Health.outliers.TrialDue(target.Key, now); due && !p.QueryOnly && !p.ChooseOnly {
		receipt.Trial = true
	}
	if winners := e.Winners(); len(winners) > 1 {
		receipt.Ties = len(winners)
	}
	receipt.Explanation, receipt.Margin = *e, e.Margin(chosen)
	receipt.Scores = nil // each candidate has its own
	receipt.Candidates = k.workers(p, r.decider.candidates, e.Scores, receipt.Trial, now)
	k.keep(receipt)
	return receipt
}

// refuse is explain for a request that no worker could get.
func (k *Receipts) refuse(p *prompt, d *Decision, err error, now time.Time) {
	if !p.Explain && !k.wanted(now) {
		return
	}
	receipt := k.begin(p, now)
	receipt.Error = err.Error()
	receipt.Candidates = k.workers(p, nil, nil, false, now)
	k.keep(receipt)
	d.Receipts = []*Receipt{receipt}
}

// begin returns a receipt that says what was asked.
func (k *Receipts) begin(p *prompt, now time.Time) *Receipt {
	return &Receipt{
		At: now, RequestID: receiptText(p.ID), Model: receiptText(p.Model), Series: receiptText(p.Prefix.ID),
		Session: p.sessionGoes, Leg: p.Leg, Tokens: p.tokens, Blocks: p.tokens / p.unit, BlockSize: p.unit,
		QueryOnly: p.QueryOnly, Retry: len(p.Exclude) > 0,
	}
}

// receiptText is a copy of at most maxReceiptText bytes of a client's text: what it is
// a part of need not be kept.
func receiptText(text string) string {
	return strings.ToValidUTF8(strings.Clone(text[:min(len(text), maxReceiptText)]), "")
}

// workers are those that are up: the candidates, which are in their order, with their scores, the
// others with why they are none.
func (k *Receipts) workers(p *prompt, candidates []policy.Candidate, scores []policy.Score, trial bool, now time.Time) []ReceiptCandidate {
	r := k.router
	list := make([]ReceiptCandidate, len(r.fleet.targets))
	for i := range r.fleet.targets {
		var none policy.Candidate
		c, ok := &none, len(candidates) > 0 && candidates[0].Target.Key == r.fleet.targets[i].Key
		if ok {
			c, candidates = &candidates[0], candidates[1:]
		} else {
			r.decider.candidate(c, p, i)
		}
		list[i] = k.candidate(p, c)
		switch {
		case !ok:
			list[i].Excluded = k.exclusion(p, c, i, trial, now).String()
		case len(scores) > 0:
			list[i].Score, list[i].Excluded, scores = &scores[0], scores[0].Excluded, scores[1:]
		}
	}
	return list
}

// candidate is the line of a worker.
func (k *Receipts) candidate(p *prompt, c *policy.Candidate) ReceiptCandidate {
	key := c.Target.Key
	line := ReceiptCandidate{
		Worker: key.Worker, WorkerName: k.router.names.Name(key.Worker), Rank: key.Rank, Known: c.Target.Known,
		Overlap: c.Overlap, Host: int(c.Lower.Host), Disk: int(c.Lower.Disk), External: int(c.Lower.External),
		Doubtful: c.Doubtful && c.Lower != (kv.LowerBlocks{}), NewBlocks: c.NewBlocks,
		InFlight: c.Load.InFlight, PrefillTokens: c.Load.PrefillTokens, ActiveBlocks: c.Load.ActiveBlocks,
	}
	if i := slices.IndexFunc(p.matches, func(m kv.Match) bool { return m.Worker == c.Target.Key && m.Held > 0 }); i >= 0 {
		limit := int(p.matches[i].Limit)
		line.Held, line.LimitedBy = int(p.matches[i].Held), &limit
	}
	if c.Load.Fresh {
		waiting, usage := c.Load.Waiting, policy.Finite(c.Load.KVUsage)
		line.Waiting, line.KVUsage = &waiting, &usage
	}
	return line
}

// exclusion returns why the worker at that place, as c, is no candidate for p; trial: because
// another one is on trial.
func (k *Receipts) exclusion(p *prompt, c *policy.Candidate, at int, trial bool, now time.Time) exclusion {
	if p.Pinned != nil && *p.Pinned != c.Target.Key { // whatever else it is
		return excludedPinned
	}
	if why := k.router.excludes(p, at, now); why != 0 {
		return why
	}
	switch {
	case p.stays:
		return excludedSession
	case trial:
		return excludedTrial
	case k.router.Health.outliers.IsBack(c.Target.Key, now):
		return excludedSlowStart
	case p.seated && !hasSeat(c.Load):
		return excludedFull
	case p.keeps:
		return excludedObjective
	}
	return excludedFailing
}

// log writes a line for each receipt, and for policy thompson those of the
// NeMo Agent Toolkit's processor. The caller does not hold the lock.
func (k *Receipts) log(p *prompt, list []*Receipt) {
	if len(list) == 0 || !k.logs() {
		return
	}
	log := k.router.log
	for _, receipt := range list {
		if receipt.Reuse != nil {
			log.Info("Processing request", "prefix", cmp.Or(receipt.Series, "auto-"+receipt.RequestID), "total", max(1, p.Prefix.Total),
				"osl", hints.LevelNames[p.Prefix.OSL], "iat", hints.LevelNames[p.Prefix.IAT], "tokens", receipt.Tokens)
			log.Info("Routing decision", "worker", *receipt.Worker, "decision", receipt.Decision, "reuse_budget", *receipt.Reuse)
		}
		if !log.Enabled(context.Background(), slog.LevelDebug) {
			continue
		}
		text, err := json.Marshal(receipt)
		if err != nil {
			log.Debug("failed to encode a decision", "error", err)
			continue
		}
		log.Debug("decision", "receipt", json.RawMessage(text))
	}
}
