package discovery

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"kvrouter/internal/base/kv"
)

// Labels and annotations by which others mark the Pods of workers.
const (
	labelRole   = "llm-d.ai/role"        // prefill, decode, prefill-decode, ...
	labelEngine = "llm-d.ai/engine-type" // vllm, sglang, kvrouter, ...

	annotationActive       = "llm-d.ai/active-ports"                    // those of the pool's ports that serve
	annotationActiveLegacy = "inference.networking.k8s.io/active-ports" // the same, before
	annotationPorts        = "smg.ai/worker-ports"                      // one server at each
	annotationConnector    = "smg.ai/kv-connector"                      // how prompts are handed over
	annotationBootstrap    = "sglang.ai/bootstrap-port"                 // of a prefill server
	annotationP2P          = "kvrouter/p2p-port"                        // of vLLM's tier p2p, of the first server; the others follow
)

// maxPorts bounds the servers of a Pod.
const maxPorts = 64

// maxMark bounds the kept part of a label or an annotation, bytes: 64 ports have room.
const maxMark = 512

// pod is the kept part of a Pod.
type pod struct {
	namespace, name, uid string
	address              string // empty: none yet
	ready, ending, ended bool

	role, engine, active, ports, connector, bootstrap, p2p string // as marked
}

// podOf reads a Pod. Fields of another shape than Kubernetes' count as missing.
func podOf(u *unstructured.Unstructured) pod {
	labels, annotations := u.GetLabels(), u.GetAnnotations()
	for _, marks := range []map[string]string{labels, annotations} {
		for name, mark := range marks {
			if len(mark) > maxMark { // what is cut off makes it invalid
				marks[name] = strings.Clone(mark[:maxMark]) + " ..."
			}
		}
	}
	p := pod{
		namespace: u.GetNamespace(), name: u.GetName(), uid: string(u.GetUID()), ending: u.GetDeletionTimestamp() != nil,
		role: labels[labelRole], engine: strings.ToLower(labels[labelEngine]),
		active: cmp.Or(annotations[annotationActive], annotations[annotationActiveLegacy]), ports: annotations[annotationPorts],
		connector: strings.ToLower(annotations[annotationConnector]), bootstrap: annotations[annotationBootstrap],
		p2p: annotations[annotationP2P],
	}
	phase, _, _ := unstructured.NestedString(u.Object, "status", "phase")
	p.ended = phase == "Succeeded" || phase == "Failed"
	address, _, _ := unstructured.NestedString(u.Object, "status", "podIP")
	if ip, err := netip.ParseAddr(address); err == nil {
		p.address = ip.WithZone("").String()
	}
	conditions, _, _ := unstructured.NestedSlice(u.Object, "status", "conditions")
	for _, condition := range conditions {
		if c, ok := condition.(map[string]any); ok && c["type"] == "Ready" {
			p.ready = c["status"] == "True"
		}
	}
	return p
}

// Roles that Pods are marked with.
var podRoles = map[string]kv.Role{
	"": kv.RoleBoth, "both": kv.RoleBoth, "prefill-decode": kv.RoleBoth, "encode-prefill-decode": kv.RoleBoth,
	"prefill": kv.RolePrefill, "encode-prefill": kv.RolePrefill, "decode": kv.RoleDecode,
}

// roleEncode marks Pods that only look at images: no request goes to them.
const roleEncode = "encode"

