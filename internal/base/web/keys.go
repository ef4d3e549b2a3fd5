package web

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/gin-gonic/gin"
)

const (
	// triesPerSecond bounds the wrong keys of one address, and triesAtOnce those of a
	// moment.
	triesPerSecond, triesAtOnce = 2, 10
	// maxTriers bounds the addresses that are remembered. Beyond it, new ones share
	// their tries.
	maxTriers = 4096
)

// Keys are the keys of a port. A valid key is always accepted; wrong ones are
// slowed for each address. A nil Keys requires none. It is safe for concurrent use.
type Keys struct {
	sums [][sha256.Size]byte
	now  func() time.Time

	mu    sync.Mutex        // guards the rest
	tries map[string]*tries // by address
	swept time.Time         // when those with all tries left were last removed
}

// tries are what is left to one address.
type tries struct {
	left  float64
	since time.Time // of left
}

// NewKeys returns those keys; nil: there are none.
func NewKeys(keys []string) *Keys {
	if len(keys) == 0 {
		return nil
	}
	k := &Keys{now: time.Now, tries: map[string]*tries{}}
	for _, key := range keys {
		k.sums = append(k.sums, sha256.Sum256([]byte(key)))
	}
	return k
}

// Asked reports whether a key is required.
func (k *Keys) Asked() bool { return k != nil }

// Known reports whether a key is one of these. Hashes are compared in constant time, so
// that the timing does not leak a key or its length.
func (k *Keys) Known(given string) bool {
	sum, known := sha256.Sum256([]byte(given)), 0
	for i := range k.sums {
		known |= subtle.ConstantTimeCompare(sum[:], k.sums[i][:])
	}
	return known == 1
}

// Holds reports whether a request gives a known key. Unknown ones beside it do not matter:
// they may be for a service before the router.
func (k *Keys) Holds(r *http.Request) bool { return slices.ContainsFunc(KeysOf(r), k.Known) }

// Refuse answers a request whose keys are not known with 401, or with 429 where its address
// has sent too many. A request without a key is no try. why begins the message, and fail
// writes the answer.
func (k *Keys) Refuse(c *gin.Context, why string, fail func(*gin.Context, int, string)) {
	k.refuse(c, KeysOf(c.Request), why, fail)
}

// RefuseKey is Refuse for a request with the key in its body.
func (k *Keys) RefuseKey(c *gin.Context, given, why string, fail func(*gin.Context, int, string)) {
	k.refuse(c, []string{given}, why, fail)
}

func (k *Keys) refuse(c *gin.Context, given []string, why string, fail func(*gin.Context, int, string)) {
	address := AddressOf(c.Request)
	for _, key := range given {
		if key != "" && !k.try(address) {
			c.Header("Retry-After", "1")
			fail(c, http.StatusTooManyRequests, "too many wrong keys from this address: wait a second")
			c.Abort()
			return
		}
	}
	fail(c, http.StatusUnauthorized, AskForKey(c, why))
	c.Abort()
}

// AddressOf returns the sender's address without its port. Of IPv6 it is the network of 64 bits,
// whose addresses one client can choose. Empty: it is no address.
func AddressOf(r *http.Request) string {
	if c := connectionOf(r); c != nil {
		return c.client
	}
	return addressOf(r.RemoteAddr)
}

func addressOf(remote string) string {
	from, err := netip.ParseAddrPort(remote)
	if err != nil {
		return ""
	}
	address := from.Addr().Unmap().WithZone("")
	if address.Is4() {
		return address.String()
	}
	network, _ := address.Prefix(64) // of a valid address
	return network.String()
}

// try reports whether the address may try one more wrong key now.
func (k *Keys) try(address string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := k.now()
	if k.tries[address] == nil && len(k.tries) >= maxTriers {
		if now.Sub(k.swept) >= time.Second {
			k.sweep(now)
		}
		if len(k.tries) >= maxTriers {
			address = ""
		}
	}
	t := k.tries[address]
	if t == nil {
		t = &tries{left: triesAtOnce, since: now}
		k.tries[address] = t
	}
	t.refill(now)
	if t.left < 1 {
		return false
	}
	t.left--
	return true
}

// sweep removes the addresses that have all tries left. k.mu is locked.
func (k *Keys) sweep(now time.Time) {
	for address, t := range k.tries {
		if t.refill(now); t.left >= triesAtOnce {
			delete(k.tries, address)
		}
	}
	k.swept = now
}

func (t *tries) refill(now time.Time) {
	t.left = min(triesAtOnce, t.left+triesPerSecond*max(0, now.Sub(t.since).Seconds()))
	t.since = now
}

// RequireKey refuses requests without one of the keys. The refusal, written by fail,
// starts with the value of whose.
func RequireKey(keys *Keys, whose string, fail func(*gin.Context, int, string)) gin.HandlerFunc {
	return func(c *gin.Context) {
		if keys.Asked() && !keys.Holds(c.Request) {
			keys.Refuse(c, whose, fail)
		}
	}
}
