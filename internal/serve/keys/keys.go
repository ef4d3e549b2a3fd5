// Package keys authenticates API keys of the OpenAI port and enforces their limits.
package keys

import (
	"cmp"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/textfile"
	"kvrouter/internal/base/web"
)

// Settings are the flags for API keys and for the permissions of their holders.
type Settings struct {
	APIKeysFile         string `group:"Requests" name:"api-keys-file" placeholder:"FILE" help:"YAML list of additional API keys of the OpenAI port, each with its own name, limits and cache salt. Reloaded on SIGHUP. See docs/api-keys.md."`
	TrustHints          *bool  `group:"Requests" negatable:"" help:"Honor priorities and pinned workers (nvext and headers) of all clients. Default: yes with one --api-key or without keys; with several keys or --api-keys-file, only for keys with trust-hints: true."`
	TrustTransferParams bool   `group:"Requests" help:"Forward members and headers of all clients that set addresses, ranks or code for the engines (kv_transfer_params, bootstrap_host, custom_logit_processor, ...). Default: only of keys with trust-hints: true. See docs/api-keys.md."`
	DecisionHeaders     *bool  `group:"Requests" negatable:"" help:"Return the chosen worker and the overlap to clients (x-kvrouter-* headers, query_instance_id). Default: yes with one --api-key or without keys; with several keys or --api-keys-file, only for keys with salt: true."`
}

// Caller is the sender of a request, identified by its key, with its permissions.
type Caller struct {
	Name          string // of the key; empty: no key is required
	Trusted       bool   // its priorities and pinned workers are honored
	Directs       bool   // it may send engines addresses, ranks and code
	SeesDecisions bool   // its answers name the chosen worker and the reason
	Terms                // of its requests in a fair queue

	sum    [sha256.Size]byte // of the key
	salted bool              // its blocks are its own
	apart  bool              // there are other clients, and it is not trusted
	bounds bounds
	count  *counts // nil: no key is required
}

// Owner stands for the client that owns what it has named or made: a hash of its key's name, so
// that a new key of the same name owns it, too. 0: no key is required.
type Owner uint64

// Owner returns the owner of what the caller names or makes.
func (c *Caller) Owner() Owner {
	if c.Name == "" {
		return 0
	}
	sum := sha256.Sum256([]byte("kvrouter owner\x00" + c.Name))
	return Owner(max(1, binary.LittleEndian.Uint64(sum[:])))
}

// Scoped returns what an engine knows by the name that the owner has given to a request. It ends
// with a hash of both: two owners never have one name, and none of a client's choice is the
// beginning of another one's. A name of that form stays as it is.
func (o Owner) Scoped(name string) string {
	if at := len(name) - len(o.mark("")); at >= 0 && o.mark(name[:at]) == name[at:] {
		return name
	}
	return name + o.mark(name)
}

// mark is the end of a scoped name.
func (o Owner) mark(name string) string {
	sum := sha256.Sum256(append(binary.LittleEndian.AppendUint64([]byte("kvrouter name\x00"), uint64(o)), name...))
	return "-" + hex.EncodeToString(sum[:8])
}

// Terms are how requests of a key are treated in a fair queue.
type Terms struct {
	Weight    float64       // of its share; 0: 1
	Class     fair.Class    // of requests that do not name another
	TTFT      time.Duration // objective of the time to first token; 0: that of the class
	TPOT      time.Duration // objective of the time per further token; 0: that of the class
	Sheddable bool          // its requests may be refused where they would miss their objective
}

// Salt returns the cache_salt for the engine and the index, given the request's own.
// It is an HMAC-SHA256 of the name and own under the key's hash, so that no holder of
// another key can produce it; a new key starts with an empty cache. If ok is false, the
// request keeps its own. named means that the request names blocks as its own, by a salt or
// otherwise: with several clients, what an untrusted one names is its key's.
func (c *Caller) Salt(own string, named bool) (salt string, ok bool) {
	if !c.salted && !(c.apart && named) {
		return "", false
	}
	mac := hmac.New(sha256.New, c.sum[:])
	fmt.Fprintf(mac, "kvrouter cache_salt\x00%s\x00%s", c.Name, own)
	return base64.RawURLEncoding.EncodeToString(mac.Sum(nil)), true
}

// Ring is the current set of keys. It is safe for concurrent use.
type Ring struct {
	settings Settings
	given    []string // keys of --api-key
	now      func() time.Time
	current  atomic.Pointer[table]
	unknown  atomic.Uint64 // requests without a known key
}

