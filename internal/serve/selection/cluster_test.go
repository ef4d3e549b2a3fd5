package selection

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/cluster"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/routertest"
)

// showsCluster returns what GET /cluster answers over a router that shares its state by a link; nil: by none.
func showsCluster(t *testing.T, rt *router.Router, link replica.Link) func(headers ...string) (int, gjson.Result) {
	t.Helper()
	deps := testDeps(rt, nil)
	if link != nil {
		deps.Mesh = replica.New(replica.Deps{Router: rt, Log: deps.Log, Link: link})
		ctx, cancel := context.WithCancel(t.Context())
		var running sync.WaitGroup
		running.Go(func() { deps.Mesh.Run(ctx) })
		t.Cleanup(func() {
			cancel()
			running.Wait()
		})
	}
	handler := New(Settings{Keys: web.NewKeys([]string{"key"})}, deps).Handler()
	return func(headers ...string) (int, gjson.Result) {
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1/cluster", nil)
		for i := 0; i < len(headers); i += 2 {
			request.Header.Set(headers[i], headers[i+1])
		}
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		return answer.Code, gjson.Parse(answer.Body.String())
	}
}

// fieldsOf returns the names of an object's fields.
func fieldsOf(object gjson.Result) string {
	return strings.Join(slices.Sorted(maps.Keys(object.Map())), " ")
}

const (
	fieldsOfCounts = "dropped lost missed received refused resent sent unsent"
	authorization  = "Authorization"
)

func TestClusterIsShown(t *testing.T) {
	port := testkit.FreePorts(t, 1)
	join := func(port int, peers ...string) (ask func(headers ...string) (int, gjson.Result)) {
		link, err := cluster.Open(cluster.Settings{Cluster: "fleet1", ClusterHost: "127.0.0.1", ClusterPort: port, ClusterPeers: peers},
			cluster.Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)})
		if err != nil {
			t.Fatal(err)
		}
		return showsCluster(t, routertest.New(t, "kv", 1), link)
	}
	one, two := join(port), join(0, fmt.Sprintf("127.0.0.1:%d", port))
	if status, answer := one(); status != http.StatusUnauthorized {
		t.Errorf("without a key: %d %s", status, answer.Raw)
	}
	var shown gjson.Result
	testkit.Eventually(t, 20*time.Second, "a member, and the round trip to it", func() bool {
		_, shown = one(authorization, "Bearer key")
		return len(shown.Get("members").Array()) == 1 && shown.Get("routes.0.round_trip_seconds").Float() > 0
	})
	_, other := two(authorization, "Bearer key")
	for path, want := range map[string]string{
		"kind": "embedded", "name": "fleet1", "connected": "true", "id": other.Get("members.0.id").Str, "members.0.id": other.Get("id").Str,
		"members.0.kvrouter": "true", "members.0.in_flight": "0", "members.0.no_worker": "0", "members.0.differing_digests": "0",
		"routes.0.id": other.Get("id").Str,
	} {
		if got := shown.Get(path).String(); got != want || got == "" {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	if _, err := time.Parse(time.RFC3339, shown.Get("members.0.since").Str); err != nil {
		t.Error(err)
	}
	for path, want := range map[string]string{
		"@this": "connected counts id kind members name round_trip_seconds routes", "counts": fieldsOfCounts,
		"members.0": "differing_digests id in_flight kvrouter lag_seconds no_worker since",
		"routes.0":  "address id messages_in messages_out pending_bytes round_trip_seconds",
	} {
		if got := fieldsOf(shown.Get(path)); got != want {
			t.Errorf("%s has the fields %s, want %s", path, got, want)
		}
	}
}

func TestNoClusterIsAConflict(t *testing.T) {
	ask := showsCluster(t, routertest.New(t, "kv", 1), nil)
	if status, answer := ask(authorization, "Bearer key"); status != http.StatusConflict || !strings.Contains(answer.Get("error").Str, "--cluster") {
		t.Errorf("%d %s", status, answer.Raw)
	}
}

func TestDynamosMeshHasNoRoutes(t *testing.T) {
	link, err := dynamo.Open(dynamo.Settings{ReplicaSyncHost: "127.0.0.1"}, dynamo.Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	status, answer := showsCluster(t, routertest.New(t, "kv", 1), link)(authorization, "Bearer key")
	if got := fieldsOf(answer); status != http.StatusOK || got != "connected counts kind members round_trip_seconds" || answer.Get("kind").Str != "dynamo" {
		t.Errorf("%d %s", status, answer.Raw)
	}
	if answer.Get("members").Raw != "[]" || answer.Get("connected").Bool() || fieldsOf(answer.Get("counts")) != fieldsOfCounts {
		t.Errorf("%s", answer.Raw)
	}
}
