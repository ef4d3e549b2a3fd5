package metrics

import (
	"math"
	"testing"
)

func TestQuantilesAreThoseOfPrometheus(t *testing.T) {
	bounds := []float64{1, 2, 4}
	tests := []struct {
		name   string
		counts []uint64
		q      float64
		want   float64 // NaN: none
	}{
		{"nothing", []uint64{0, 0, 0, 0}, 0.5, math.NaN()},
		{"no histogram", nil, 0.5, math.NaN()},
		{"within the first", []uint64{10, 10, 10, 10}, 0.5, 0.5},
		{"between two bounds", []uint64{0, 10, 10, 10}, 0.5, 1.5},
		{"at a bound", []uint64{5, 10, 10, 10}, 0.5, 1},
		{"beyond the last", []uint64{0, 0, 0, 3}, 0.99, 4},
		{"the highest but one", []uint64{0, 98, 100, 100}, 0.99, 3},
	}
	for _, test := range tests {
		h := Histogram{Counts: test.counts}
		if test.counts != nil {
			h.Bounds = bounds
		}
		got := h.Quantile(test.q)
		if got == nil != math.IsNaN(test.want) || got != nil && math.Abs(*got-test.want) > 1e-9 {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

func TestHistogramsAddAndSubtract(t *testing.T) {
	var sum Histogram
	one := Histogram{[]float64{1, 2}, []uint64{1, 2, 3}}
	sum.Add(one)
	sum.Add(one)
	if d := sum.Since(one); d.Counts[2] != 3 || sum.Counts[2] != 6 || one.Counts[2] != 3 {
		t.Errorf("%v, %v, %v", sum, d, one)
	}
	if d := one.Since(sum); d.Counts[0] != 0 || d.Counts[2] != 0 {
		t.Errorf("less than none: %v", d)
	}
}