// table maps keys to their settings. It does not change.
type table struct {
	open    *Caller // nil: a key is required
	callers map[[sha256.Size]byte]*Caller
	order   []*Caller
	ofFile  int // callers of the file
}

// New returns a ring with the keys of --api-key; Read adds those of the file.
// Without keys the port requires none.
func New(settings Settings, given []string) *Ring {
	r := &Ring{settings: settings, given: given, now: time.Now}
	r.current.Store(r.table(nil))
	return r
}

// Asks reports whether the port requires API keys.
func (r *Ring) Asks() bool { return len(r.given) > 0 || r.settings.APIKeysFile != "" }

// Several reports whether the port has several clients, which must not reach each other's
// state: it has several keys, or a file of keys.
func (r *Ring) Several() bool { return len(r.given) > 1 || r.settings.APIKeysFile != "" }

// fileLimit is the maximum size of a file of keys, bytes: 10,000 keys with hashes and all
// limits take about 3 MB.
const fileLimit = 4 << 20

// errNoKeys refuses a file that was emptied or is being written: it would lock out all
// clients.
var errNoKeys = errors.New("it has no keys: a reload must leave at least one; to revoke all keys of the file, restart the router")

// Read reads the file of keys, if there is one. The keys take effect when use is
// called: in-flight requests are not affected, and a key with an unchanged name and
// limits keeps its remaining quota. use returns the number of keys. Errors never show a
// key.
func (r *Ring) Read() (use func() int, err error) {
	var entries []entry
	if name := r.settings.APIKeysFile; name != "" {
		text, err := textfile.Read(name, fileLimit)
		if err == nil {
			entries, err = parse(text)
		}
		if err == nil {
			err = r.acceptable(entries)
		}
		if err != nil {
			return nil, fmt.Errorf("--api-keys-file %s: %w", name, err)
		}
	}
	return func() int {
		next := r.table(entries)
		r.current.Store(next)
		return len(next.order)
	}, nil
}

// acceptable refuses a file without keys if the previous one had some, and a key that
// --api-key has, too.
func (r *Ring) acceptable(entries []entry) error {
	if len(entries) == 0 && r.current.Load().ofFile > 0 {
		return errNoKeys
	}
	for i, e := range entries {
		for _, key := range r.given {
			if e.sum == sha256.Sum256([]byte(key)) {
				return fmt.Errorf("entry %d (%s): --api-key has the same key; remove one of them", i+1, e.name)
			}
		}
	}
	return nil
}

// givenName is the name of a key of --api-key, counted from 0.
func givenName(i int) string { return fmt.Sprintf("%s%d", givenPrefix, i+1) }

// givenPrefix is the prefix of the names of keys of --api-key, reserved for them.
const givenPrefix = "api-key-"

// table returns a table of the keys of --api-key and of those entries. Existing callers
// keep their counts.
func (r *Ring) table(entries []entry) *table {
	usually := func(set *bool) bool {
		if set != nil {
			return *set
		}
		return !r.Several()
	}
	trusted, shown := usually(r.settings.TrustHints), usually(r.settings.DecisionHeaders)
	directs := r.settings.TrustTransferParams
	if !r.Asks() {
		return &table{open: &Caller{Trusted: trusted, Directs: directs, SeesDecisions: shown}}
	}
	directs = directs || trusted && r.settings.TrustHints != nil
	before := map[string]*Caller{}
	if old := r.current.Load(); old != nil {
		for _, c := range old.order {
			before[c.Name] = c
		}
	}
	t := &table{callers: map[[sha256.Size]byte]*Caller{}, ofFile: len(entries)}
	add := func(c *Caller) {
		c.count, c.apart = new(counts), r.Several() && !c.Trusted
		c.bounds = newBounds(c.bounds.limits)
		if old := before[c.Name]; old != nil {
			c.count = old.count
			if old.bounds.limits == c.bounds.limits {
				c.bounds = old.bounds
			}
		}
		c.count.prompt.set(c.bounds.promptTokens, r.now())
		if t.callers[c.sum] == nil {
			t.callers[c.sum] = c
			t.order = append(t.order, c)
		}
	}
	for i, key := range r.given {
		add(&Caller{Name: givenName(i), Trusted: trusted, Directs: directs, SeesDecisions: shown, sum: sha256.Sum256([]byte(key))})
	}
	for _, e := range entries {
		c := &Caller{Name: e.name, Trusted: trusted, Directs: directs, SeesDecisions: shown, Terms: e.terms, sum: e.sum, salted: e.salt,
			bounds: bounds{limits: e.limits}}
		if e.trust != nil {
			c.Trusted, c.Directs = *e.trust, *e.trust
		}
		if r.settings.DecisionHeaders == nil {
			c.SeesDecisions = shown || e.salt
		}
		add(c)
	}
	return t
}

