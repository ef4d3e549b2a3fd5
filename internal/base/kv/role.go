package kv

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
)

// Role is the part of a request that a worker computes when prefill and decode are
// disaggregated.
type Role uint8

// The roles. A worker with RoleBoth serves aggregated requests, and decodes if its Kind
// names a KV connector.
const (
	RoleBoth Role = iota
	RolePrefill
	RoleDecode
)

var roleNames = []string{RoleBoth: "both", RolePrefill: "prefill", RoleDecode: "decode"}

// Kind is the KV connector of a worker: the protocol that transfers a computed prompt.
type Kind uint8

// The kinds.
const (
	KindNone     Kind = iota // unknown, or no transfers
	KindNIXL                 // vLLM's NixlConnector
	KindSGLang               // SGLang's bootstrap server
	KindMooncake             // vLLM's MooncakeConnector
	KindRouter               // none: it is a router, whose workers serve the requests
)

var kindNames = []string{KindNone: "none", KindNIXL: "nixl", KindSGLang: "sglang", KindMooncake: "mooncake", KindRouter: "router"}

// String returns the role's name.
func (r Role) String() string { return roleNames[r] }

// String returns the kind's name.
func (k Kind) String() string { return kindNames[k] }

// UnmarshalText reads a role's name.
func (r *Role) UnmarshalText(text []byte) error { return parseName(roleNames, text, r) }

// MarshalText writes a role's name.
func (r Role) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads a kind's name.
func (k *Kind) UnmarshalText(text []byte) error { return parseName(kindNames, text, k) }

// MarshalText writes a kind's name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// parseName sets to to the place of a name in a list.
func parseName[T ~uint8](names []string, text []byte, to *T) error {
	at := slices.Index(names, string(text))
	if at < 0 {
		return fmt.Errorf("%.40q is not one of %s", text, strings.Join(names, ", "))
	}
	*to = T(at)
	return nil
}

// Kinds is a set of kinds.
type Kinds uint8

// KindsOf returns the set of one kind.
func KindsOf(k Kind) Kinds { return 1 << k }

// Allow reports whether k is in the set; the empty set allows any. A router is like a worker
// without a KV connector.
func (s Kinds) Allow(k Kind) bool {
	if k == KindRouter {
		k = KindNone
	}
	return s == 0 || s&KindsOf(k) != 0
}

// SGLangPort is the default port of SGLang's bootstrap server.
const SGLangPort = 8998

// Bootstrap is the address of a prefill worker's transfer service for decode
// workers: SGLang's or Mooncake's bootstrap server.
type Bootstrap struct {
	Host string
	Port uint16
}

// Known reports whether there is an address.
func (b Bootstrap) Known() bool { return b.Host != "" && b.Port != 0 }

// String returns host:port.
func (b Bootstrap) String() string {
	return net.JoinHostPort(b.Host, strconv.FormatUint(uint64(b.Port), 10))
}

// UnmarshalText reads host:port.
func (b *Bootstrap) UnmarshalText(text []byte) error {
	host, port, err := net.SplitHostPort(string(text))
	number, ok := ParsePort(port)
	if err != nil || !ok || host == "" {
		return fmt.Errorf("%.80q is not an address such as 10.0.0.1:8998", text)
	}
	*b = Bootstrap{host, number}
	return nil
}

// Disagg is a worker's part in serving together with others. The zero value is a worker
// that serves aggregated requests only, and neither pulls blocks nor is pulled from.
type Disagg struct {
	Role      Role
	Kind      Kind
	Bootstrap Bootstrap // of a prefill worker that has one
	// P2P is where other workers pull blocks of the worker's first rank from, and shows
	// that it pulls theirs: the side channel of vLLM's tier p2p.
	P2P Bootstrap
}

// Leg is the part of a request that a worker is chosen for.
type Leg uint8

// The legs.
const (
	LegWhole   Leg = iota // prompt and answer
	LegPrefill            // the prompt
	LegDecode             // the answer, with a prompt computed elsewhere
)

var legNames = []string{LegWhole: "aggregated", LegPrefill: "prefill", LegDecode: "decode"}

// UnmarshalText reads a leg's name.
func (l *Leg) UnmarshalText(text []byte) error { return parseName(legNames, text, l) }

// MarshalText writes a leg's name.
func (l Leg) MarshalText() ([]byte, error) { return []byte(legNames[l]), nil }

// Takes reports whether a worker may get that leg. A prefill worker computes
// prompts only. A decode worker can also serve aggregated requests, except
// SGLang's, which refuses a request without a bootstrap room.
func (d Disagg) Takes(leg Leg) bool {
	switch leg {
	case LegPrefill:
		return d.Role == RolePrefill && (d.Kind == KindNIXL || d.Kind != KindNone && d.Bootstrap.Known())
	case LegDecode:
		return d.Role != RolePrefill && d.Kind != KindNone && d.Kind != KindRouter
	}
	return d.Role == RoleBoth || d.Role == RoleDecode && d.Kind != KindSGLang
}
