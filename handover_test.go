package main

import (
	"strings"
	"testing"
)

func TestSimulatedPartsAreCheckedBeforeTheRun(t *testing.T) {
	for args, says := range map[string]string{
		"--workers=4 --prefill-workers=2 --decode-workers=2":                                    "give either --workers",
		"--prefill-workers=2":                                                                   "at least 1 of each",
		"--prefill-workers=2 --decode-workers=-1":                                               "at least 1 of each",
		"--prefill-workers=600 --decode-workers=600":                                            "1200 workers",
		"--prefill-workers=1 --decode-workers=1 --enforce-disagg":                               "leave it out",
		"--prefill-workers=1 --decode-workers=1 --mock-kv-transfer-bandwidth=0":                 "more than 0",
		"--prefill-workers=1 --decode-workers=1 --mock-kv-lease=0s":                             "more than 0",
		"--prefill-workers=1 --decode-workers=1 --disagg-min-uncached-tokens=-1":                "negative",
		"--prefill-workers=2 --decode-workers=6 --mock-kv-transfer-bandwidth=25 --policy=kv":    "",
		"--prefill-workers=1 --decode-workers=1 --mock-slow-worker=2=3 --speedup-ratio=2":       "0 to 1",
		"--prefill-workers=1 --decode-workers=1 --mock-slow-worker=1=3 --mock-disagg-kind=both": "mock-disagg-kind",
	} {
		_, _, err := ParseConfig(append([]string{"simulate", "--trace=t", "--concurrency=1"}, strings.Fields(args)...))
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%s: %v, want %q", args, err, says)
		}
	}
}
