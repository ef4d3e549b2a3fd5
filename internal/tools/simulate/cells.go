package simulate

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"kvrouter/internal/cache/summary"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/cells"
)

// CellSettings are the flags of a simulated day of several cells.
type CellSettings struct {
	Cells      int           `group:"Simulated cells" default:"0" placeholder:"N" help:"Simulate a day of N cells with --workers each, and compare ways to choose the cell, instead of replaying a trace. The --synthetic flags give the shape of the conversations. See docs/simulation.md."`
	RTTMatrix  string        `group:"Simulated cells" name:"rtt-matrix" placeholder:"FILE" help:"Regions of --cells and their users. A line is the name of a region, the hours of its local time ahead of UTC, and the round-trip time to each region in the order of the lines, ms. Cell i is in region i modulo their number."`
	Placements []string      `group:"Simulated cells" default:"exact,summary,nearest,hash,round-robin,aggregates" placeholder:"NAME" help:"Comma-separated ways to choose the cell: exact (one global index of all workers), summary (policy work with the summaries of cells), nearest, hash (consistent hashing of the first blocks, bounded loads), round-robin, aggregates (queue and KV-cache use of cells)."`
	Day        time.Duration `group:"Simulated cells" default:"1m" help:"Virtual length of the day. Engines, networks and users keep their speed."`
	DayLoad    float64       `group:"Simulated cells" default:"0.15" placeholder:"N" help:"Mean requests per second and worker."`
	DaySwing   float64       `group:"Simulated cells" default:"0.8" help:"Amplitude of a region's daily request curve, as a share of its mean, 0 to 1."`
	Travel     float64       `group:"Simulated cells" default:"0.05" help:"Share of the conversations that move to another region, 0 to 1."`
}

// cellPolicy chooses the worker in each cell, and with placeSummary the cell.
const cellPolicy = "work"

// Ways to choose a cell.
const (
	placeExact      = "exact"
	placeSummary    = "summary"
	placeNearest    = "nearest"
	placeHash       = "hash"
	placeTurns      = "round-robin"
	placeAggregates = "aggregates"
)

var placements = []string{placeExact, placeSummary, placeNearest, placeHash, placeTurns, placeAggregates}

const (
	// maxCells bounds --cells.
	maxCells = 256
	// maxDay is the most requests of a day.
	maxDay = 20_000_000
)

// validateCells checks the settings of a day of cells; its errors name the flag.
func (s Settings) validateCells() error {
	switch {
	case s.Cells < 0 || s.Cells > maxCells:
		return fmt.Errorf("--cells %d: give 1 to %d", s.Cells, maxCells)
	case s.RTTMatrix == "":
		return errors.New("--cells needs --rtt-matrix FILE, such as testdata/rtt/regions.txt")
	case s.Trace != "" || s.Synthetic != "" || s.Concurrency != 0 || s.Speedup != 0 || len(s.Tenants) > 0 ||
		len(s.Faults) > 0 || s.PriorityShare != 0:
		return errors.New("--cells makes up its own requests: leave out --trace, --synthetic, --concurrency, --speedup, " +
			"--tenants, --faults and --priority-share")
	case s.EventLag != 0 || s.RoundTrip != 0 || s.Routers != 1 || s.UntoldCache:
		return errors.New("--cells simulates one router a cell, with --rtt-matrix between cells: leave out --event-lag, --round-trip, " +
			"--routers and --untold-cache")
	case s.Shape.Rate != 0 || s.Shape.Adapters != 0 || s.Shape.Shifts != 0 || s.Shape.Burst != 0:
		return errors.New("--cells has its own rate (--day-load): leave out --synthetic-rate, -adapters, -shifts and -burst")
	case s.Day < time.Second || s.Day > 24*time.Hour:
		return fmt.Errorf("--day %v: give 1s to 24h", s.Day)
	case !(s.DayLoad > 0 && s.DayLoad <= 1000):
		return fmt.Errorf("--day-load %v: give more than 0 and at most 1000 requests per second and worker", s.DayLoad)
	case !(s.DaySwing >= 0 && s.DaySwing <= 1) || !(s.Travel >= 0 && s.Travel <= 1):
		return fmt.Errorf("--day-swing %v, --travel %v: give shares from 0 to 1", s.DaySwing, s.Travel)
	case len(s.Placements) == 0:
		return fmt.Errorf("--placements: give some of %s", strings.Join(placements, ", "))
	}
	for _, name := range s.Placements {
		if !slices.Contains(placements, name) {
			return fmt.Errorf("--placements %s: give some of %s", name, strings.Join(placements, ", "))
		}
	}
	return s.Shape.validate()
}

