package selection

import (
	"encoding/json"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/health"
)

func TestAWorkerDoesAsItsWorstRank(t *testing.T) {
	until := time.Date(2026, 11, 22, 7, 0, 5, 0, time.UTC)
	rank := func(worker uint64, n uint32, state string) health.Record {
		return health.Record{Worker: kv.WorkerKey{Worker: worker, Rank: n}, State: state, Until: until, Reason: health.Broken, Row: int(n), SuccessRate: 0.5, Ejections: map[health.Kind]uint64{health.Broken: 2, health.Status: 1}}
	}
	for _, test := range []struct {
		name    string
		records []health.Record
		want    string
	}{
		{"not up", []health.Record{rank(1, 0, health.StateIn)}, `null`},
		{"in", []health.Record{rank(0, 0, health.StateIn)}, `{"state":"in","ejections":3,"consecutive_failures":0,"success_rate":0.5}`},
		{"held", []health.Record{rank(0, 0, health.StateHeld)}, `{"state":"held","held_until":"2026-11-22T07:00:05Z","ejections":3,"consecutive_failures":0,"success_rate":0.5}`},
		{"one rank is out", []health.Record{rank(0, 0, health.StateBack), rank(0, 1, health.StateOut), rank(0, 2, health.StateIn), rank(1, 3, health.StateOut)},
			`{"state":"ejected","reason":"broken","ejected_until":"2026-11-22T07:00:05Z","ejections":9,"consecutive_failures":1,"success_rate":0.5}`},
	} {
		if got, err := json.Marshal(failuresOf(test.records)[0]); err != nil || string(got) != test.want {
			t.Errorf("%s: %s, %v; want %s", test.name, got, err, test.want)
		}
	}
}
