// Package kubetest is a fake Kubernetes API server with the subset that tests of several
// packages need.
package kubetest

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"kvrouter/internal/testkit"
)

// Server answers lists and watches of Pods, InferencePools and EndpointSlices in namespace
// ns, with faults injected by the test. It can stop and start again at the same address.
type Server struct {
	t       testing.TB
	Address string // host:port
	server  *httptest.Server
	end     context.CancelFunc // ends the watches of server, also those that begin later

	mu       sync.Mutex // guards the rest
	version  int
	oldest   int // the least version from which a watch may resume
	objects  map[string]object
	changes  []change
	news     chan struct{}                                                  // closed when there is another change, or no watch may continue
	cut      int                                                            // counts the times that all watches were ended
	refuses  map[string]int                                                 // status, by "verb resource"
	noStream bool                                                           // it knows no sendInitialEvents
	asked    map[string]int                                                 // by "verb resource"
	instead  func(w http.ResponseWriter, r *http.Request, verb string) bool // may answer itself; nil: it does not
}

// object is a stored object.
type object struct {
	resource string
	content  map[string]any
}

// change is a transition of an object from one state to the next; nil: absent.
type change struct {
	version       int
	before, after *object
}

// New starts a server, which is stopped at the end of the test.
func New(t testing.TB) *Server {
	t.Helper()
	s := &Server{t: t, Address: fmt.Sprintf("127.0.0.1:%d", testkit.FreePorts(t, 1)), version: 100, objects: map[string]object{},
		news: make(chan struct{}), refuses: map[string]int{}, asked: map[string]int{}}
	s.Start()
	t.Cleanup(s.Stop)
	return s
}

// Start opens the port, also after Stop.
func (s *Server) Start() {
	s.t.Helper()
	listener, err := net.Listen("tcp", s.Address)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, end := context.WithCancel(context.Background())
	s.end = end
	s.server = &httptest.Server{Listener: listener, Config: &http.Server{Handler: s,
		BaseContext: func(net.Listener) context.Context { return ctx }}}
	s.server.Start()
}

// Stop ends the server, with all its watches.
func (s *Server) Stop() {
	if s.server == nil {
		return
	}
	s.end()
	s.server.CloseClientConnections()
	s.server.Close()
	s.server = nil
}

// EndWatches ends all watches that run.
func (s *Server) EndWatches() {
	s.set(func() { s.cut++ })
}

// set changes the behaviour of the server.
func (s *Server) set(do func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	do()
	close(s.news)
	s.news = make(chan struct{})
}

// Forget discards the history: a watch from an earlier version returns 410 Gone.
func (s *Server) Forget() {
	s.set(func() { s.oldest, s.changes = s.version+1, nil; s.version++ })
}

// put creates or changes an object.
func (s *Server) put(resource, name string, content map[string]any) {
	s.set(func() {
		s.version++
		key := resource + "/" + name
		content = maps.Clone(content)
		meta, _ := content["metadata"].(map[string]any)
		meta = maps.Clone(meta)
		if meta == nil {
			meta = map[string]any{}
		}
		meta["name"], meta["namespace"], meta["resourceVersion"] = name, "ns", strconv.Itoa(s.version)
		content["metadata"] = meta
		step := change{version: s.version}
		if old, was := s.objects[key]; was {
			step.before = &old
		}
		next := object{resource, content}
		step.after, s.objects[key] = &next, next
		s.changes = append(s.changes, step)
	})
}

// Remove removes an object.
func (s *Server) Remove(resource, name string) {
	s.set(func() {
		s.version++
		key := resource + "/" + name
		old := s.objects[key]
		delete(s.objects, key)
		s.changes = append(s.changes, change{version: s.version, before: &old})
	})
}

// Questions is the number of such requests: list pods, watch pods, ...
func (s *Server) Questions(what string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[what]
}

// status writes an error response in Kubernetes' format.
func status(w http.ResponseWriter, code int, reason, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
		"message": message, "code": code})
}

