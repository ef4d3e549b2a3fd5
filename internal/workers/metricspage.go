package workers

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"slices"

	dto "github.com/prometheus/client_model/go"
)

// Bounds of a worker's metrics page.
const (
	maxMetricsBytes = 16 << 20 // that are read; the rest is left away
	maxMetricsLine  = 64 << 10 // bytes of one line
	maxMetricsKept  = 4 << 20  // bytes of the lines that are looked for
)

// cacheName is the metric that has the size of an engine's KV cache in its labels.
const cacheName = "vllm:cache_config_info"

// metricFamilies are the metrics of a page by name.
type metricFamilies map[string]*dto.MetricFamily

// linesOf returns the lines of a Prometheus page that tell of metrics with these
// names. A page can have megabytes of others, and parsing takes thirty times their
// memory.
func linesOf(page io.Reader, names []string) (*bytes.Buffer, error) {
	lines := bufio.NewScanner(page)
	lines.Buffer(make([]byte, 0, 4<<10), maxMetricsLine)
	kept := new(bytes.Buffer)
	for lines.Scan() {
		if line := lines.Bytes(); tellsOf(line, names) {
			kept.Write(line)
			kept.WriteByte('\n')
		}
		if kept.Len() > maxMetricsKept {
			return nil, fmt.Errorf("more than %d bytes tell of %s", maxMetricsKept, names[0])
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, fmt.Errorf("a line is longer than %d bytes", maxMetricsLine)
	}
	return kept, lines.Err()
}

// tellsOf tells whether a line is a sample, a type or a help of one of the names. A
// line that begins with { has its name inside.
func tellsOf(line []byte, names []string) bool {
	line = bytes.TrimLeft(line, " \t")
	if comment, is := bytes.CutPrefix(line, []byte("#")); is {
		word := bytes.TrimLeft(comment, " \t")
		if word, is = bytes.CutPrefix(word, []byte("TYPE")); !is {
			return false
		}
		line = bytes.TrimLeft(word, " \t\"")
	}
	return bytes.HasPrefix(line, []byte("{")) || slices.ContainsFunc(names, func(name string) bool { return bytes.HasPrefix(line, []byte(name)) })
}
