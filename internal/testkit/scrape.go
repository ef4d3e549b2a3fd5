package testkit

import (
	"iter"
	"net/http/httptest"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Scrape returns the metrics page of the collectors.
func Scrape(t testing.TB, collectors ...prometheus.Collector) MetricsLines {
	t.Helper()
	registry := prometheus.NewPedanticRegistry()
	for _, c := range collectors {
		if err := registry.Register(c); err != nil {
			t.Fatal(err)
		}
	}
	w := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
	if w.Code != 200 {
		t.Fatal(w.Body)
	}
	return ReadMetricsPage(w.Body.String())
}

// Each is the sequence of what list returns when it is ranged over.
func Each[T any](list func() []T) iter.Seq[*T] {
	return func(yield func(*T) bool) {
		all := list()
		for i := range all {
			if !yield(&all[i]) {
				return
			}
		}
	}
}
