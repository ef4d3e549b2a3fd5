package simulate

import (
	"bytes"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"kvrouter/internal/textfile"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
)

// gridFigures are a grid's figures of one run, or the means of several with other
// seeds.
type gridFigures struct {
	Requests, Reuse, TTFT, TTFTP99, ITL, EndToEnd, EndToEndP99, OutputPerSec, Balance, Lost, Seconds float64

	Tenants []TenantReport // of one run; nil: the load has none, or the figures are known from a file
}

// gridColumns are the columns of the tables, with their names on the screen and in
// the CSV file.
var gridColumns = []struct {
	title, name, format string
	of                  func(*gridFigures) *float64
}{
	{"", "requests", "", func(f *gridFigures) *float64 { return &f.Requests }},
	{"reuse", "reuse", "%.3f", func(f *gridFigures) *float64 { return &f.Reuse }},
	{"TTFT ms mean", "ttft_mean_ms", "%.1f", func(f *gridFigures) *float64 { return &f.TTFT }},
	{"p99", "ttft_p99_ms", "%.0f", func(f *gridFigures) *float64 { return &f.TTFTP99 }},
	{"ITL ms mean", "itl_mean_ms", "%.1f", func(f *gridFigures) *float64 { return &f.ITL }},
	{"e2e ms mean", "e2e_mean_ms", "%.0f", func(f *gridFigures) *float64 { return &f.EndToEnd }},
	{"p99", "e2e_p99_ms", "%.0f", func(f *gridFigures) *float64 { return &f.EndToEndP99 }},
	{"out tok/s", "output_tokens_per_s", "%.0f", func(f *gridFigures) *float64 { return &f.OutputPerSec }},
	{"busiest / mean worker", "busiest_to_mean_worker", "%.2f", func(f *gridFigures) *float64 { return &f.Balance }},
	{"lost", "lost_share", "%.4f", func(f *gridFigures) *float64 { return &f.Lost }},
	{"", "seconds", "", func(f *gridFigures) *float64 { return &f.Seconds }}, // that the run took
}

// figuresOf are the figures of one run.
func figuresOf(r *Report) gridFigures {
	busiest, sum := 0.0, 0.0
	for _, w := range r.Balance {
		busiest, sum = max(busiest, w.Busy), sum+w.Busy
	}
	return gridFigures{
		Requests: float64(r.Requests), Reuse: r.Reuse, TTFT: r.TTFT.Mean, TTFTP99: r.TTFT.P99, ITL: r.ITL.Mean,
		EndToEnd: r.EndToEnd.Mean, EndToEndP99: r.EndToEnd.P99, OutputPerSec: r.OutputPerSec,
		Balance: busiest * float64(len(r.Balance)) / sum, Lost: r.LostShare(), Tenants: r.Tenants,
	}
}

// mean are the means of the figures of a policy over the seeds.
func (r *gridRow) mean(policy int) (mean gridFigures) {
	for i := range r.figures[policy] {
		for _, column := range gridColumns {
			*column.of(&mean) += *column.of(&r.figures[policy][i]) / float64(len(r.figures[policy]))
		}
	}
	return mean
}

// gridRatio is a column of a row, relative to that of the best of the others.
type gridRatio struct {
	ratio float64
	best  string // of the others
}

// toBest compares a column of the policy at place of with the least of the others.
func (r *gridRow) toBest(g *grid, of int, column func(*gridFigures) *float64) (to gridRatio) {
	least, own := math.Inf(1), r.mean(of)
	for i := range g.policies {
		// Who refuses more requests is not better for serving the others sooner.
		if figures := r.mean(i); i != of && figures.Lost <= own.Lost && *column(&figures) < least {
			least, to.best = *column(&figures), g.policies[i].Label
		}
	}
	if to.best == "" {
		to.ratio = 1
		return to
	}
	to.ratio = *column(&own) / least
	return to
}

// The columns that are compared.
func ttftOf(f *gridFigures) *float64     { return &f.TTFT }
func endToEndOf(f *gridFigures) *float64 { return &f.EndToEnd }

