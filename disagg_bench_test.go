package main

import (
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/proxy"
	"kvrouter/internal/testkit"

	"github.com/tidwall/gjson"
)

// BenchmarkHandover is what passes from a prefill worker's answer to the decode
// request: inside is from the answer's last byte read to the request's last byte
// written, outside from the prefill worker's last write to the decode worker's
// handler, the way over both sockets included. Medians, and the 99th percentile
// of the inside.
func BenchmarkHandover(b *testing.B) {
	for _, size := range []int{2_000, 200_000} {
		b.Run(fmt.Sprintf("%dKB", size/1000), func(b *testing.B) {
			var answered time.Time
			var outside []float64
			h := newTestPairAPI(b, Config{}, kv.KindNIXL, 1, 1, func(id uint64, serve engineServe) engineServe {
				if id == 0 {
					return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
						serve(w, r, body)
						answered = time.Now()
					}
				}
				return func(w http.ResponseWriter, r *http.Request, body gjson.Result) {
					outside = append(outside, float64(time.Since(answered))/float64(time.Millisecond))
					serve(w, r, body)
				}
			})
			body := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}]}`, strings.Repeat("word ", size/5))
			var inside []float64
			for b.Loop() {
				response, answer := h.post(b, testkit.ChatPath, body)
				took, err := strconv.ParseFloat(response.Header.Get(proxy.HeaderHandoverTime), 64)
				if err != nil {
					b.Fatalf("%s: %s", response.Status, answer)
				}
				inside = append(inside, took)
			}
			slices.Sort(inside)
			slices.Sort(outside)
			b.ReportMetric(inside[len(inside)/2]*1000, "inside-p50-µs")
			b.ReportMetric(inside[len(inside)*99/100]*1000, "inside-p99-µs")
			b.ReportMetric(outside[len(outside)/2]*1000, "outside-p50-µs")
		})
	}
}