var (
	// errUnknown means that a request has no key, or no known one.
	errUnknown = errors.New("missing or unknown API key")
	// errSeveral means that it is not known whose request it is.
	errSeveral = errors.New("the request gives several keys, of different names: give one")
)

// find returns the holder of a request's key. Unknown keys beside it do not matter: they may
// be for a service before the router.
func (t *table) find(r *http.Request) (holder *Caller, err error) {
	if t.open != nil {
		return t.open, nil
	}
	for _, key := range web.KeysOf(r) {
		c := t.holder(key)
		if c != nil && holder != nil && c != holder {
			return nil, errSeveral
		}
		holder = cmp.Or(holder, c)
	}
	if holder == nil {
		return nil, errUnknown
	}
	return holder, nil
}

// holder returns the holder of a key; nil: it is unknown. It compares hashes, so that its
// timing does not leak the key; the final comparison takes constant time.
func (t *table) holder(key string) *Caller {
	sum := sha256.Sum256([]byte(key))
	if c := t.callers[sum]; c != nil && subtle.ConstantTimeCompare(c.sum[:], sum[:]) == 1 {
		return c
	}
	return nil
}

// callerKey is the context key of a request's Caller.
const callerKey = "kvrouter.caller"

// Of returns the caller of a request that Guard has accepted.
func (r *Ring) Of(c *gin.Context) *Caller {
	if caller, ok := c.Get(callerKey); ok {
		return caller.(*Caller)
	}
	return r.current.Load().open
}

// insideKey marks the context of a request that Inside made.
type insideKey struct{}

// Inside returns the context of a request that this process sends to its own port. It
// needs no key and its hints are honored; the caller must have authorized it.
func Inside(ctx context.Context) context.Context {
	return context.WithValue(ctx, insideKey{}, &Caller{Trusted: true, SeesDecisions: true})
}

// Caller returns the holder of a request's key, whose limits do not count.
func (r *Ring) Caller(request *http.Request) (*Caller, error) {
	return r.current.Load().find(request)
}

// Guard refuses requests without a known key (401) and requests beyond its limits
// (429), and counts the results of all others. fail writes a refusal.
func (r *Ring) Guard(fail func(c *gin.Context, status int, message string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if inside, ok := c.Request.Context().Value(insideKey{}).(*Caller); ok {
			c.Set(callerKey, inside)
			return
		}
		caller, err := r.current.Load().find(c.Request)
		if err != nil {
			r.unknown.Add(1)
			fail(c, http.StatusUnauthorized, web.AskForKey(c, err.Error()))
			c.Abort()
			return
		}
		if caller.count == nil {
			return // no key is required
		}
		c.Set(callerKey, caller)
		if refused := caller.enter(r.now(), c.Writer.Header()); refused != nil {
			fail(c, http.StatusTooManyRequests, refused.Error())
			c.Abort()
			return
		}
		defer func() { caller.leave(c.Writer.Status()) }()
		c.Next()
	}
}

// Trusted refuses requests (403) of keys whose hints are not honored: they must not change
// the routing of all requests either. It must run after Guard.
func (r *Ring) Trusted(fail func(c *gin.Context, status int, message string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if !r.Of(c).Trusted {
			fail(c, http.StatusForbidden, "this key may not change the routing of all requests: use a key of the router port (--router-api-key)")
			c.Abort()
		}
	}
}

// Prompt charges the caller n prompt tokens, known or estimated, before its request is sent
// to a worker. Settle must follow with the computed tokens. An error is a refusal with
// status 429; the headers of the answer are set.
func (r *Ring) Prompt(c *gin.Context, n int, estimated bool) (*Charge, error) {
	caller := r.Of(c)
	if caller.count == nil {
		return nil, nil
	}
	charge, refused := caller.take(r.now, n, estimated, c.Writer.Header())
	if refused != nil {
		return nil, refused
	}
	return charge, nil
}