// gridReport writes what came of a grid.
type gridReport struct {
	grid *grid
	of   int // place of the policy that is compared
	out  io.Writer
}

// row writes the table of one row.
func (p *gridReport) row(row *gridRow) error {
	own := row.mean(p.of)
	seconds := 0.0
	for i := range p.grid.policies {
		for _, f := range row.figures[i] {
			seconds += f.Seconds
		}
	}
	fmt.Fprintf(p.out, "%s: %s (%.0f requests, %.1f s)\n\n", row.set, row.load.text, own.Requests, seconds)
	table := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "policy\t")
	for _, column := range gridColumns {
		if column.title != "" {
			fmt.Fprintf(table, "%s\t", column.title)
		}
	}
	for i, policy := range p.grid.policies {
		figures := row.mean(i)
		fmt.Fprintf(table, "\n%s\t", policy.Label)
		for _, column := range gridColumns {
			if column.title != "" {
				fmt.Fprintf(table, column.format+"\t", *column.of(&figures))
			}
		}
	}
	fmt.Fprintln(table)
	if err := table.Flush(); err != nil {
		return err
	}
	if len(row.load.tenants) > 0 {
		fmt.Fprintln(p.out)
		var reports []*Report
		for i, policy := range p.grid.policies {
			for _, f := range row.figures[i] {
				reports = append(reports, &Report{Policy: policy.Label, Tenants: f.Tenants})
			}
		}
		writeTenants(table, reports)
		if err := table.Flush(); err != nil {
			return err
		}
	}
	ttft, end := row.toBest(p.grid, p.of, ttftOf), row.toBest(p.grid, p.of, endToEndOf)
	beyond := p.beyond(ttft, end)
	if beyond != "" {
		beyond = "; beyond its limit: " + beyond
	}
	_, err := fmt.Fprintf(p.out, "\n%s to the best of the others: TTFT %.3f (%s), e2e %.3f (%s)%s\n\n",
		p.grid.policies[p.of].Label, ttft.ratio, ttft.best, end.ratio, end.best, beyond)
	return err
}

// beyond returns the limits that a row exceeds.
func (p *gridReport) beyond(ttft, end gridRatio) string {
	var beyond []string
	if ttft.ratio > p.grid.limits.TTFT {
		beyond = append(beyond, "TTFT")
	}
	if end.ratio > p.grid.limits.EndToEnd {
		beyond = append(beyond, "e2e")
	}
	return strings.Join(beyond, ", ")
}

// sums writes all rows below each other, and the geometric means of each set and of
// all: to the best of the others, and to each of them.
func (p *gridReport) sums() error {
	g, name := p.grid, p.grid.policies[p.of].Label
	table := tabwriter.NewWriter(p.out, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "%s\tTTFT ms\te2e ms\tTTFT to the best of the others\t\te2e to the best of the others\t\tbeyond\n", name)
	for _, row := range g.rows {
		own, ttft, end := row.mean(p.of), row.toBest(g, p.of, ttftOf), row.toBest(g, p.of, endToEndOf)
		fmt.Fprintf(table, "%s\t%.1f\t%.0f\t%.3f\t%s\t%.3f\t%s\t%s\n", row.load.text, own.TTFT, own.EndToEnd, ttft.ratio, ttft.best, end.ratio,
			end.best, p.beyond(ttft, end))
	}
	sets := g.sets()
	fmt.Fprintf(table, "\ngeometric means\trows\tTTFT to the best\tworst\tabove %g\te2e to the best\tworst\tabove %g\n", g.limits.TTFT,
		g.limits.EndToEnd)
	for _, set := range sets {
		fmt.Fprintf(table, "%s\t%d", set.name, len(set.rows))
		for _, c := range []struct {
			of    func(*gridFigures) *float64
			limit float64
		}{{ttftOf, g.limits.TTFT}, {endToEndOf, g.limits.EndToEnd}} {
			mean, worst, beyond := p.sumToBest(set.rows, c.of, c.limit)
			fmt.Fprintf(table, "\t%.3f\t%.3f\t%d", mean, worst, beyond)
		}
		fmt.Fprintln(table)
	}
	fmt.Fprint(table, "\nTTFT, e2e to")
	for _, set := range sets {
		fmt.Fprintf(table, "\t%s", set.name)
	}
	for i, policy := range g.policies {
		if i == p.of {
			continue
		}
		fmt.Fprintf(table, "\n%s", policy.Label)
		for _, set := range sets {
			fmt.Fprintf(table, "\t%.3f, %.3f", p.sumTo(i, set.rows, ttftOf), p.sumTo(i, set.rows, endToEndOf))
		}
	}
	fmt.Fprintln(table)
	return table.Flush()
}