// workers returns the workers of a Pod, one for each of its ports. as is the role by
// the selector that found it, nil: as marked. ports are those of the pool, or the default
// one. problem says what marks of the Pod make no sense and are passed over.
func (p pod) workers(as *kv.Role, ports []uint16, pool bool) (list []kv.Worker, problem string) {
	if p.ended || p.address == "" {
		return nil, ""
	}
	role, known := podRoles[p.role]
	if as != nil {
		role, known = *as, true
	}
	if !known {
		if p.role == roleEncode {
			return nil, ""
		}
		problem = fmt.Sprintf("label %s: %.40q is not a role: the role is both", labelRole, p.role)
	}
	part := kv.Disagg{Role: role, Kind: p.kind(role)}
	for _, mark := range []struct {
		name, value string
		to          *kv.Bootstrap
	}{{annotationBootstrap, p.bootstrap, &part.Bootstrap}, {annotationP2P, p.p2p, &part.P2P}} {
		if mark.value == "" {
			continue
		}
		if port, ok := kv.ParsePort(mark.value); ok {
			*mark.to = kv.Bootstrap{Host: p.address, Port: port}
		} else {
			problem = fmt.Sprintf("annotation %s: %.40q is not a port", mark.name, mark.value)
		}
	}
	if role == kv.RoleDecode {
		part.Bootstrap = kv.Bootstrap{}
	}
	serving := ports
	for _, mark := range []struct{ name, value string }{{annotationPorts, p.ports}, {annotationActive, p.active}} {
		if mark.value == "" {
			continue
		}
		named, err := portsOf(mark.value)
		if err != nil {
			problem = fmt.Sprintf("annotation %s: %v", mark.name, err)
			continue
		}
		serving = named
		if pool && mark.name == annotationPorts {
			ports = named
		}
	}
	if !pool {
		ports = serving
	}
	for i, port := range ports { // the place among all ports is the rank
		if !slices.Contains(serving, port) {
			continue
		}
		w := kv.Worker{
			ID: idOf(fmt.Sprintf("%s/%s/%s:%d", p.namespace, p.name, p.uid, port)), Name: plainName(p.name), URL: baseURL(p.address, port),
			EventsPort: eventsPort + uint16(i), Disagg: part,
		}
		if w.P2P.Known() {
			w.P2P.Port += uint16(i)
		}
		if len(ports) > 1 {
			rank := fmt.Sprintf("-rank-%d", i)
			w.Name = w.Name[:min(len(w.Name), maxName-len(rank))] + rank
		}
		switch {
		case p.ending: // also while its readiness still passes
			w.Cordon = kv.CordonDraining
		case !p.ready:
			w.Cordon = kv.CordonNotReady
		}
		list = append(list, w)
	}
	if len(list) == 0 && problem == "" {
		problem = fmt.Sprintf("annotation %s: none of %.40q is a port of the pool: the Pod is not used", annotationActive, p.active)
	}
	return list, problem
}

// kind is the protocol by which the Pod hands prompts over, as far as its marks say.
func (p pod) kind(role kv.Role) kv.Kind {
	switch {
	case p.engine == "kvrouter":
		return kv.KindRouter
	case strings.Contains(p.connector, "mooncake"):
		return kv.KindMooncake
	case role == kv.RoleBoth: // an SGLang server says itself whether it takes part
		return kv.KindNone
	case p.engine == "sglang", p.engine == "" && p.bootstrap != "":
		return kv.KindSGLang
	case p.engine == "vllm", strings.Contains(p.connector, "nixl"):
		return kv.KindNIXL
	}
	return kv.KindNone
}

// portsOf reads a list of ports.
func portsOf(list string) (ports []uint16, err error) {
	for text := range strings.SplitSeq(list, ",") {
		port, ok := kv.ParsePort(strings.TrimSpace(text))
		if !ok {
			return nil, fmt.Errorf("%.40q is not a port", text)
		}
		if slices.Contains(ports, port) {
			continue
		}
		if ports = append(ports, port); len(ports) > maxPorts {
			return nil, fmt.Errorf("more than %d ports", maxPorts)
		}
	}
	return ports, nil
}

// pool is the kept part of an InferencePool.
type pool struct {
	labels map[string]string // of its Pods
	ports  []uint16
	err    error // why it cannot be used
}

// poolOf reads an InferencePool.
func poolOf(u *unstructured.Unstructured) (p pool) {
	p.labels, _, _ = unstructured.NestedStringMap(u.Object, "spec", "selector", "matchLabels")
	if len(p.labels) == 0 {
		p.err = fmt.Errorf("InferencePool %s has no spec.selector.matchLabels", u.GetName())
		return p
	}
	targets, _, _ := unstructured.NestedSlice(u.Object, "spec", "targetPorts")
	for _, target := range targets {
		t, _ := target.(map[string]any)
		number, _ := t["number"].(int64)
		if number < 1 || number > 65535 || len(p.ports) == maxPorts {
			p.err = fmt.Errorf("InferencePool %s has an invalid target port: %.40q", u.GetName(), fmt.Sprint(t["number"]))
			return p
		}
		p.ports = append(p.ports, uint16(number))
	}
	if len(p.ports) == 0 {
		p.err = fmt.Errorf("InferencePool %s has no spec.targetPorts", u.GetName())
	}
	return p
}
