package simulate

import (
	"bytes"
	"fmt"
	"html"
	"math"
	"strings"
)

// Size of a chart, in pixels, and its margins.
const (
	chartWidth  = 900
	chartHeight = 320
	chartMargin = 50
)

// plotReports returns a page, complete in itself, with the share of requests
// that had their first token within a time, by policy, and the requests in
// flight over time, by worker.
func plotReports(reports []*Report) []byte {
	var page bytes.Buffer
	page.WriteString("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>kvrouter simulate</title>\n" +
		"<style>body{font:14px sans-serif;margin:2em}svg{background:#fafafa}text{font-size:11px}</style>\n")
	longest := 1.0
	for _, r := range reports {
		longest = max(longest, r.ttft[len(r.ttft)-1])
	}
	page.WriteString("<h2>Requests with a first token within a time</h2>\n")
	chart := newChart("ms to the first token (logarithmic)", "share of requests", 1, 1)
	chart.ticks(func(x float64) string { return fmt.Sprintf("%.0f", math.Pow(longest, x)) },
		func(y float64) string { return fmt.Sprintf("%.1f", y) })
	for i, r := range reports {
		var points [][2]float64
		const steps = 400
		for step := range steps + 1 {
			at := step * (len(r.ttft) - 1) / steps
			points = append(points, [2]float64{math.Log(max(1, r.ttft[at])) / math.Log(max(2, longest)), float64(step) / steps})
		}
		chart.line(points, i, len(reports), r.Policy)
	}
	page.WriteString(chart.svg())
	for _, r := range reports {
		most := 1
		for _, slice := range r.load {
			for _, n := range slice {
				most = max(most, n)
			}
		}
		fmt.Fprintf(&page, "<h2>%s: requests in flight by worker</h2>\n", html.EscapeString(r.Policy))
		chart := newChart("s", "requests", r.MakespanS, float64(most))
		chart.ticks(func(x float64) string { return fmt.Sprintf("%.0f", x) }, func(y float64) string { return fmt.Sprintf("%.0f", y) })
		for w := range r.Workers {
			var points [][2]float64
			for i, slice := range r.load {
				points = append(points, [2]float64{r.MakespanS * float64(i) / loadSlices, float64(slice[w])})
			}
			chart.line(points, w, r.Workers, fmt.Sprint(w))
		}
		page.WriteString(chart.svg())
	}
	page.WriteString("</html>\n")
	return page.Bytes()
}

// chart is one SVG picture of lines over axes that start at 0.
type chart struct {
	body       strings.Builder
	maxX, maxY float64
}

func newChart(xTitle, yTitle string, maxX, maxY float64) *chart {
	c := &chart{maxX: maxX, maxY: maxY}
	fmt.Fprintf(&c.body, `<text x="%d" y="%d" text-anchor="middle">%s</text><text x="6" y="14">%s</text>`,
		chartWidth/2, chartHeight-6, html.EscapeString(xTitle), html.EscapeString(yTitle))
	return c
}

// at returns the pixel of a point.
func (c *chart) at(x, y float64) (px, py float64) {
	return chartMargin + x/c.maxX*(chartWidth-3*chartMargin), chartHeight - chartMargin - y/c.maxY*(chartHeight-2*chartMargin)
}

// ticks draws five grid lines each way.
func (c *chart) ticks(x, y func(float64) string) {
	for i := range 6 {
		part := float64(i) / 5
		px, py := c.at(part*c.maxX, part*c.maxY)
		left, bottom := c.at(0, 0)
		right, top := c.at(c.maxX, c.maxY)
		fmt.Fprintf(&c.body, `<path d="M%.1f %.1fV%.1fM%.1f %.1fH%.1f" stroke="#ddd" fill="none"/>`, px, bottom, top, left, py, right)
		fmt.Fprintf(&c.body, `<text x="%.1f" y="%.1f" text-anchor="middle">%s</text>`, px, bottom+14, x(part*c.maxX))
		fmt.Fprintf(&c.body, `<text x="%.1f" y="%.1f" text-anchor="end">%s</text>`, left-5, py+4, y(part*c.maxY))
	}
}

// line draws line i of n, in a colour of its own, and names it.
func (c *chart) line(points [][2]float64, i, n int, name string) {
	colour := fmt.Sprintf("hsl(%d,70%%,40%%)", 360*i/n)
	fmt.Fprintf(&c.body, `<polyline fill="none" stroke="%s" points="`, colour)
	for _, p := range points {
		px, py := c.at(p[0], p[1])
		fmt.Fprintf(&c.body, "%.1f,%.1f ", px, py)
	}
	fmt.Fprintf(&c.body, `"/><text x="%d" y="%d" fill="%s">%s</text>`, chartWidth-90, 30+14*i, colour, html.EscapeString(name))
}

func (c *chart) svg() string {
	return fmt.Sprintf("<svg width=\"%d\" height=\"%d\">%s</svg>\n", chartWidth, chartHeight, c.body.String())
}
