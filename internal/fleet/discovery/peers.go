package discovery

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"

	"kvrouter/internal/base/kv"
)

// schemeService begins the name of a Service whose EndpointSlices name the routers.
const schemeService = "service://"

// maxPeers bounds the routers listed. Those already listed come first.
const maxPeers = 64

// labelService names the Service of an EndpointSlice.
const labelService = "kubernetes.io/service-name"

// Peers finds the other routers: by the addresses of a name, or by the EndpointSlices of
// a headless Service. This router is one of them; the caller excludes it.
type Peers struct {
	spec string
	dns  dnsQuestion // without a name: a Service is requested

	namespace, service, port string // namespace: empty, the router's own

	names *dnsSource // set by OpenPeers, one of the two
	kube  *cluster
}

// ParsePeers reads dns://name:port, service://name:port or
// service://namespace/name:port. A Service's port may also be the name that it has
// there. It sends no query.
func ParsePeers(spec string) (*Peers, error) {
	p := &Peers{spec: spec}
	wrong := fmt.Errorf("--cluster-discovery %s: give dns://name:6222, service://name:6222 or service://namespace/name:6222", spec)
	if rest, ok := strings.CutPrefix(spec, schemeService); ok {
		at, port, err := net.SplitHostPort(rest)
		namespace, name, both := strings.Cut(at, "/")
		if !both {
			namespace, name = "", at
		}
		if err != nil || !isName(name) || both && !isName(namespace) || !isPort(port) {
			return nil, wrong
		}
		p.namespace, p.service, p.port = namespace, name, port
		return p, nil
	}
	if !strings.HasPrefix(spec, schemeDNS) {
		return nil, wrong
	}
	var err error
	if p.dns, err = parseDNS(spec); err != nil {
		return nil, wrong
	}
	return p, nil
}

