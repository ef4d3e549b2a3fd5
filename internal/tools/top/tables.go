package top

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/charmbracelet/x/ansi"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/serve/page"
)

// column is a column of a table; blanks in the title keep a place for wider cells,
// so that columns do not move all the time. Where a terminal is too narrow those with the
// largest rank go first.
type column struct {
	title string
	rank  int
	right bool // aligned
	cells []cell
}

// cell is one field of a table.
type cell struct {
	text string
	tone style
}

// table draws columns that have equally many cells, as far as width takes them; the
// last one that fits in part is cut.
func (f frame) table(columns []column) []string {
	const gap = 2
	const least = 8 // columns of a text that is worth being cut
	widths := make([]int, len(columns))
	byRank := make([]int, len(columns))
	for i, c := range columns {
		byRank[i] = i
		widths[i] = ansi.StringWidth(c.title)
		for _, cell := range c.cells {
			widths[i] = max(widths[i], ansi.StringWidth(cell.text))
		}
	}
	slices.SortStableFunc(byRank, func(a, b int) int { return cmp.Compare(columns[a].rank, columns[b].rank) })
	shown := make([]bool, len(columns))
	left := f.width + gap
	for _, i := range byRank {
		if room := left - gap; widths[i] > room {
			if columns[i].right || room < least {
				break
			}
			widths[i] = room
		}
		shown[i] = true
		left -= widths[i] + gap
	}
	draw := func(row int) string {
		var parts []string
		for i, c := range columns {
			if !shown[i] {
				continue
			}
			field := cell{c.title, faint}
			if row >= 0 {
				field = c.cells[row]
			}
			text := ansi.Truncate(field.text, widths[i], "…")
			pad := strings.Repeat(" ", widths[i]-ansi.StringWidth(text))
			text = f.paint(field.tone, text)
			if c.right {
				text = pad + text
			} else {
				text += pad
			}
			parts = append(parts, text)
		}
		return strings.Join(parts, strings.Repeat(" ", gap))
	}
	rows := 0
	if len(columns) > 0 {
		rows = len(columns[0].cells)
	}
	lines := make([]string, 0, rows+1)
	for row := -1; row < rows; row++ {
		lines = append(lines, draw(row))
	}
	return lines
}

// toneOf is the colour of a worker's state.
func toneOf(state string) style {
	switch state {
	case page.StateReady:
		return green
	case page.StateStarting:
		return cyan
	case page.StateCordoned, page.StateDraining, page.StateNotReady, page.StatePaused:
		return yellow
	}
	return red
}

