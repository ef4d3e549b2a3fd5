package batch

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
)

const (
	// drawEvery is the time between two pictures of the progress on a terminal, and
	// printEvery between two lines elsewhere.
	drawEvery, printEvery = 200 * time.Millisecond, 10 * time.Second
	// width bounds the picture, columns.
	width = 79
	// cells are those of the bar.
	cells = 20
)

// counts are the progress of a run. Requests are lines of the file.
type counts struct {
	total   int // requests of the file
	before  int // that were done before the run
	failed  int // that have an error, those before the run included
	ok      int // answered in this run
	errors  int // in this run
	again   int // further attempts
	refused int // attempts that the endpoint refused
	usage   usage
	last    string // problem of an attempt
	started time.Time
	ended   time.Time // zero: not yet
}

// progress counts what a run does. It is safe for concurrent use.
type progress struct {
	mu sync.Mutex // guards counts
	counts
}

func (p *progress) update(change func(c *counts)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	change(&p.counts)
}

func (p *progress) now() counts {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.counts
}

// done returns the requests that have a result or an error.
func (c *counts) done() int { return c.before + c.ok + c.errors }

// elapsed returns the time of the run, at least a millisecond.
func (c *counts) elapsed(now time.Time) time.Duration {
	if !c.ended.IsZero() {
		now = c.ended
	}
	return max(now.Sub(c.started), time.Millisecond)
}

// rate returns the requests of this run, each second.
func (c *counts) rate(now time.Time) float64 {
	return float64(c.ok+c.errors) / c.elapsed(now).Seconds()
}

// line describes the progress in one line. With bar, it begins with a bar and has at most
// width columns.
func (c *counts) line(now time.Time, inFlight int, bar bool) string {
	share := 1.0
	if c.total > 0 {
		share = float64(c.done()) / float64(c.total)
	}
	var b strings.Builder
	if bar {
		full := int(share * cells)
		b.WriteString(strings.Repeat("█", full) + strings.Repeat("░", cells-full) + " ")
	}
	rate := c.rate(now)
	fmt.Fprintf(&b, "%.0f%% %d/%d, %d errors, %d in flight, %.1f/s", 100*share, c.done(), c.total, c.failed, inFlight, rate)
	if left := c.total - c.done(); left > 0 && c.ok+c.errors > 0 {
		fmt.Fprintf(&b, ", %s left", rounded(time.Duration(float64(left)/rate*float64(time.Second))))
	}
	if c.last != "" {
		b.WriteString(", last problem: " + c.last)
	}
	text := []rune(clean(b.String()))
	if bar && len(text) > width {
		text = append(text[:width-1], '…')
	}
	return string(text)
}

// summary describes a run that has ended.
func (c *counts) summary() string {
	var b strings.Builder
	row := func(name, format string, values ...any) {
		fmt.Fprintf(&b, "%-18s "+format+"\n", append([]any{name}, values...)...)
	}
	row("requests", "%d of %d done, %d of them before this run", c.done(), c.total, c.before)
	row("answered", "%d", c.ok)
	row("errors", "%d", c.errors)
	row("further attempts", "%d, after %d refusals", c.again, c.refused)
	row("prompt tokens", "%d, %d of them cached", c.usage.prompt, c.usage.cached)
	row("answer tokens", "%d", c.usage.output)
	row("time", "%s, %.1f requests/s, %.1f answer tokens/s", rounded(c.elapsed(c.ended)), c.rate(c.ended),
		float64(c.usage.output)/c.elapsed(c.ended).Seconds())
	return b.String()
}

// rounded writes a duration in the precision that matters.
func rounded(d time.Duration) string {
	if d < 10*time.Second {
		return d.Round(10 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}

// clean removes control characters of terminals.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, text)
}

// isTerminal reports whether out is a terminal.
func isTerminal(out io.Writer) bool {
	file, ok := out.(*os.File)
	if !ok {
		return false
	}
	info, err := file.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// show draws the progress until done is closed.
func (p *progress) show(out io.Writer, inFlight func() int, done <-chan struct{}) {
	bar, every := isTerminal(out), printEvery
	if bar {
		every = drawEvery
	}
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			if bar {
				fmt.Fprint(out, "\r\x1b[K")
			}
			return
		case now := <-ticker.C:
			c := p.now()
			line := c.line(now, inFlight(), bar)
			if bar {
				fmt.Fprint(out, "\r\x1b[K"+line)
			} else {
				fmt.Fprintln(out, line)
			}
		}
	}
}
