package policy

import (
	"math"
	"time"

	"kvrouter/internal/base/fair"
)

// CellReport is the report of a router whose workers are below it.
type CellReport struct {
	Workers int                              // ranks that are up, at least 1
	Waits   [len(fair.Classes)]time.Duration // predicted delay of a new request's first token, compared to an idle worker, by class
	Network time.Duration                    // measured: of a round trip
	Context int                              // Load.Context of all its workers together
	Load    Published
}

// MaxCellWorkers bounds CellReport.Workers.
const MaxCellWorkers = 1 << 16

// Cell is the known state of a router whose workers are below it. It gets requests and chooses the
// worker.
type Cell struct {
	CellReport
	finds runningMean // share of the reported overlap that its worker had
	late  runningMean // delay of first tokens beyond its prediction, ms

	lateSquares runningMean // of the same, squared
	again       time.Time   // from then on, one request at a time is a trial
	trials      int         // consecutive trials that were late
}

const (
	// cellFinds and cellLate bound the requests of the means Cell.finds and Cell.late: a cell that
	// reports too short waits is believed for some requests only.
	cellFinds, cellLate = 64, 16
	// mostLate bounds the sample of one request, ms.
	mostLate = 60_000
	// mostTrials bounds Cell.trials.
	mostTrials = 16
	// cellLooks is the number of longest-waiting prompts that are examined.
	cellLooks = 32
)

// Late learns from a first token at now, which was late by that time against FirstToken without
// Load.Lateness. A late cell gets no requests, and could never show that it has recovered: after a
// time equal to the delay, when an unreported queue should be empty, one request is a trial. If it
// is in time, the learned delay is discarded, else the next trial follows after twice the time.
func (c *Cell) Late(now time.Time, by time.Duration) {
	if c == nil {
		return
	}
	late := min(max(milliseconds(by), -mostLate), mostLate)
	switch trial := c.lateness() > 0 && !now.Before(c.again); {
	case trial && late > 0:
		c.trials = min(c.trials+1, mostTrials)
	case trial:
		c.late, c.lateSquares = runningMean{}, runningMean{}
	}
	c.late.count = min(c.late.count, cellLate-1)
	c.late.add(late)
	c.lateSquares.count = c.late.count - 1
	c.lateSquares.add(late * late)
	still := c.lateness()
	if still == 0 {
		c.trials = 0
	}
	c.again = now.Add(duration(min(still*math.Pow(2, float64(c.trials)), mostLate)))
}

// Lateness returns the expected delay of a cell's next first token beyond its prediction:
// Cell.Lateness, or 0 if it is time for a trial or it is no cell.
func (l *Load) Lateness(now time.Time) time.Duration {
	if l.Cell == nil || len(l.Prefills) == 0 && !now.Before(l.Cell.again) {
		return 0
	}
	return l.Cell.Lateness()
}

// Lateness returns the delay of first tokens beyond the cell's prediction: two standard errors below
// the mean, so that chance does not count.
func (c *Cell) Lateness() time.Duration { return duration(c.lateness()) }

func (c *Cell) lateness() float64 {
	if c.late.count == 0 {
		return 0
	}
	return max(0, c.late.Value-2*c.lateSpread()/math.Sqrt(float64(c.late.count)))
}

// lateSpread is the standard deviation of the delays that Late got, ms.
func (c *Cell) lateSpread() float64 {
	return math.Sqrt(max(0, c.lateSquares.Value-c.late.Value*c.late.Value))
}

// Found learns from a decision of the cell: how many tokens of a prompt its worker had, and how
// many the cell had reported for one of its workers.
func (c *Cell) Found(found, reported int) {
	if c != nil && reported > 0 {
		c.finds.count = min(c.finds.count, cellFinds-1)
		c.finds.add(min(max(float64(found)/float64(reported), 0), 1))
	}
}

// Finds returns the share of a reported overlap that is expected to be found.
func (c *Cell) Finds() float64 {
	if c.finds.count == 0 {
		return 1
	}
	return c.finds.Value
}

// width is the number of workers that share a load.
func (l *Load) width() float64 {
	if l.Cell == nil {
		return 1
	}
	return float64(max(1, l.Cell.Workers))
}