// workers is the table of workers, with that many rows, and the line of totals.
func (f frame) workers(rows int) []string {
	all := f.sorted()
	skip := f.skipped(rows)
	list := all[skip:min(len(all), skip+rows)]
	several, roles, reasons, models := false, false, false, map[string]bool{}
	for _, w := range all {
		several = several || w.Rank > 0
		roles = roles || w.Role != ""
		reasons = reasons || w.Why != ""
		models[w.Model] = true
	}
	cells := min(20, max(5, (f.width-70)/4))
	var columns []column
	add := func(title string, rank int, right bool, total string, text func(page.Worker) cell) {
		c := column{title: title, rank: rank, right: right}
		for _, w := range list {
			c.cells = append(c.cells, text(w))
		}
		c.cells = append(c.cells, cell{total, strong})
		columns = append(columns, c)
	}
	number := func(n int) cell { return cell{count(float64(n)), normal} }
	var sum page.Worker
	usage, known := 0.0, 0
	for _, w := range all {
		sum.InFlight += w.InFlight
		sum.Waiting += w.Waiting
		sum.Running += w.Running
		sum.Blocks += w.Blocks
		sum.Restarts += w.Restarts
		sum.PrefillTokens += w.PrefillTokens
		if w.KVUsage != nil {
			usage, known = usage+*w.KVUsage, known+1
		}
	}
	if known > 0 {
		usage /= float64(known)
		sum.KVUsage = &usage
	}
	if t := f.state.Totals; t.ComparedTokens > 0 {
		rate := float64(t.CachedTokens) / float64(t.ComparedTokens)
		sum.HitRate = &rate
	}
	loaded := func(w page.Worker, n int) cell {
		if !w.LoadKnown {
			return cell{none, faint}
		}
		return number(n)
	}
	add("WORKER", 0, false, fmt.Sprintf("all %d", len(all)), func(w page.Worker) cell {
		text := called(w.Worker, w.Name, f.width/5)
		if several {
			text = fmt.Sprintf("%s/%d", text, w.Rank)
		}
		return cell{text, normal}
	})
	add("STATE    ", 0, false, "", func(w page.Worker) cell { return cell{w.State, toneOf(w.State)} })
	if roles {
		add("ROLE", 4, false, "", func(w page.Worker) cell { return cell{cmp.Or(w.Role, "both"), normal} })
	}
	add("FLIGHT", 1, true, count(float64(sum.InFlight)), func(w page.Worker) cell { return number(w.InFlight) })
	add("WAIT", 1, true, count(float64(sum.Waiting)), func(w page.Worker) cell { return loaded(w, w.Waiting) })
	add("RUN", 2, true, count(float64(sum.Running)), func(w page.Worker) cell { return loaded(w, w.Running) })
	add("KV CACHE", 1, false, bar(sum.KVUsage, cells), func(w page.Worker) cell {
		tone := green
		if w.KVUsage == nil {
			tone = faint
		} else if *w.KVUsage >= .95 {
			tone = red
		} else if *w.KVUsage >= .8 {
			tone = yellow
		}
		return cell{bar(w.KVUsage, cells), tone}
	})
	add("BLOCKS", 3, true, count(float64(sum.Blocks)), func(w page.Worker) cell {
		switch w.Known {
		case kv.Approximate.String():
			return cell{count(float64(w.Blocks)) + "?", yellow}
		case kv.LoadOnly.String():
			return cell{count(float64(w.Blocks)), faint}
		}
		return number(w.Blocks)
	})
	add("HIT", 2, true, percent(sum.HitRate), func(w page.Worker) cell { return cell{percent(w.HitRate), normal} })
	add("PREFILL", 6, true, count(float64(sum.PrefillTokens)), func(w page.Worker) cell { return number(w.PrefillTokens) })
	add("RST", 5, true, count(float64(sum.Restarts)), func(w page.Worker) cell { return number(w.Restarts) })
	add("   LAG", 5, true, "", func(w page.Worker) cell { return cell{maybeSeconds(w.EventLag), normal} })
	add("SINCE", 6, true, "", func(w page.Worker) cell {
		return cell{seconds(max(0, f.state.At-w.Since)), normal}
	})
	if reasons {
		add("WHY", 4, false, "", func(w page.Worker) cell { return cell{w.Why, yellow} })
	}
	if len(models) > 1 {
		add("MODEL", 8, false, "", func(w page.Worker) cell { return cell{w.Model, normal} })
	}
	add("URL", 9, false, "", func(w page.Worker) cell { return cell{w.URL, faint} })
	return f.table(columns)
}

// listing makes the columns of a table with a row for each of a list.
type listing[T any] struct {
	list    []T
	columns []column
}

func (l *listing[T]) add(title string, rank int, right bool, text func(T) cell) {
	c := column{title: title, rank: rank, right: right}
	for _, one := range l.list {
		c.cells = append(c.cells, text(one))
	}
	l.columns = append(l.columns, c)
}

// plainTenants is the number of tenants in a plain frame at most.
const plainTenants = 20

