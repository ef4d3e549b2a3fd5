package simulate

import (
	"fmt"
	"os"
	"strings"
)

// countRequests counts requests and those that follow them.
func countRequests(requests []TraceRequest) int {
	n := 0
	for i := range requests {
		for r := &requests[i]; r != nil; r = r.Next {
			n++
		}
	}
	return n
}

// progressBar returns a function that shows how many of total requests are done
// on a terminal, or nil if to is none.
func progressBar(to *os.File, name string, total int) func(done int) {
	if info, err := to.Stat(); err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return nil
	}
	const width = 40
	last := -1
	return func(done int) {
		percent := 100 * done / total
		if percent == last {
			return
		}
		last = percent
		filled := width * done / total
		fmt.Fprintf(to, "\r%-20s [%s%s] %3d %%", name, strings.Repeat("#", filled), strings.Repeat(".", width-filled), percent)
		if done == total {
			fmt.Fprint(to, "\r\x1b[K")
		}
	}
}
