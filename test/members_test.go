package test

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/natstest"
)

// cluster returns what a router shows of its cluster.
func cluster(r *Router) gjson.Result {
	r.T.Helper()
	return gjson.ParseBytes(r.Get(r.Port + "/cluster"))
}

// TestOperatorsSeeTheCluster: who is in it, over which connections, and what is in flight there.
func TestOperatorsSeeTheCluster(t *testing.T) {
	workers := StartWorkers(t, 2)
	own := testkit.FreePorts(t, 2)
	operators := natstest.Start(t, server.RANDOM_PORT)
	for name, flags := range map[string][2][]string{
		"embedded": {
			{"--cluster=fleet1", "--cluster-key=0123456789abcdef", fmt.Sprintf("--cluster-port=%d", own)},
			{"--cluster=fleet1", "--cluster-key=0123456789abcdef", fmt.Sprintf("--cluster-port=%d", own+1), fmt.Sprintf("--cluster-peers=127.0.0.1:%d", own)},
		},
		"existing": {{"--cluster=" + operators.ClientURL()}, {"--cluster=" + operators.ClientURL()}},
	} {
		t.Run(name, func(t *testing.T) {
			first, second := StartOver(t, workers, flags[0]...), StartOver(t, workers, flags[1]...)
			if status, answer := Post(t, second.Port+"/select_and_reserve", `{"selection_id":"a","token_ids":[1,2,3]}`); status != http.StatusOK {
				t.Fatalf("%d %s", status, answer)
			}
			trip := map[string]string{"embedded": "routes.0.round_trip_seconds", "existing": "round_trip_seconds"}[name]
			var shown, other gjson.Result
			testkit.Eventually(t, 20*time.Second, "each other, a request, and the round trip", func() bool {
				shown, other = cluster(first.Router), cluster(second.Router)
				both := shown.Get("members.0.kvrouter").Bool() && other.Get("members.0.kvrouter").Bool()
				return both && shown.Get("members.0.in_flight").Int() == 1 && shown.Get(trip).Float() > 0
			})
			for path, want := range map[string]any{
				"kind": name, "connected": true, "id": other.Get("members.0.id").Str, "members.#": 1.0, "members.0.id": other.Get("id").Str,
				"members.0.no_worker": 0.0, "counts.unsent": 0.0, "counts.missed": 0.0,
			} {
				if got := shown.Get(path).Value(); got != want {
					t.Errorf("%s is %v, want %v", path, got, want)
				}
			}
			if lag := shown.Get("members.0.lag_seconds").Float(); lag > 5 {
				t.Errorf("last heard %f s ago", lag)
			}
			switch routes := shown.Get("routes.#").Int(); name {
			case "embedded":
				if routes != 1 || shown.Get("routes.0.id").Str != other.Get("id").Str || shown.Get("name").Str != "fleet1" {
					t.Errorf("%s", shown.Raw)
				}
			default:
				if routes != 0 || shown.Get("server").Str != operators.ClientURL() || shown.Get("name").Str != "kvrouter" {
					t.Errorf("%s", shown.Raw)
				}
			}
			second.Stop()
			testkit.Eventually(t, 20*time.Second, "the other router has left", func() bool {
				shown := cluster(first.Router)
				return shown.Get("members.#").Int() == 0 && shown.Get("routes.#").Int() == 0
			})
		})
	}
}

func TestARouterAloneShowsNoCluster(t *testing.T) {
	r := StartMocker(t, 1)
	if status, answer := testkit.HTTPGet(t, r.Port+"/cluster"); status != http.StatusConflict {
		t.Errorf("%d %s", status, answer)
	}
}