// isPort reports whether that is the number or the name of a port, which Kubernetes gives
// 63 characters at most.
func isPort(port string) bool {
	if number, err := strconv.Atoi(port); err == nil {
		return number > 0 && number < 1<<16
	}
	return port != "" && len(port) <= 63 && !strings.ContainsFunc(port, func(r rune) bool {
		return r != '-' && (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
}

// OpenPeers is ParsePeers and prepares for Run: it locates the cluster of a
// Service.
func OpenPeers(spec string, log *slog.Logger) (*Peers, error) {
	p, err := ParsePeers(spec)
	if err == nil {
		err = p.open(log)
	}
	return p, err
}

// open locates the cluster of a Service.
func (p *Peers) open(log *slog.Logger) error {
	what := "--cluster-discovery " + p.spec
	if p.service == "" {
		p.names = newDNS(p.dns, "router", what, log)
		return nil
	}
	config, namespace, err := findCluster(p.namespace, "give service://namespace/name:port")
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	client, idle, err := connect(config, log)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	p.kube = newCluster(client, namespace, what, "the routers are kept", log)
	p.kube.idle = idle
	return nil
}

// Run calls use with the addresses of all routers, host:port in order, as soon as
// they are known and whenever they change, until ctx ends. While the name servers
// or the API server are unavailable, the last list remains valid. use owns its
// list.
func (p *Peers) Run(ctx context.Context, use func(addresses []string)) {
	if p.kube != nil {
		p.followSlices(ctx, use)
		return
	}
	var last []string
	for list := range p.names.Watch(ctx) {
		var all []string
		for _, w := range list {
			all = append(all, strings.TrimPrefix(w.URL, "http://"))
		}
		next := boundPeers(all, last, &p.names.crowded, p.names.trouble.what, p.names.trouble.log)
		if !slices.Equal(next, last) {
			use(slices.Clone(next))
			last = next
		}
	}
}

// followSlices is Run by the EndpointSlices of a Service.
func (p *Peers) followSlices(ctx context.Context, use func(addresses []string)) {
	defer p.kube.idle()
	slice := newStore(p.kube, func(u *unstructured.Unstructured) endpointSlice { return sliceOf(u, p.port) })
	done := make(chan struct{})
	go func() { // until ctx ends
		defer close(done)
		of := labels.Set{labelService: p.service}.String()
		p.kube.reflect(ctx, sliceResource, func(o *metav1.ListOptions) { o.LabelSelector = of }, slice)
	}()
	defer func() { <-done }()
	var last []string
	first := true
	missing := trouble{log: p.kube.log, what: p.kube.what}
	for {
		p.kube.mu.Lock()
		known := slice.all != nil
		all, portless := peersOf(slice.all)
		p.kube.mu.Unlock()
		if portless {
			missing.is(fmt.Errorf("the Service has no port %s", p.port), "it yields no routers")
		} else if known {
			missing.over()
		}
		next := boundPeers(all, last, &p.kube.crowded, p.kube.what, p.kube.log)
		if known && (first || !slices.Equal(next, last)) {
			use(slices.Clone(next))
			last, first = next, false
		}
		select {
		case <-ctx.Done():
			return
		case <-p.kube.changed:
		}
	}
}

// boundPeers is the sorted set of the addresses with maxPeers of them at most: those that
// are already listed come first.
func boundPeers(all, last []string, crowded *bool, what string, log *slog.Logger) []string {
	slices.Sort(all)
	all = slices.Compact(all)
	if len(all) <= maxPeers {
		*crowded = false
		return all
	}
	if !*crowded {
		log.Warn(what+": too many routers: the newest are not used", "routers", len(all), "most", maxPeers)
		*crowded = true
	}
	listed := func(address string) bool { return slices.Contains(last, address) }
	old, others := slices.DeleteFunc(slices.Clone(all), func(a string) bool { return !listed(a) }), slices.DeleteFunc(all, listed)
	all = append(old, others...)[:maxPeers]
	slices.Sort(all)
	return all
}

// endpointSlice is the kept part of an EndpointSlice.
type endpointSlice struct {
	port      uint16 // 0: it lacks the requested port
	endpoints []endpoint
}

// endpoint is a Pod behind a Service.
type endpoint struct {
	pod     string // its uid; empty: unknown
	address netip.Addr
}

// sliceOf reads an EndpointSlice; port is the number or the name of a port. It takes
// endpoints that are not ready, too: routers must hear each other before they serve,
// and while they drain. Fields of another shape than Kubernetes' count as missing.
func sliceOf(u *unstructured.Unstructured, port string) (s endpointSlice) {
	s.port, _ = kv.ParsePort(port)
	ports, _ := u.Object["ports"].([]any)
	for _, each := range ports {
		p, _ := each.(map[string]any)
		if number, _ := p["port"].(int64); p["name"] == port && number > 0 && number < 1<<16 {
			s.port = uint16(number)
		}
	}
	endpoints, _ := u.Object["endpoints"].([]any)
	for _, each := range endpoints {
		e, _ := each.(map[string]any)
		addresses, _ := e["addresses"].([]any)
		if len(addresses) == 0 || len(s.endpoints) == maxWorkers {
			continue
		}
		text, _ := addresses[0].(string) // the others are the same Pod's
		address, err := netip.ParseAddr(text)
		if err != nil {
			continue
		}
		target, _ := e["targetRef"].(map[string]any)
		pod, _ := target["uid"].(string)
		s.endpoints = append(s.endpoints, endpoint{pod, address.Unmap().WithZone("")})
	}
	return s
}

// peersOf returns the addresses of all Pods, each once: in a cluster with two families
// of addresses a Pod stands in a slice of each. portless: no slice with an endpoint has
// the port.
func peersOf(all map[string]endpointSlice) (addresses []string, portless bool) {
	byPod := map[string]netip.AddrPort{}
	for _, s := range all {
		if s.port == 0 {
			portless = portless || len(s.endpoints) > 0
			continue
		}
		for _, e := range s.endpoints {
			at := netip.AddrPortFrom(e.address, s.port)
			key := cmp.Or(e.pod, at.String())
			if old, ok := byPod[key]; !ok || at.Compare(old) < 0 { // IPv4 goes first
				byPod[key] = at
			}
		}
	}
	for _, at := range byPod {
		addresses = append(addresses, at.String())
	}
	return addresses, portless && len(addresses) == 0
}