// runCells simulates the day once with each placement.
func (s Settings) runCells(base Simulation, names []string, out, progress *os.File) error {
	regions, err := readRegions(s.RTTMatrix)
	if err != nil {
		return err
	}
	var reports []*CellReport
	day, err := s.day(base, regions, names)
	if err != nil {
		return err
	}
	for _, name := range s.Placements {
		began := time.Now()
		day.progress = progressBar(progress, name, day.total)
		report, err := day.run(name)
		if err != nil {
			return fmt.Errorf("simulation of placement %s: %w", name, err)
		}
		fmt.Fprintf(progress, "%s: %d requests in %.1f s\n", name, report.Requests, time.Since(began).Seconds())
		reports = append(reports, report)
	}
	if s.JSON {
		return writeReportsJSON(out, reports)
	}
	return day.write(out, reports)
}

// day returns a day's traffic, before any of it has been simulated.
func (s Settings) day(base Simulation, regions []region, names []string) (*cellDay, error) {
	switch {
	case base.Prefills > 0 || len(base.Tiers) > 0 || base.Routing.Queues() || base.Routing.BusyThresholds.Set():
		return nil, errors.New("--cells simulates neither disaggregation, tiers below the cache, the router's queue nor busy thresholds: " +
			"leave out --prefill-workers, --mock host-blocks and disk-blocks, --router-queue-threshold and the --active thresholds")
	case len(names) != 1 || names[0] != cellPolicy:
		return nil, errors.New("--cells compares ways to choose a cell, and policy work chooses the worker: leave out --policy")
	}
	workers := s.Cells * base.Workers
	rate := s.DayLoad * float64(workers)
	if rate*s.Day.Seconds() > maxDay {
		return nil, fmt.Errorf("--day %v and --day-load %v of %d workers are more than %d requests", s.Day, s.DayLoad, workers, maxDay)
	}
	starts, err := s.traffic(s.Shape, regions, rate/s.Shape.Turns, base.Seed, base.Engine.Blocks*base.Engine.BlockSize)
	if err != nil {
		return nil, err
	}
	d := &cellDay{CellSettings: s.CellSettings, base: base, regions: regions, starts: starts}
	for i := range starts {
		moved := false
		for r := &starts[i]; r != nil; r = r.next {
			d.total++
			moved = moved || r.origin != starts[i].origin
		}
		if moved {
			d.travels++
		}
	}
	return d, nil
}

// cellDay is a day of several cells, which placements are compared on.
type cellDay struct {
	CellSettings
	base     Simulation
	regions  []region
	starts   []dayRequest // first turns, in order
	total    int          // requests
	travels  int          // conversations that move to another region
	progress func(done int)
}

// rtt returns the time of a round trip from a region to a cell.
func (d *cellDay) rtt(origin, cell int) time.Duration {
	return d.regions[origin].rtts[cell%len(d.regions)]
}

// CellReport is the result of a day with one placement. Times are as clients see them.
type CellReport struct {
	Placement string         `json:"placement"`
	Cells     int            `json:"cells"`
	Workers   int            `json:"workers"` // of a cell
	Seed      uint64         `json:"seed"`
	Requests  int            `json:"requests"`
	DayS      float64        `json:"day_s"`
	HitRate   float64        `json:"hit_rate"` // prompt tokens found cached over all prompt tokens
	TTFT      Distribution   `json:"ttft_ms"`
	EndToEnd  Distribution   `json:"end_to_end_ms"`
	NetworkMS float64        `json:"network_ms"` // mean round trip to the cell
	Nearest   float64        `json:"nearest"`    // share of the requests in a cell that is nearest to the client
	Busiest   float64        `json:"busiest"`    // requests of the cell with the most, over their mean
	Summary   *SummaryReport `json:"summary,omitempty"`
}

// SummaryReport is what the summaries of cells cost, and how true they were. Bytes are those to
// one reader.
type SummaryReport struct {
	Operations     float64 `json:"operations_per_s"`     // blocks stored and removed, mean of a cell
	PeakOperations float64 `json:"peak_operations"`      // most of a cell in a second
	Bytes          float64 `json:"bytes_per_s"`          // of changes and states, mean of a cell
	PeakBytes      float64 `json:"peak_bytes"`           // most of a cell in a second
	PerOperation   float64 `json:"bytes_per_operation"`  // of changes
	Snapshots      int     `json:"snapshots"`            // because a filter has grown
	SnapshotBytes  int     `json:"snapshot_bytes"`       // of them all
	Probes         int     `json:"probes"`               // hashes that no worker ever had
	FalsePositives float64 `json:"false_positives"`      // share of them that a summary seemed to hold
	Stated         float64 `json:"false_positive_bound"` // summary.FalsePositive
	// Stale and Untold compare the reported leading blocks of a prompt with those that the cell
	// had: those that were gone, and those not yet reported, over those that it had.
	Stale  float64 `json:"stale"`
	Untold float64 `json:"untold"`
}

