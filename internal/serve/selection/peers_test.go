package selection

import (
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"kvrouter/internal/base/guard"
	"kvrouter/internal/peers/dynamo"
	"kvrouter/internal/testkit/routertest"
)

// peersPort returns a router port with that link; a body goes with POST, none with GET.
func peersPort(t *testing.T, link *dynamo.Link) (ask func(path, body string) (int, string)) {
	t.Helper()
	deps := testDeps(routertest.New(t, "round-robin", 0), nil)
	deps.Dynamo = link
	handler := New(Settings{}, deps).Handler()
	return func(path, body string) (int, string) {
		method := http.MethodPost
		if body == "" {
			method = http.MethodGet
		}
		request := httptest.NewRequest(method, "http://127.0.0.1"+path, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		answer := httptest.NewRecorder()
		handler.ServeHTTP(answer, request)
		return answer.Code, answer.Body.String()
	}
}

// TestPeersComeAndGoAsAtDynamo: the answers are those of Dynamo 1.6.1, but for the
// words after «bad body» and «invalid TCP port».
func TestPeersComeAndGoAsAtDynamo(t *testing.T) {
	link, err := dynamo.Open(dynamo.Settings{ReplicaSyncHost: "127.0.0.1", ReplicaPeers: []string{"named:7100"}}, dynamo.Deps{Edges: guard.New(), Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	ask := peersPort(t, link)
	const ok, register, deregister = `{"status":"ok"}`, "/replica_sync/register_peer", "/replica_sync/deregister_peer"
	invalid := func(endpoint, why string) string {
		return fmt.Sprintf("{\"error\":\"invalid ZMQ endpoint `%s`: %s\"}", endpoint, why)
	}
	one := `{"endpoint":"tcp://127.0.0.1:29001"}`
	for _, test := range []struct {
		path, body string
		status     int
		want       string
	}{
		{"/replica_sync/peers", "", 200, `["tcp://named:7100"]`},
		{register, one, 201, ok},
		{register, one, 200, ok},
		{"/replica_sync/peers", "", 200, `["tcp://127.0.0.1:29001","tcp://named:7100"]`},
		{register, `{"endpoint":"x"}`, 400, invalid("x", "missing scheme")},
		{register, `{"endpoint":"tcp://x"}`, 400, invalid("tcp://x", "missing TCP port")},
		{register, `{"endpoint":"tcp://:1"}`, 400, invalid("tcp://:1", "missing TCP host")},
		{register, `{"endpoint":"udp://a:1"}`, 400, invalid("udp://a:1", "unsupported scheme `udp`")},
		{register, `{"endpoint":"tcp://"}`, 400, invalid("tcp://", "missing address")},
		{register, `{"endpoint":"tcp://a:99999"}`, 400, invalid("tcp://a:99999", "invalid TCP port: want 1 to 65535")},
		{register, `{"endpoint":"tcp://a:x"}`, 400, invalid("tcp://a:x", "invalid TCP port: want 1 to 65535")},
		{register, `{"endpoint":"tcp://[::1:5"}`, 400, invalid("tcp://[::1:5", "missing closing `]`")},
		{register, `{"endpoint":"tcp://::1:5"}`, 400, invalid("tcp://::1:5", "missing TCP port")},
		{register, `{"endpoint":"tcp://[::1]:5"}`, 201, ok},
		{register, `{}`, 422, `{"error":"bad body: endpoint is missing"}`},
		{register, `{"endpoint":5}`, 422, `{"error":"bad body: endpoint cannot be a JSON number"}`},
		{deregister, one, 200, ok},
		{deregister, one, 404, `{"error":"peer not found"}`},
		{deregister, `{"endpoint":"x"}`, 400, invalid("x", "missing scheme")},
	} {
		if status, text := ask(test.path, test.body); status != test.status || text != test.want {
			t.Errorf("%s %s: %d %s, want %d %s", test.path, test.body, status, text, test.status, test.want)
		}
	}
	for i := range 200 {
		ask(register, fmt.Sprintf(`{"endpoint":"tcp://10.0.0.1:%d"}`, 1000+i))
	}
	if status, text := ask(register, `{"endpoint":"tcp://10.0.0.1:999"}`); status != 503 || len(link.Peers()) != 128 {
		t.Errorf("%d %s with %d peers", status, text, len(link.Peers()))
	}
}

func TestPeersWithoutReplicaSync(t *testing.T) {
	ask := peersPort(t, nil)
	for _, path := range []string{"/replica_sync/register_peer", "/replica_sync/deregister_peer"} {
		if status, text := ask(path, `{"endpoint":"tcp://127.0.0.1:1"}`); status != 409 || text != `{"error":"replica sync is disabled"}` {
			t.Errorf("%s: %d %s", path, status, text)
		}
	}
	if status, text := ask("/replica_sync/peers", ""); status != 200 || text != "[]" {
		t.Errorf("%d %s", status, text)
	}
}
