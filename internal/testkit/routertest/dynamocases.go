package routertest

import (
	"fmt"
	"kvrouter/internal/radix"
	"slices"
)

// dumpLines is all that an index holds, in order.
func DumpLines(index radix.Index) []string {
	var lines []string
	for _, entry := range dumped(index) {
		lines = append(lines, fmt.Sprintf("%+v", entry))
	}
	slices.Sort(lines)
	return lines
}
