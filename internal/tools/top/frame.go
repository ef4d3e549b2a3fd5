package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/page"
)

// minWidth is the narrowest terminal that is drawn for, in columns.
const minWidth = 20

// frame is one picture of the router.
type frame struct {
	width, height int    // of the terminal; height 0: as high as it gets
	url           string // of the stream
	state         *page.State
	problem       string // why the state may be old; empty: it is not
	sort          int    // index into orders
	reverse       bool
	skip          int  // workers that are scrolled away
	plain         bool // without colours, for scripts
	zone          *time.Location
}

// style is how a text is drawn.
type style string

// The styles, as parameters of the escape code that sets them.
const (
	normal style = ""
	strong style = "1"
	faint  style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	cyan   style = "36"
)

func (f frame) paint(s style, text string) string {
	if s == normal || f.plain || text == "" {
		return text
	}
	return "\x1b[" + string(s) + "m" + text + "\x1b[0m"
}

// order is a way to sort workers: ascending by less, but those that begin with the
// largest.
type order struct {
	key, name  string
	descending bool
	compare    func(a, b page.Worker) int
}

// orders are the ways to sort workers, by the key that chooses them.
func orders() []order {
	known := func(p *float64) float64 {
		if p == nil {
			return -1
		}
		return *p
	}
	return []order{
		{"w", "worker", false, func(a, b page.Worker) int { return 0 }},
		{"s", "state", false, func(a, b page.Worker) int { return cmp.Compare(a.State, b.State) }},
		{"f", "flight", true, func(a, b page.Worker) int { return cmp.Compare(a.InFlight, b.InFlight) }},
		{"k", "cache", true, func(a, b page.Worker) int { return cmp.Compare(known(a.KVUsage), known(b.KVUsage)) }},
		{"b", "blocks", true, func(a, b page.Worker) int { return cmp.Compare(a.Blocks, b.Blocks) }},
		{"h", "hit", true, func(a, b page.Worker) int { return cmp.Compare(known(a.HitRate), known(b.HitRate)) }},
		{"l", "lag", true, func(a, b page.Worker) int { return cmp.Compare(known(a.EventLag), known(b.EventLag)) }},
	}
}

// sorted returns the workers in the frame's order; equal ones by name, worker and rank.
func (f frame) sorted() []page.Worker {
	by := orders()[f.sort]
	workers := slices.Clone(f.state.Workers)
	slices.SortStableFunc(workers, func(a, b page.Worker) int {
		sign := 1
		if by.descending != f.reverse {
			sign = -1
		}
		if c := sign * by.compare(a, b); c != 0 {
			return c
		}
		c := cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank))
		if by.key == "w" {
			c *= sign
		}
		return c
	})
	return workers
}

// draw draws the frame, with that many rows of workers. Each line ends with a newline
// in plain frames; others have exactly the terminal's height, and no line is wider
// than it.
func (f frame) draw() (text string, room int) {
	f.width = max(f.width, minWidth)
	var lines []string
	if f.state == nil {
		lines = []string{f.paint(strong, "kvrouter top") + "  " + f.url, "", cmp.Or(f.problem, "connecting …")}
	} else {
		lines = append(f.summary(), "")
		requests, tenants := f.requests(), f.tenants()
		room = len(f.state.Workers)
		if f.height > 0 {
			// Header and total of the workers, and the line of keys, are always there. The
			// tenants, with a blank line and a header, get a sixth of the terminal at most. The
			// requests, likewise, get the rows that the workers leave, but a quarter of it at least.
			left := f.height - len(lines) - 3
			if tenants = tenants[:min(len(tenants), f.height/6)]; len(tenants) < 3 {
				tenants = nil
			}
			if len(tenants) > 0 {
				left -= len(tenants) + 1
			}
			share := min(len(requests)+1, f.height/4)
			if share < 3 {
				share = 0
			}
			room = max(1, min(room, left-share))
			requests = requests[:max(0, min(len(requests), left-room-1))]
		}
		lines = append(lines, f.workers(room)...)
		if len(tenants) > 0 {
			lines = append(append(lines, ""), tenants...)
		}
		if len(requests) > 1 {
			lines = append(append(lines, ""), requests...)
		}
	}
	if f.height > 0 {
		lines = lines[:min(len(lines), max(1, f.height-1))]
		for len(lines) < f.height-1 {
			lines = append(lines, "")
		}
		if f.height > 1 {
			lines = append(lines, f.keys(room))
		}
	}
	for i, line := range lines {
		lines[i] = ansi.Truncate(strings.TrimRight(line, " "), f.width, "")
	}
	text = strings.Join(lines, "\n")
	if f.height == 0 {
		text += "\n"
	}
	return text, room
}