// each is the equal share of one worker in a part of the load, by which policies that count requests
// or blocks compare a cell with a worker.
func (l *Load) each(n int) float64 { return float64(n) / l.width() }

// cellWait predicts the wait of a request of that class in a cell, ms: the reported wait, less the
// time since the report, plus the later prompts divided by its workers. Later prompts are those sent
// less than a round trip before the report arrived. Lateness is added: the learned one, or that of
// prompts that wait now and are overdue by more than two standard deviations since the cell's last
// first token.
func (p *Work) cellWait(now time.Time, load *Load, class fair.Class) float64 {
	cell, sent := load.Cell, 0
	unseen := cell.Load.At.Add(-cell.Network)
	for i := len(load.Prefills) - 1; i >= 0 && load.Prefills[i].Sent.After(unseen); i-- {
		sent += load.Prefills[i].Tokens
	}
	reported := milliseconds(cell.Waits[class.Place()])
	wait := max(0, reported-milliseconds(now.Sub(cell.Load.At))) + p.Timing.Prefill(sent)/load.width() + milliseconds(load.Lateness(now))
	due, waiting, chance := 0.0, 0, 2*cell.lateSpread()
	for i := range load.Prefills[:min(len(load.Prefills), cellLooks)] {
		if prefill := &load.Prefills[i]; !prefill.AnsweredWhole {
			waiting++
			since := prefill.Sent
			if load.FirstToken.After(since) {
				since = load.FirstToken
			}
			due += max(0, milliseconds(now.Sub(since)-cell.Network-p.Alone(prefill.Tokens))-chance)
		}
	}
	return max(wait, due/float64(max(1, waiting)))
}

// cellTerms sets t, which is zero, to the parts of a cell's cost: those of one of its workers with an
// equal share of the cell's load, and the network.
func (p *Work) cellTerms(t *workTerms, q *Query, c *Candidate, u *workUsual) {
	load, width := c.Load, c.Load.width()
	cached := int(math.Round(float64(c.Overlap) * load.Cell.Finds()))
	uncached := max(1, q.Tokens-cached*q.BlockSize)
	own := p.Timing.Prefill(uncached)
	copied := min(own, p.Timing.Prefill(q.BlockSize)*p.reuse.others(cached))
	context := float64(load.Context()) / width
	first := p.cellWait(q.Now, load, q.Class) + milliseconds(p.Alone(uncached)) + p.Timing.Decoding(int(context))/2
	network := milliseconds(load.Cell.Network)
	t.first, t.copy, t.starts = u.f*first, u.f*p.Timing.withoutPasses(copied), first+network
	t.network, t.far = u.f*network, true
	t.later = u.f * u.delayed / width * (own - copied) * (first + q.Backlog/width - own/2)
	n := float64(load.requests()) / width
	t.decode = u.output * p.Timing.context * context
	t.others = n * (own - copied + p.Timing.Pass*float64(1+wholePasses(uncached)))
	t.slower = n * u.output / 2 * p.Timing.context * float64(max(1, q.Tokens))
}

// Narrowed is the outcome of one of the cell's workers, which share its load equally, without the
// network.
func (o Outcome) Narrowed(cell *Cell) Outcome {
	if cell == nil {
		return o
	}
	width := max(1, cell.Workers)
	o.FirstToken = max(0, o.FirstToken-cell.Network)
	for _, m := range []*Meanwhile{&o.Before, &o.During} {
		own := Meanwhile{}
		if m == &o.Before && m.Prompts > 0 {
			own = Meanwhile{Prompts: 1, Passes: 1, Tokens: min(o.Uncached, m.Tokens)}
		}
		m.Prompts, m.Passes, m.Tokens = own.Prompts+(m.Prompts-own.Prompts)/width, own.Passes+(m.Passes-own.Passes)/width,
			own.Tokens+(m.Tokens-own.Tokens)/width
	}
	// The answer's own context is not shared.
	prompt := min(float64(o.Prompt), o.During.Context)
	o.Before.Context /= float64(width)
	o.During.Context = prompt + (o.During.Context-prompt)/float64(width)
	return o
}
