package page

import (
	"net/http"
	"strconv"
	"sync"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
)

const (
	// maxRequests is the number of requests that are kept.
	maxRequests = 200
	// maxKept bounds the candidates that the receipts of these have together, of some
	// 500 bytes each; the oldest receipts go first.
	maxKept = 4000
	// maxDryRuns is how many receipts of dry runs are kept until they are fetched.
	maxDryRuns = 16
	// maxName bounds the texts of clients, bytes.
	maxName = 128
)

// requests holds the last requests.
type requests struct {
	mu     sync.Mutex // guards the rest
	kept   [maxRequests]entry
	next   uint64 // serial number of the next one; its place is that modulo maxRequests
	dry    [maxDryRuns]entry
	nextD  uint64
	weight int // candidates in the receipts
}

// entry is a request with its explanation.
type entry struct {
	Request
	arrived  time.Time
	receipts []*router.Receipt
	serial   uint64
}

// Began implements openai.Observer: it numbers an arriving request.
func (p *Journal) Began(_ *http.Request, x *proxy.Exchange) {
	r := p.requests
	r.mu.Lock()
	defer r.mu.Unlock()
	r.next++
	e := r.at(r.next)
	r.weight -= weigh(e.receipts)
	key := strconv.FormatInt(p.began.UnixMilli(), 36) + "-" + strconv.FormatUint(r.next, 10) // of this run of the router
	*e = entry{serial: r.next, arrived: x.Arrived, Request: Request{Key: key, ID: x.ID, At: unix(x.Arrived), Route: x.Route, End: EndRunning}}
	x.Serial = r.next
}

// at is the place of a serial number.
func (r *requests) at(serial uint64) *entry { return &r.kept[serial%maxRequests] }

// of returns a request that is still kept, else nil. The caller holds the lock.
func (r *requests) of(serial uint64) *entry {
	if e := r.at(serial); serial != 0 && e.serial == serial {
		return e
	}
	return nil
}

// Decided implements openai.Observer.
func (p *Journal) Decided(x *proxy.Exchange, pair *router.Pair) {
	p.requests.mu.Lock()
	defer p.requests.mu.Unlock()
	e := p.requests.of(x.Serial)
	if e == nil {
		return
	}
	d, prefill := &pair.Decode, &pair.Prefill
	worker := d.Target.Key.Worker
	names := p.models.Names()
	e.ID, e.Route = x.ID, x.Route // the body may name them
	e.Worker, e.WorkerName, e.Rank, e.Attempts = &worker, names.Name(worker), d.Target.Key.Rank, e.Attempts+1
	e.Model = limited(x.Model, maxName)
	e.CellWorker, e.CellPredicted = x.Below.Worker, x.Below.Overlap
	e.PromptTokens, e.Predicted, e.PrefillWorker = max(e.PromptTokens, d.Tokens), d.OverlapTokens, nil
	e.PrefillName = ""
	if prefill.Target.URL != "" {
		first := prefill.Target.Key.Worker
		e.PrefillName = names.Name(first)
		e.PrefillWorker, e.Predicted, e.PromptTokens = &first, prefill.OverlapTokens, max(e.PromptTokens, prefill.Tokens)
	}
}