// skipped is the number of workers that are scrolled away where that many rows are shown.
func (f frame) skipped(rows int) int { return max(0, min(f.skip, len(f.state.Workers)-rows)) }

// keys is the line at the bottom, beneath that many rows of workers.
func (f frame) keys(rows int) string {
	parts := []string{"q quit"}
	if f.state != nil {
		if all := len(f.state.Workers); all > rows {
			skip := f.skipped(rows)
			parts = append(parts, f.paint(strong, fmt.Sprintf("↑↓ %d–%d/%d", skip+1, skip+rows, all)))
		}
		for i, o := range orders() {
			part := o.key + " " + o.name
			if i == f.sort {
				part = f.paint(strong, part)
				if o.descending != f.reverse {
					part += "↓"
				} else {
					part += "↑"
				}
			}
			parts = append(parts, part)
		}
	}
	return strings.Join(parts, "  ")
}

// summary are the lines at the top: name, state and totals.
func (f frame) summary() []string {
	s := f.state
	ready, approximate := 0, 0
	for _, w := range s.Workers {
		if w.State == page.StateReady {
			ready++
		}
		if w.Known == kv.Approximate.String() {
			approximate++
		}
	}
	health, tone := "ready", green
	switch {
	case s.Draining:
		health, tone = "draining", yellow
	case !s.Ready:
		health, tone = "not ready", red
	}
	first := f.paint(strong, "kvrouter "+s.Version) + "  " + f.paint(tone, health) +
		fmt.Sprintf("  %d of %d workers  policy %s  up %s  %s", ready, len(s.Workers), s.Policy, seconds(s.Uptime), f.clock(s.At))
	if approximate > 0 {
		first += "  " + f.paint(yellow, fmt.Sprintf("%d known approximately (?)", approximate))
	}
	if f.problem != "" {
		first = f.paint(red, "NOT LIVE") + "  " + f.problem
	}
	r, t := s.Rates, s.Totals
	return []string{
		first,
		fmt.Sprintf("%s req/s  hit %s  exact %s  TTFT %s (p99 %s)  ITL %s (p99 %s)", rate(r.RequestsPerSecond), percent(r.HitRate),
			percent(r.Exact),
			maybeSeconds(r.TTFT50), maybeSeconds(r.TTFT99), maybeSeconds(r.ITL50), maybeSeconds(r.ITL99)),
		fmt.Sprintf("%d in flight  %d queued  %s requests  %s errors  %s tokens in  %s cached", t.InFlight, t.Queued, count(float64(t.Requests)),
			f.errors(t.Errors),
			count(float64(t.PromptTokens)), count(float64(t.CachedTokens))),
	}
}

// clock writes Unix seconds as the time of day.
func (f frame) clock(unix float64) string { return clockOf(unix).In(f.zone).Format("15:04:05") }

func (f frame) errors(n uint64) string {
	if n == 0 {
		return "0"
	}
	return f.paint(red, count(float64(n)))
}

// rate writes requests a second.
func rate(x float64) string {
	if x > 0 && x < 9.95 {
		return fmt.Sprintf("%.1f", x)
	}
	return count(x)
}