// gridSet is the rows of one set.
type gridSet struct {
	name string
	rows []*gridRow
}

// sets are the rows by set, and if there are several sets, all rows.
func (g *grid) sets() (sets []gridSet) {
	for _, row := range g.rows {
		at := slices.IndexFunc(sets, func(s gridSet) bool { return s.name == row.set })
		if at < 0 {
			at = len(sets)
			sets = append(sets, gridSet{name: row.set})
		}
		sets[at].rows = append(sets[at].rows, row)
	}
	if len(sets) > 1 {
		sets = append(sets, gridSet{"all", g.rows})
	}
	return sets
}

// sumToBest sums up how a column of rows is to the best of the others: the geometric
// mean, the worst, and how many are above the limit.
func (p *gridReport) sumToBest(rows []*gridRow, column func(*gridFigures) *float64, limit float64) (mean, worst float64, above int) {
	for _, row := range rows {
		ratio := row.toBest(p.grid, p.of, column).ratio
		mean, worst = mean+math.Log(ratio)/float64(len(rows)), max(worst, ratio)
		if ratio > limit {
			above++
		}
	}
	return math.Exp(mean), worst, above
}

// sumTo is the geometric mean of a column of rows, relative to the policy at place
// other.
func (p *gridReport) sumTo(other int, rows []*gridRow, column func(*gridFigures) *float64) (mean float64) {
	for _, row := range rows {
		own, others := row.mean(p.of), row.mean(other)
		mean += math.Log(*column(&own) / *column(&others)) / float64(len(rows))
	}
	return math.Exp(mean)
}

// gridKey names the figures of a load and a policy.
type gridKey struct{ load, policy string }

// gridTable is a grid in a CSV file.
type gridTable map[gridKey]gridFigures

// writeTable writes the figures as CSV, one line a load and policy.
func (g *grid) writeTable(name string) error {
	var text bytes.Buffer
	lines := csv.NewWriter(&text)
	header := []string{"set", "load", "policy"}
	for _, column := range gridColumns {
		header = append(header, column.name)
	}
	_ = lines.Write(header) // to a buffer
	for _, row := range g.rows {
		for i, policy := range g.policies {
			figures, line := row.mean(i), []string{row.set, row.load.text, policy.Label}
			for _, column := range gridColumns {
				line = append(line, strconv.FormatFloat(*column.of(&figures), 'g', -1, 64))
			}
			_ = lines.Write(line)
		}
	}
	lines.Flush()
	return textfile.Write(name, text.Bytes(), 0o644)
}

// readGridTable reads what writeTable wrote.
func readGridTable(name string) (gridTable, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	return parseGridTable(io.LimitReader(file, 100*maxGridBytes))
}

func parseGridTable(from io.Reader) (gridTable, error) {
	lines, err := csv.NewReader(from).ReadAll()
	if err != nil {
		return nil, err
	}
	const names = 3 // set, load, policy
	if len(lines) == 0 || len(lines[0]) != names+len(gridColumns) {
		return nil, errors.New("it is not a --csv file of this version")
	}
	table := gridTable{}
	for i, line := range lines[1:] {
		var figures gridFigures
		for at, column := range gridColumns {
			value, err := strconv.ParseFloat(line[names+at], 64)
			if err != nil || lines[0][names+at] != column.name {
				return nil, fmt.Errorf("line %d: %q is not a number of %s", i+2, line[names+at], column.name)
			}
			*column.of(&figures) = value
		}
		table[gridKey{line[1], line[2]}] = figures
	}
	return table, nil
}
