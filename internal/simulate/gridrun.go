package simulate

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
)

// gridRun is one run of a grid.
type gridRun struct {
	simulation Simulation // but for its requests
	requests   func() ([]TraceRequest, error)
	row        *gridRow
	to         *gridFigures
}

// run does all runs of the grid, jobs at a time (0: as many as there are cores), and
// writes the table of each row once it and all before it have ended, then the sums.
// Known results are taken over, except of the policy at place of.
func (g *grid) run(base Simulation, known gridTable, of, jobs int, out, progress io.Writer) error {
	runs := g.plan(base, known, of)
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	group, failed := errgroup.WithContext(ctx)
	var next atomic.Int64
	for range min(len(runs), cmp.Or(jobs, runtime.GOMAXPROCS(0))) {
		group.Go(func() error { // ends when none is left, or stop is called
			for at := next.Add(1) - 1; at < int64(len(runs)) && failed.Err() == nil; at = next.Add(1) - 1 {
				if err := runs[at].do(); err != nil {
					return err
				}
				runs[at] = gridRun{} // frees its requests
			}
			return nil
		})
	}
	began := time.Now()
	report := gridReport{grid: g, of: of, out: out}
	for i, row := range g.rows {
		select {
		case <-row.done:
		case <-failed.Done():
			return group.Wait()
		}
		fmt.Fprintf(progress, "%d of %d loads after %s: %s\n", i+1, len(g.rows), time.Since(began).Round(100*time.Millisecond), row.load.text)
		if err := report.row(row); err != nil {
			stop()
			return cmp.Or(group.Wait(), err)
		}
	}
	return cmp.Or(group.Wait(), report.sums())
}

// plan returns the runs still to do, and takes over known results.
func (g *grid) plan(base Simulation, known gridTable, of int) (runs []gridRun) {
	for _, row := range g.rows {
		row.done, row.figures = make(chan struct{}), make([][]gridFigures, len(g.policies))
		seeds := row.load.seeds
		if len(seeds) == 0 {
			seeds = []uint64{base.Seed}
		}
		before := len(runs)
		for at, seed := range seeds {
			simulation := row.load.on(base, seed)
			requests := sync.OnceValues(func() ([]TraceRequest, error) { return row.load.requests(seed, simulation.Engine) })
			if row.load.trace != "" {
				requests = g.traces[row.load.trace]
			}
			requests = row.load.assigned(requests, seed)
			for i, policy := range g.policies {
				if figures, ok := known[gridKey{row.load.text, policy.Label}]; ok && i != of {
					row.figures[i] = []gridFigures{figures}
					continue
				}
				if at == 0 {
					row.figures[i] = make([]gridFigures, len(seeds))
				}
				simulation.Policy, simulation.Scoring, simulation.Index = policy.Name, policy.Scoring, policy.Index
				simulation.Routing, simulation.Retry = policy.Routing, policy.Retry
				simulation.WithoutHints = base.WithoutHints || !policy.SyntheticHints
				simulation.UnpublishedTiers = base.UnpublishedTiers || !policy.TierEvents
				simulation.WithoutPulls = base.WithoutPulls || !policy.Pulls
				runs = append(runs, gridRun{simulation: simulation, requests: requests, row: row, to: &row.figures[i][at]})
			}
		}
		row.left.Store(int32(len(runs) - before))
		if len(runs) == before {
			close(row.done)
		}
	}
	return runs
}

// do does the run.
func (r *gridRun) do() error {
	began := time.Now()
	var err error
	if r.simulation.Requests, err = r.requests(); err != nil {
		return fmt.Errorf("load %s: %w", r.row.load.text, err)
	}
	report, err := r.simulation.Run()
	if err != nil {
		return fmt.Errorf("load %s, policy %s: %w", r.row.load.text, r.simulation.Policy, err)
	}
	*r.to = figuresOf(report)
	r.to.Seconds = time.Since(began).Seconds()
	if r.row.left.Add(-1) == 0 {
		close(r.row.done)
	}
	return nil
}
