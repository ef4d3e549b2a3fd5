package main

import (
	"fmt"
	"os"
	"testing"
	"time"
)

func TestScratchRows(t *testing.T) {
	pol := os.Getenv("POL")
	if pol == "" {
		t.Skip()
	}
	for _, tr := range []string{"conversation", "synthetic"} {
		if only := os.Getenv("TR"); only != "" && only != tr {
			continue
		}
		reqs, err := ReadTrace("/work/shared/traces/" + tr + "_trace.jsonl.gz")
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range []float64{64, 256, 512, 1, 2} {
			if only := os.Getenv("LOAD"); only != "" && only != fmt.Sprint(l) {
				continue
			}
			s := Simulation{Requests: reqs, Policy: pol, Knobs: DefaultPolicyKnobs(), Workers: 8, Engine: DefaultSimConfig(), Seed: 1}
			if l >= 64 {
				s.Concurrency = int(l)
			} else {
				s.Speedup = l
			}
			if os.Getenv("TUNED") != "" {
				s.Knobs.PrefillLoadScale, s.Knobs.OverlapScoreCredit = 8, 2
			}
			b := time.Now()
			r, err := s.Run()
			if err != nil {
				t.Fatal(err)
			}
			fmt.Printf("%-12s %3.0f | %.3f %.3f | %7.1f | %5.0f | %7.1f / %.1f / %.1f / %.1f | %.1f | %.1f  (%v)\n", tr, l, r.Reuse, r.Predicted, r.MakespanS, r.OutputPerSec, r.TTFT.Mean, r.TTFT.P50, r.TTFT.P90, r.TTFT.P99, r.ITL.Mean, r.EndToEnd.Mean, time.Since(b))
		}
	}
}