// tenants is the table of the busiest tenants, with its header; none where there is only the one
// of all requests without a name.
func (f frame) tenants() []string {
	list := f.state.Tenants
	if len(list) < 2 {
		return nil
	}
	if f.height == 0 {
		list = list[:min(len(list), plainTenants)]
	}
	table := listing[page.Tenant]{list: list}
	add := table.add
	add("TENANT", 0, false, func(t page.Tenant) cell { return cell{called(0, t.Tenant, f.width/4), normal} })
	if f.state.Fair {
		add("WAIT", 0, true, func(t page.Tenant) cell { return cell{count(float64(t.Waiting.All())), normal} })
		add("RUN", 1, true, func(t page.Tenant) cell { return cell{count(float64(t.Running)), normal} })
		add("OLDEST", 1, true, func(t page.Tenant) cell {
			if t.Waiting.All() == 0 {
				return cell{none, faint}
			}
			return cell{seconds(t.OldestWait), normal}
		})
		add("BEHIND", 3, true, func(t page.Tenant) cell { return cell{seconds(t.Behind), normal} })
		add("WEIGHT", 5, true, func(t page.Tenant) cell {
			if t.Weight == 0 {
				return cell{none, faint}
			}
			return cell{strconv.FormatFloat(t.Weight, 'g', 3, 64), normal}
		})
	}
	add("REQUESTS", 1, true, func(t page.Tenant) cell { return cell{count(float64(t.Requests)), normal} })
	add("PROMPT", 2, true, func(t page.Tenant) cell { return cell{count(float64(t.PromptTokens)), normal} })
	add("HIT", 2, true, func(t page.Tenant) cell { return cell{share(t.CachedTokens, t.PromptTokens), normal} })
	add("ANSWERS", 2, true, func(t page.Tenant) cell { return cell{count(float64(t.AnsweredTokens)), normal} })
	add("SHED", 4, true, func(t page.Tenant) cell {
		if t.Shed > 0 {
			return cell{count(float64(t.Shed)), yellow}
		}
		return cell{"0", normal}
	})
	add("IN TIME", 3, true, func(t page.Tenant) cell {
		tone := normal
		if t.Missed > 0 {
			tone = yellow
		}
		return cell{share(t.Kept, t.Kept+t.Missed), tone}
	})
	return f.table(table.columns)
}

// share writes a part of all as a percentage.
func share(part, all uint64) string {
	if all == 0 {
		return none
	}
	of := float64(part) / float64(all)
	return percent(&of)
}

// endTone is the colour of a request's ending.
func endTone(end string) style {
	switch end {
	case page.EndRunning:
		return cyan
	case page.EndDone:
		return green
	case page.EndCancelled:
		return yellow
	}
	return red
}

// plainRequests is the number of requests in a plain frame at most.
const plainRequests = 20

// requests is the table of the last requests, with its header.
func (f frame) requests() []string {
	list := f.state.Requests
	if f.height == 0 {
		list = list[:min(len(list), plainRequests)]
	}
	table := listing[page.Request]{list: list}
	add := table.add
	add("REQUEST", 0, false, func(r page.Request) cell { return cell{f.clock(r.At), normal} })
	add("END      ", 0, false, func(r page.Request) cell { return cell{r.End, endTone(r.End)} })
	add("CODE", 3, true, func(r page.Request) cell {
		if r.Status == 0 {
			return cell{none, faint}
		}
		return cell{strconv.Itoa(r.Status), normal}
	})
	add("WORKER", 1, true, func(r page.Request) cell {
		text := none
		if r.Worker != nil {
			text = called(*r.Worker, r.WorkerName, f.width/8)
		}
		if r.PrefillWorker != nil {
			text = called(*r.PrefillWorker, r.PrefillName, f.width/8) + ">" + text
		}
		return cell{text, normal}
	})
	add("PROMPT", 1, true, func(r page.Request) cell { return cell{count(float64(r.PromptTokens)), normal} })
	add("EXPECTED", 2, true, func(r page.Request) cell { return cell{count(float64(r.Predicted)), normal} })
	add("CACHED", 1, true, func(r page.Request) cell {
		if r.Cached == nil {
			return cell{none, faint}
		}
		tone := normal
		if *r.Cached != r.Predicted {
			tone = yellow
		}
		return cell{count(float64(*r.Cached)), tone}
	})
	add("  TTFT", 1, true, func(r page.Request) cell { return cell{maybeSeconds(r.TTFT), normal} })
	add("  TOOK", 2, true, func(r page.Request) cell { return cell{maybeSeconds(r.Duration), normal} })
	add("OUT", 3, true, func(r page.Request) cell {
		if r.OutputTokens == nil {
			return cell{none, faint}
		}
		return cell{count(float64(*r.OutputTokens)), normal}
	})
	add("TRIES", 6, true, func(r page.Request) cell { return cell{count(float64(r.Attempts)), normal} })
	add("ROUTE", 5, false, func(r page.Request) cell { return cell{r.Route, normal} })
	add("MODEL", 7, false, func(r page.Request) cell { return cell{r.Model, normal} })
	add("ID", 8, false, func(r page.Request) cell { return cell{r.ID, faint} })
	return f.table(table.columns)
}
