package test

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

// The tests of the mesh put two kvrouters and one of Dynamo's selection services over the
// same workers. `make test-mesh` runs them: they need a Python with ai-dynamo-runtime,
// named by parityPython.

// meshNode is one router of the mesh.
type meshNode struct {
	url, endpoint string   // of its router port, and of its mesh's
	ours          *Router  // nil: it is Dynamo's
	reserved      []string // in flight from here
	computed      map[string]bool
}

// mesh is routers over the same workers, and their events.
type mesh struct {
	*testing.T
	nodes  []*meshNode
	specs  []map[string]any // of the workers
	random *rand.Rand
	made   int
}

const meshBlockSize = 4

func newMesh(t *testing.T) *mesh {
	m := &mesh{T: t, random: rand.New(rand.NewPCG(19, 3))}
	for id := range uint64(3) {
		ranks, endpoints := 1+int(id)/2, map[string]string{}
		for rank := range ranks {
			events, err := mocker.NewEvents("127.0.0.1:0", "127.0.0.1:0", meshBlockSize)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(events.Close)
			endpoints[fmt.Sprint(rank)] = events.Pub.Endpoint()
		}
		m.specs = append(m.specs, map[string]any{
			"worker_id": id + 1, "model_name": parityModel, "endpoint": BareWorker(t), "block_size": meshBlockSize,
			"kv_events_endpoints": endpoints, "data_parallel_start_rank": 0, "data_parallel_size": ranks,
		})
	}
	return m
}

// join has a router know the workers, then it and all that are there follow each other.
func (m *mesh) join(n *meshNode) {
	m.Helper()
	n.computed = map[string]bool{}
	for _, spec := range m.specs {
		if got := ask(m, n.url, "POST", "/workers", spec); got.status != 201 {
			m.Fatalf("%d %s", got.status, got.Raw)
		}
	}
	testkit.Eventually(m, 20*time.Second, "it has the workers", func() bool { return len(m.loads(n)) == 4 })
	for _, other := range m.nodes {
		m.register(n, other.endpoint)
		m.register(other, n.endpoint)
	}
	m.nodes = append(m.nodes, n)
}

// register adds a peer by its route, which answers as Dynamo's does.
func (m *mesh) register(n *meshNode, endpoint string) {
	m.Helper()
	query := map[string]string{"endpoint": endpoint}
	if got := ask(m, n.url, "POST", "/replica_sync/register_peer", query); got.status != 201 || got.Get("status").String() != "ok" {
		m.Fatalf("%d %s", got.status, got.Raw)
	}
	if got := ask(m, n.url, "POST", "/replica_sync/register_peer", query); got.status != 200 {
		m.Errorf("again: %d %s", got.status, got.Raw)
	}
	if got := ask(m, n.url, "GET", "/replica_sync/peers", nil); !slices.ContainsFunc(got.Array(), func(one gjson.Result) bool { return one.String() == endpoint }) {
		m.Errorf("%s is not among %s", endpoint, got.Raw)
	}
}