// ServeHTTP answers a list or a watch.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var resource string
	switch r.URL.Path {
	case "/api/v1/namespaces/ns/pods":
		resource = "pods"
	case "/apis/inference.networking.k8s.io/v1/namespaces/ns/inferencepools":
		resource = "inferencepools"
	case "/apis/discovery.k8s.io/v1/namespaces/ns/endpointslices":
		resource = "endpointslices"
	default:
		status(w, 404, "NotFound", "the server could not find the requested resource")
		return
	}
	query := r.URL.Query()
	byLabel, err := labels.Parse(query.Get("labelSelector"))
	if err != nil {
		status(w, 400, "BadRequest", err.Error())
		return
	}
	byField, err := fields.ParseSelector(query.Get("fieldSelector"))
	if err != nil {
		status(w, 400, "BadRequest", err.Error())
		return
	}
	wanted := func(o *object) bool {
		if o == nil || o.resource != resource {
			return false
		}
		u := unstructured.Unstructured{Object: o.content}
		return byLabel.Matches(labels.Set(u.GetLabels())) && byField.Matches(fields.Set{"metadata.name": u.GetName()})
	}
	verb := "list"
	if query.Get("watch") != "" {
		verb = "watch"
	}
	s.mu.Lock()
	s.asked[verb+" "+resource]++
	code, noStream, instead := s.refuses[verb+" "+resource], s.noStream, s.instead
	s.mu.Unlock()
	switch {
	case instead != nil && instead(w, r, verb):
	case code == 403:
		status(w, 403, "Forbidden",
			fmt.Sprintf(`%s is forbidden: User "system:serviceaccount:ns:router" cannot %s resource "%s" in API group "" in the namespace "ns"`,
				resource, verb, resource))
	case code == 401:
		status(w, 401, "Unauthorized", "Unauthorized")
	case code == 404:
		status(w, 404, "NotFound", "the server could not find the requested resource")
	case code != 0:
		status(w, code, "InternalError", "etcdserver: request timed out")
	case verb == "list":
		s.list(w, resource, wanted)
	case noStream && query.Get("sendInitialEvents") != "":
		status(w, 422, "Invalid", "sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled")
	default:
		s.watch(w, r, resource, wanted, query.Get("resourceVersion"), query.Get("sendInitialEvents") == "true")
	}
}

func (s *Server) list(w http.ResponseWriter, resource string, wanted func(*object) bool) {
	s.mu.Lock()
	items := []map[string]any{}
	for _, key := range slices.Sorted(maps.Keys(s.objects)) {
		if o := s.objects[key]; wanted(&o) {
			items = append(items, o.content)
		}
	}
	version := strconv.Itoa(s.version)
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(map[string]any{"kind": kinds[resource] + "List", "apiVersion": apiVersions[resource],
		"metadata": map[string]any{"resourceVersion": version}, "items": items})
}

// Kinds of the objects of each resource.
var (
	kinds       = map[string]string{"pods": "Pod", "inferencepools": "InferencePool", "endpointslices": "EndpointSlice"}
	apiVersions = map[string]string{"pods": "v1", "inferencepools": "inference.networking.k8s.io/v1", "endpointslices": "discovery.k8s.io/v1"}
)

