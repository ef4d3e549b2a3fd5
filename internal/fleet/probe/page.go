package probe

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/decide/policy"
)

// metricsPath is where servers show their metrics.
const metricsPath = "/metrics"

// Bounds of a metrics page.
const (
	maxMetricsBytes = 16 << 20 // that are read; the rest is ignored
	maxMetricsLine  = 64 << 10 // bytes of one line
	maxMetricsKept  = 4 << 20  // bytes of the lines that are parsed
)

// loadNames are the metrics of a load, and those that show progress.
var loadNames = slices.Concat(vllmLoadNames[:], []string{sglangRunning, sglangWaiting, sglangUsage}, sglangQueues[:], progressNames[:])

// counterNames are the metrics of Counters, and pageNames all that a poll may read.
var (
	counterNames = slices.Concat(transferNames, adapterNames, progressNames[:])
	pageNames    = slices.Concat(loadNames, transferNames, adapterNames)
)

// Page is the metrics of a Prometheus page by name.
type Page map[string]*dto.MetricFamily

// ParsePage reads the load and the cache settings of a worker's Prometheus page.
func ParsePage(page io.Reader) (Page, error) {
	return parsePage(page, append([]string{cacheName}, loadNames...), nil, nil)
}

// Load returns the load of an engine by its number or, if that is empty, of all
// together. An error says which metric is missing.
func (p Page) Load(engine string) (policy.Published, error) {
	if p[sglangRunning] != nil {
		return p.sglangLoad(engine)
	}
	return p.vllmLoad(engine)
}

// page requests a server's Prometheus page and reads the metrics of these names.
func (c *Client) page(ctx context.Context, s Server, names []string) (Page, error) {
	ctx, cancel := context.WithTimeout(ctx, answerLimit)
	defer cancel()
	body, err := c.open(ctx, c.pages, s, metricsPath)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	page, err := parsePage(body, names, c.edges, c.log)
	if err != nil {
		return nil, fmt.Errorf("%s%s: %w", s.URL, metricsPath, err)
	}
	return page, nil
}

// parsePage reads the metrics of these names from a Prometheus page.
func parsePage(page io.Reader, names []string, edges *guard.Edges, log *slog.Logger) (families Page, err error) {
	text, err := linesOf(io.LimitReader(page, maxMetricsBytes), names)
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	// The library panics at some pages, such as "{}".
	err = edges.Do(guard.WorkerMetrics, log, func() (err error) {
		parser := expfmt.NewTextParser(prommodel.UTF8Validation)
		families, err = parser.TextToMetricFamilies(text)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	return families, nil
}

// linesOf returns the lines of a Prometheus page about metrics of these names. A page
// can have megabytes of others, and parsing takes thirty times their memory.
func linesOf(page io.Reader, names []string) (*bytes.Buffer, error) {
	lines := bufio.NewScanner(page)
	lines.Buffer(make([]byte, 0, 4<<10), maxMetricsLine)
	kept := new(bytes.Buffer)
	for lines.Scan() {
		if line := lines.Bytes(); isAbout(line, names) {
			kept.Write(line)
			kept.WriteByte('\n')
		}
		if kept.Len() > maxMetricsKept {
			return nil, fmt.Errorf("more than %d bytes are about %s", maxMetricsKept, names[0])
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return nil, fmt.Errorf("a line is longer than %d bytes", maxMetricsLine)
	}
	return kept, lines.Err()
}

// isAbout reports whether a line is a sample or a type of one of the names. A line that
// begins with { has its name inside.
func isAbout(line []byte, names []string) bool {
	line = bytes.TrimLeft(line, " \t")
	if comment, ok := bytes.CutPrefix(line, []byte("#")); ok {
		word := bytes.TrimLeft(comment, " \t")
		if word, ok = bytes.CutPrefix(word, []byte("TYPE")); !ok {
			return false
		}
		line = bytes.TrimLeft(word, " \t\"")
	}
	return bytes.HasPrefix(line, []byte("{")) || slices.ContainsFunc(names,
		func(name string) bool { return bytes.HasPrefix(line, []byte(name)) })
}