// write writes a table, and what the summaries were.
func (d *cellDay) write(out io.Writer, reports []*CellReport) error {
	first := reports[0]
	fmt.Fprintf(out, "%d cells of %d workers, %d regions, a day of %v: %d requests in %d conversations, %d of which travel, seed %d\n\n",
		first.Cells, first.Workers, len(d.regions), d.Day, d.total, len(d.starts), d.travels, first.Seed)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "placement\thit rate\tof "+first.Placement+"\tTTFT ms mean\tof "+first.Placement+
		"\tp50\tp90\tp99\te2e ms mean\tnetwork ms\tnearest\tbusiest cell\t")
	for _, r := range reports {
		fmt.Fprintf(table, "%s\t%.3f\t%.3f\t%.1f\t%.3f\t%.1f\t%.1f\t%.1f\t%.0f\t%.1f\t%.2f\t%.2f\t\n", r.Placement, r.HitRate,
			r.HitRate/first.HitRate,
			r.TTFT.Mean, r.TTFT.Mean/first.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99, r.EndToEnd.Mean, r.NetworkMS, r.Nearest, r.Busiest)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for _, r := range reports {
		if s := r.Summary; s != nil {
			fmt.Fprintf(out,
				"\n%s: %.0f block operations a second of a cell (most %.0f), %.0f bytes a second to a reader (most %.0f): %.2f bytes an operation, "+
					"%.3f MB/s at 100,000; %d snapshots of %.2f MB together\n",
				r.Placement, s.Operations, s.PeakOperations, s.Bytes, s.PeakBytes, s.PerOperation, s.PerOperation/10, s.Snapshots,
				float64(s.SnapshotBytes)/1e6)
			fmt.Fprintf(out,
				"%s: false positives %.4f %% of %d hashes that no worker had (stated: at most %.4f %%); stale %.2f %%, not yet reported %.2f %% of "+
					"the cached blocks of prompts\n",
				r.Placement, 100*s.FalsePositives, s.Probes, 100*s.Stated, 100*s.Stale, 100*s.Untold)
		}
	}
	return nil
}

// report sums up a finished run.
func (s *cellRun) report() *CellReport {
	var ttft, endToEnd []float64
	prompt, hit, nearest, network := 0, 0, 0, time.Duration(0)
	sent := make([]int, s.Cells)
	for _, t := range s.ledger {
		ttft = append(ttft, milliseconds(t.first-t.asked))
		endToEnd = append(endToEnd, milliseconds(t.end-t.asked))
		prompt += t.prompt
		hit += t.reused
		sent[t.cell]++
		rtt := s.rtt(t.origin, t.cell)
		network += rtt
		if rtt == s.shortest(t.origin) {
			nearest++
		}
	}
	n := float64(len(s.ledger))
	r := &CellReport{
		Placement: s.placement, Cells: s.Cells, Workers: s.base.Workers, Seed: s.base.Seed, Requests: len(s.ledger), DayS: s.Day.Seconds(),
		HitRate: float64(hit) / float64(prompt), TTFT: distribution(ttft), EndToEnd: distribution(endToEnd),
		NetworkMS: milliseconds(network) / n, Nearest: float64(nearest) / n, Busiest: float64(slices.Max(sent)) * float64(s.Cells) / n,
	}
	if s.placement == placeSummary {
		r.Summary = s.summaryReport()
	}
	return r
}

// shortest returns the time of a round trip from a region to the nearest cell.
func (d *cellDay) shortest(origin int) time.Duration {
	least := d.rtt(origin, 0)
	for c := 1; c < d.Cells; c++ {
		least = min(least, d.rtt(origin, c))
	}
	return least
}

func (s *cellRun) summaryReport() *SummaryReport {
	r := &SummaryReport{Probes: s.audit.probes, Stated: summary.FalsePositive}
	operations, changes, all := 0, 0, 0
	for _, c := range s.sites {
		operations += c.operations.sum
		changes += c.changes
		all += c.sent.sum
		r.PeakOperations = max(r.PeakOperations, float64(c.operations.peak()))
		r.PeakBytes = max(r.PeakBytes, float64(c.sent.peak()))
		r.Snapshots += c.snapshots
		r.SnapshotBytes += c.snapshotBytes
	}
	seconds := s.now.Seconds() * float64(len(s.sites))
	r.Operations, r.Bytes = float64(operations)/seconds, float64(all)/seconds
	r.PerOperation = float64(changes) / float64(max(1, operations))
	r.FalsePositives = float64(s.audit.positives) / float64(max(1, s.audit.probes))
	held := float64(max(1, s.audit.held))
	r.Stale, r.Untold = float64(s.audit.stale)/held, float64(s.audit.unreported)/held
	return r
}

// state returns the state of a site, as a cell reports it.
func (c *site) state() cells.State {
	sum := c.router.Sum()
	waits, up := c.router.Admission.Waits()
	return cells.State{Ready: up, Workers: sum.Workers, Waits: cells.Waits(waits), Running: sum.Running, Waiting: sum.Waiting,
		Usage: sum.Usage, Blocks: sum.Blocks, Context: sum.Context}
}

// newRouter returns a router with the settings of the run.
func (s *cellRun) newRouter(deps router.Deps) *router.Router {
	deps.BlockSize, deps.Seed, deps.Now = s.base.Engine.BlockSize, s.base.Seed+uint64(s.routers), s.clock
	s.routers++
	return router.New(s.base.Routing, deps)
}