// ours starts a kvrouter.
func (m *mesh) ours() *meshNode {
	port := testkit.FreePorts(m, 3)
	r := StartAt(m, Program, port, nil, "--engine=none", "--policy=kv", fmt.Sprintf("--block-size=%d", meshBlockSize),
		"--replica-sync", fmt.Sprintf("--replica-sync-port=%d", port+2), "--session-header=x-session-id")
	return &meshNode{url: r.Port, endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", port+2), ours: r}
}

// theirs starts a service of Dynamo's.
func (m *mesh) theirs() *meshNode {
	port := testkit.FreePorts(m, 1)
	url := dynamoService(m.T, "--replica-sync-port", fmt.Sprint(port), "--session-affinity-ttl-secs", "600")
	return &meshNode{url: url, endpoint: fmt.Sprintf("tcp://127.0.0.1:%d", port)}
}

// loads returns the loads of every rank as a router sees them.
func (m *mesh) loads(n *meshNode) []string {
	return rows(ask(m, n.url, "GET", "/loads", nil).Get("0.loads"), "potential_prefill_tokens", "potential_decode_blocks", "active_requests")
}

// agree waits until all routers see the same loads.
func (m *mesh) agree(what string) []string {
	m.Helper()
	var all [][]string
	defer func() {
		if m.Failed() {
			for i, n := range m.nodes {
				m.Logf("%s, %d in flight from there: %v", n.url, len(n.reserved), all[i])
			}
		}
	}()
	testkit.Eventually(m, 5*time.Second, what, func() bool {
		all = nil
		for _, n := range m.nodes {
			all = append(all, m.loads(n))
		}
		return !slices.ContainsFunc(all, func(one []string) bool { return !slices.Equal(one, all[0]) })
	})
	return all[0]
}

// reserve has a router choose and book.
func (m *mesh) reserve(n *meshNode, more map[string]any) reply {
	m.Helper()
	m.made++
	query := map[string]any{"model_name": parityModel, "selection_id": fmt.Sprintf("reservation-%d", m.made), "token_ids": testkit.PromptTokens(m.random.IntN(50), 1+m.random.IntN(20))}
	for name, value := range more {
		query[name] = value
	}
	got := ask(m, n.url, "POST", "/select_and_reserve", query)
	if got.status != 200 {
		m.Fatalf("%d %s", got.status, got.Raw)
	}
	n.reserved = append(n.reserved, fmt.Sprintf("reservation-%d", m.made))
	return got
}

// free ends the reservation of that place.
func (m *mesh) free(n *meshNode, at int) {
	m.Helper()
	if got := ask(m, n.url, "DELETE", "/reservations/"+n.reserved[at], nil); got.status != 200 {
		m.Fatalf("%d %s", got.status, got.Raw)
	}
	n.reserved = slices.Delete(n.reserved, at, at+1)
}

// connect waits until every router hears every other: each books until all have seen it.
func (m *mesh) connect() {
	m.Helper()
	for _, n := range m.nodes {
		testkit.Eventually(m, 20*time.Second, "all hear "+n.url, func() bool {
			m.reserve(n, nil)
			want := m.loads(n)
			for range 20 {
				if !slices.ContainsFunc(m.nodes, func(other *meshNode) bool { return !slices.Equal(m.loads(other), want) }) {
					return true
				}
				<-time.After(10 * time.Millisecond)
			}
			m.free(n, len(n.reserved)-1)
			return false
		})
		m.free(n, len(n.reserved)-1)
		m.agree("nothing of it is in flight")
	}
}

func TestMeshWithDynamo(t *testing.T) {
	m := newMesh(t)
	for _, n := range []*meshNode{m.theirs(), m.ours(), m.ours()} {
		m.join(n)
	}
	m.connect()
	for range 1000 {
		n := m.nodes[m.random.IntN(len(m.nodes))]
		at := m.random.IntN(max(1, len(n.reserved)))
		switch what := m.random.IntN(5); {
		case len(n.reserved) < 5 || what < 2:
			m.reserve(n, map[string]any{"expected_output_tokens": 1 + m.random.IntN(100)})
		case what < 3 && !n.computed[n.reserved[at]]:
			n.computed[n.reserved[at]] = true
			if got := ask(m, n.url, "POST", "/reservations/"+n.reserved[at]+"/prefill_complete", nil); got.status != 200 {
				t.Fatalf("%d %s", got.status, got.Raw)
			}
		default:
			m.free(n, at)
		}
	}
	loads := m.agree("the loads are equal after 1,000 operations")
	t.Logf("%v", loads)

	// What one router has booked, a client may end at another one.
	theirs := m.nodes[0]
	for at, by := range m.nodes {
		to := m.nodes[(at+1)%len(m.nodes)]
		m.reserve(by, nil)
		m.agree("one more")
		id := by.reserved[len(by.reserved)-1]
		by.reserved = by.reserved[:len(by.reserved)-1]
		for _, call := range [][2]string{{"POST", "/prefill_complete"}, {"DELETE", ""}} {
			if got := ask(t, to.url, call[0], "/reservations/"+id+call[1], nil); got.status != 200 {
				t.Errorf("%s of %s at %s: %d %s", call[0], by.url, to.url, got.status, got.Raw)
			}
			m.agree("all know")
		}
	}
	if got := m.agree("as before"); !slices.Equal(got, loads) {
		t.Errorf("%v, before %v", got, loads)
	}

	// One of Dynamo's that comes late cannot ask, and is told all the same: by kvrouters.
	for len(theirs.reserved) > 0 {
		m.free(theirs, 0)
	}
	m.join(m.theirs())
	t.Logf("%v", m.agree("the late one knows what the kvrouters have in flight"))
	for _, n := range m.nodes {
		for len(n.reserved) > 0 {
			m.free(n, 0)
		}
	}
	for _, load := range m.agree("nothing is in flight") {
		if want := load[:3] + " potential_prefill_tokens=0 potential_decode_blocks=0 active_requests=0"; load != want {
			t.Errorf("in the end %s, want %s", load, want)
		}
	}
}

// TestMeshWithDynamoForgetsOneThatIsGone: what a service of Dynamo's had in flight when
// it was lost is in flight no more.
func TestMeshWithDynamoForgetsOneThatIsGone(t *testing.T) {
	m := newMesh(t)
	for _, n := range []*meshNode{m.ours(), m.theirs()} {
		m.join(n)
	}
	m.connect()
	ours, theirs := m.nodes[0], m.nodes[1]
	idle := m.loads(ours)
	m.reserve(theirs, nil)
	m.agree("its reservation is known")
	// It says nothing but its heartbeats for longer than it would be believed without them.
	quiet := time.Now().Add(25 * time.Second)
	for time.Now().Before(quiet) {
		if slices.Equal(m.loads(ours), idle) {
			t.Fatal("a service that is only quiet is forgotten")
		}
		<-time.After(time.Second)
	}
	if got := ask(t, ours.url, "POST", "/replica_sync/deregister_peer", map[string]string{"endpoint": theirs.endpoint}); got.status != 200 {
		t.Fatalf("%d %s", got.status, got.Raw)
	}
	testkit.Eventually(t, 5*time.Second, "its reservation ends", func() bool { return slices.Equal(m.loads(ours), idle) })
}

func TestMeshWithDynamoSharesSessions(t *testing.T) {
	m := newMesh(t)
	for _, n := range []*meshNode{m.ours(), m.theirs()} {
		m.join(n)
	}
	m.connect()
	ours, theirs := m.nodes[0], m.nodes[1]
	at := func(answer reply) kv.WorkerKey {
		return kv.WorkerKey{Worker: answer.Get("worker_id").Uint(), Rank: uint32(answer.Get("dp_rank").Uint())}
	}
	route := func(name string) kv.WorkerKey {
		body := mocker.MustJSON(map[string]any{"model": parityModel, "prompt": testkit.PromptTokens(m.random.IntN(50), 5)})
		request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, ours.ours.OpenAI+"/v1/completions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		request.Header.Set("Content-Type", "application/json")
		request.Header.Set("X-Session-Id", name)
		response, err := http.DefaultClient.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != http.StatusOK {
			t.Fatalf("%s %s: %v", response.Status, text, err)
		}
		worker, _ := strconv.ParseUint(response.Header.Get(web.HeaderWorker), 10, 64)
		rank, _ := strconv.ParseUint(gjson.GetBytes(text, "choices.0.text").Str, 10, 32)
		return kv.WorkerKey{Worker: worker, Rank: uint32(rank)}
	}
	for i := range 10 {
		name := fmt.Sprint("begun by Dynamo ", i)
		want := at(m.reserve(theirs, map[string]any{"session_id": name}))
		testkit.Eventually(t, 5*time.Second, "the session is known", func() bool {
			return int(ours.ours.Metrics()["kvrouter_sessions"]) == i+1
		})
		if got := route(name); got != want {
			t.Errorf("%s: at %v, want %v", name, got, want)
		}
	}
	for i := range 10 {
		name := fmt.Sprint("begun by kvrouter ", i)
		want := route(name)
		m.reserve(m.nodes[0], nil)
		m.agree("Dynamo has heard of what came after the session")
		if got := at(m.reserve(theirs, map[string]any{"session_id": name})); got != want {
			t.Errorf("%s: at %v, want %v", name, got, want)
		}
		m.agree("both know of that")
	}
}