// Finished implements openai.Observer.
func (p *Journal) Finished(x *proxy.Exchange, now time.Time) {
	r := p.requests
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.of(x.Serial)
	if e == nil {
		return
	}
	e.Status, e.End = x.Status, ending(x)
	e.Model = limited(x.Model, maxName)
	took := seconds(now.Sub(x.Arrived))
	e.Duration = &took
	if !x.FirstChunk.IsZero() {
		first := seconds(x.FirstChunk.Sub(x.Arrived))
		e.TTFT = &first
	}
	if x.Usage.Known {
		output := x.Usage.OutputTokens
		e.OutputTokens = &output
		e.PromptTokens = x.Usage.PromptTokens
		if x.Usage.CachedKnown {
			cached := x.Usage.CachedTokens
			e.Cached = &cached
		}
	}
	e.receipts = x.Receipts
	e.Explained = len(x.Receipts) > 0
	if e.Explained && x.Receipts[len(x.Receipts)-1].QueryOnly {
		r.nextD++
		r.dry[r.nextD%maxDryRuns] = *e
		*e = entry{}
		return
	}
	r.weight += weigh(e.receipts)
	for serial := r.next + 1; r.weight > maxKept && serial < r.next+maxRequests; serial++ {
		if old := r.at(serial); old != e {
			r.weight -= weigh(old.receipts)
			old.receipts, old.Explained = nil, false
		}
	}
}

// weigh counts the candidates of receipts.
func weigh(receipts []*router.Receipt) (candidates int) {
	for _, receipt := range receipts {
		candidates += 1 + len(receipt.Candidates)
	}
	return candidates
}

// ending says how a request ended.
func ending(x *proxy.Exchange) string {
	unanswered := x.Worker == kv.NoWorker || x.Worker == ""
	switch {
	case x.Status == proxy.ClientGone:
		return EndCancelled
	case x.Status >= http.StatusBadRequest && (unanswered || x.Status < http.StatusInternalServerError):
		return EndRefused
	case x.Status >= http.StatusBadRequest || x.Ending == policy.Failed:
		return EndFailed
	}
	return EndDone
}

// list returns the requests, the newest first.
func (r *requests) list() []Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := make([]Request, 0, maxRequests)
	for serial := r.next; serial > 0 && serial+maxRequests > r.next; serial-- {
		if e := r.at(serial); e.serial == serial {
			list = append(list, e.Request)
		}
	}
	return list
}

// receipt returns what explains a request, by its key or, of several the newest, by its
// id; not ok: it is gone.
func (r *requests) receipt(name string) (receipt Receipt, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var newest *entry
	for serial := r.next; serial > 0 && serial+maxRequests > r.next; serial-- {
		switch e := r.at(serial); {
		case e.serial != serial:
		case e.Key == name:
			return e.receipt(), true
		case e.ID == name && newest == nil:
			newest = e
		}
	}
	for i := range r.dry {
		if e := &r.dry[i]; newest == nil && e.serial != 0 && e.ID == name {
			newest = e
		}
	}
	if newest == nil {
		return Receipt{}, false
	}
	return newest.receipt(), true
}

func (e *entry) receipt() Receipt {
	receipt := Receipt{Request: e.Request}
	if last := len(e.receipts) - 1; last >= 0 {
		receipt.Decision, receipt.Second = decision(e.receipts[last]), second(e.receipts[last])
		for _, earlier := range e.receipts[:last] {
			receipt.Earlier = append(receipt.Earlier, decision(earlier))
		}
	}
	return receipt
}

// decision is a receipt as the dashboard shows it.
func decision(r *router.Receipt) *Decision {
	d := &Decision{Receipt: r, Worker: r.Worker, Candidates: make([]Candidate, len(r.Candidates))}
	for i, c := range r.Candidates {
		d.Candidates[i] = Candidate{c.Worker, c}
	}
	return d
}

// second returns the best of the candidates that were not chosen, but could be.
func second(r *router.Receipt) (place *Place) {
	best := 0.0
	for i := range r.Candidates {
		c := &r.Candidates[i]
		chosen := r.Worker != nil && c.Worker == *r.Worker && c.Rank == r.Rank
		if chosen || c.Score == nil || c.Excluded != "" || place != nil && c.Total <= best {
			continue
		}
		place, best = &Place{c.Worker, c.Rank}, c.Total
	}
	return place
}

// seconds is a duration in seconds, rounded to a microsecond.
func seconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1e6 }

// unix is a time in Unix seconds, rounded to a millisecond.
func unix(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return float64(t.UnixMilli()) / 1e3
}