// watch streams changes until it is ended or the client disconnects.
func (s *Server) watch(w http.ResponseWriter, r *http.Request, resource string, wanted func(*object) bool, from string, initial bool) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	emit := func(kind string, content map[string]any) {
		_ = encoder.Encode(map[string]any{"type": kind, "object": content})
	}
	seen, _ := strconv.Atoi(from)
	s.mu.Lock()
	cut := s.cut
	if initial {
		for _, key := range slices.Sorted(maps.Keys(s.objects)) {
			if o := s.objects[key]; wanted(&o) {
				emit("ADDED", o.content)
			}
		}
		seen = s.version
		emit("BOOKMARK", map[string]any{"kind": kinds[resource], "apiVersion": apiVersions[resource],
			"metadata": map[string]any{"resourceVersion": strconv.Itoa(seen), "annotations": map[string]any{"k8s.io/initial-events-end": "true"}}})
	} else if seen < s.oldest {
		emit("ERROR", map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired",
			"message": "too old resource version", "code": 410})
		s.mu.Unlock()
		return
	}
	for {
		for _, c := range s.changes {
			if c.version <= seen {
				continue
			}
			seen = c.version
			switch before, after := wanted(c.before), wanted(c.after); {
			case before && after:
				emit("MODIFIED", c.after.content)
			case after:
				emit("ADDED", c.after.content)
			case before:
				emit("DELETED", c.before.content)
			}
		}
		news := s.news
		s.mu.Unlock()
		w.(http.Flusher).Flush()
		select {
		case <-news:
		case <-r.Context().Done():
			return
		}
		s.mu.Lock()
		if s.cut != cut {
			s.mu.Unlock()
			return
		}
	}
}

// Pod is a Pod of the API server. Its labels default to app=vllm.
type Pod struct {
	UID, IP             string
	Labels, Annotations map[string]any
	NotReady, Ending    bool
	Phase               string
}

// Content is the Pod in JSON.
func (p Pod) Content() map[string]any {
	meta := map[string]any{"uid": p.UID, "labels": map[string]any{"app": "vllm"}}
	if p.Labels != nil {
		meta["labels"] = p.Labels
	}
	if p.Annotations != nil {
		meta["annotations"] = p.Annotations
	}
	if p.Ending {
		meta["deletionTimestamp"] = "2001-01-01T00:00:00Z" // by a clock of its own
	}
	ready := "True"
	if p.NotReady {
		ready = "False"
	}
	return map[string]any{
		"kind": "Pod", "apiVersion": "v1", "metadata": meta,
		"status": map[string]any{"phase": p.Phase, "podIP": p.IP,
			"conditions": []any{map[string]any{"type": "Initialized", "status": "True"}, map[string]any{"type": "Ready", "status": ready}}},
	}
}

// Pod creates or changes a Pod.
func (s *Server) Pod(name string, p Pod) { s.put("pods", name, p.Content()) }

// Pool creates or changes an InferencePool.
func (s *Server) Pool(name string, labels map[string]any, ports ...any) {
	targets := []any{}
	for _, port := range ports {
		targets = append(targets, map[string]any{"number": port})
	}
	s.put("inferencepools", name, map[string]any{
		"kind": "InferencePool", "apiVersion": "inference.networking.k8s.io/v1",
		"spec": map[string]any{"selector": map[string]any{"matchLabels": labels}, "targetPorts": targets},
	})
}

// Slice creates or changes an EndpointSlice of a Service with one port and an endpoint at
// each address. The uid of its Pod is the text before "=" in the
// address, if any.
func (s *Server) Slice(name, service, portName string, port any, addresses ...string) {
	endpoints := []any{}
	for _, address := range addresses {
		e := map[string]any{"conditions": map[string]any{"ready": false}}
		if uid, text, found := strings.Cut(address, "="); found {
			address, e["targetRef"] = text, map[string]any{"kind": "Pod", "uid": uid}
		}
		e["addresses"] = []any{address}
		endpoints = append(endpoints, e)
	}
	s.put("endpointslices", name, map[string]any{
		"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1",
		"metadata":    map[string]any{"labels": map[string]any{"kubernetes.io/service-name": service}},
		"addressType": "IPv4", "endpoints": endpoints, "ports": []any{map[string]any{"name": portName, "port": port}},
	})
}

// Refuse makes the server answer such requests (for example watch pods) with the status;
// 0: normally.
func (s *Server) Refuse(what string, status int) { s.set(func() { s.refuses[what] = status }) }

// Instead has f answer requests for which it returns true; nil: the server answers all.
func (s *Server) Instead(f func(w http.ResponseWriter, r *http.Request, verb string) bool) {
	s.set(func() { s.instead = f })
}

// BeOlder disables streaming lists.
func (s *Server) BeOlder() { s.set(func() { s.noStream = true }) }
