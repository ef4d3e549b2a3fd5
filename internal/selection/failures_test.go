package selection

import (
	"encoding/json"
	"testing"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/outlier"
)

func TestAWorkerDoesAsItsWorstRank(t *testing.T) {
	until := time.Date(2026, 11, 22, 7, 0, 5, 0, time.UTC)
	rank := func(worker uint64, n uint32, state string) outlier.Record {
		return outlier.Record{Worker: kv.WorkerKey{Worker: worker, Rank: n}, State: state, Until: until, Reason: outlier.Broken, Row: int(n), SuccessRate: 0.5, Ejections: map[outlier.Kind]uint64{outlier.Broken: 2, outlier.Status: 1}}
	}
	for _, test := range []struct {
		name    string
		records []outlier.Record
		want    string
	}{
		{"not up", []outlier.Record{rank(1, 0, outlier.StateIn)}, `null`},
		{"in", []outlier.Record{rank(0, 0, outlier.StateIn)}, `{"state":"in","ejections":3,"consecutive_failures":0,"success_rate":0.5}`},
		{"held", []outlier.Record{rank(0, 0, outlier.StateHeld)}, `{"state":"held","held_until":"2026-11-22T07:00:05Z","ejections":3,"consecutive_failures":0,"success_rate":0.5}`},
		{"one rank is out", []outlier.Record{rank(0, 0, outlier.StateBack), rank(0, 1, outlier.StateOut), rank(0, 2, outlier.StateIn), rank(1, 3, outlier.StateOut)},
			`{"state":"ejected","reason":"broken","ejected_until":"2026-11-22T07:00:05Z","ejections":9,"consecutive_failures":1,"success_rate":0.5}`},
	} {
		if got, err := json.Marshal(failuresOf(test.records)[0]); err != nil || string(got) != test.want {
			t.Errorf("%s: %s, %v; want %s", test.name, got, err, test.want)
		}
	}
}
