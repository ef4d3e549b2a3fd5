package proxy

import (
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// SessionTokens signs the tokens by which clients of a gateway return to the worker that
// served them, and checks those that come back. A token is 8 bytes of the time at which
// it expires (s since 1970), an HMAC-SHA256 of 32 bytes, and the worker's address, all in
// unpadded base64url. The HMAC covers both, the model and the name of the client's key:
// a token holds for the same client and model only. It is safe for concurrent use.
type SessionTokens struct {
	key     []byte
	life    time.Duration
	now     func() time.Time
	results [tokenResults]atomic.Uint64
}

const (
	expirySize = 8
	// maxToken bounds a token, bytes: the address of a worker has 2,048 at most.
	maxToken = 4 << 10
)

// tokenResult is what came of a token.
type tokenResult int

const (
	tokenValid   tokenResult = iota // its worker is up
	tokenGone                       // its worker is not
	tokenExpired                    // it is too old
	tokenInvalid                    // not signed with our key, for another client or model, or malformed
	tokenResults
)

// String returns the result's label in metrics.
func (r tokenResult) String() string {
	return [tokenResults]string{"valid", "gone", "expired", "invalid"}[r]
}

// NewSessionTokens returns tokens that hold for life, signed with a key derived from
// secret. Routers with the same secret accept each other's. An empty secret is random:
// tokens then hold for this process only.
func NewSessionTokens(secret string, life time.Duration) (*SessionTokens, error) {
	if secret == "" {
		secret = rand.Text()
	}
	key, err := hkdf.Key(sha256.New, []byte(secret), nil, "kvrouter session token", sha256.Size)
	if err != nil {
		return nil, fmt.Errorf("session tokens: %w", err)
	}
	return &SessionTokens{key: key, life: life, now: time.Now}, nil
}

// sum signs an address with its time.
func (t *SessionTokens) sum(expiry []byte, address, model, holder string) []byte {
	mac := hmac.New(sha256.New, t.key)
	mac.Write(expiry)
	for _, text := range []string{address, model, holder} { // with lengths: no two lists read alike
		mac.Write(binary.BigEndian.AppendUint64(nil, uint64(len(text))))
		mac.Write([]byte(text))
	}
	return mac.Sum(nil)
}

// sign returns a new token of the worker at address. holder is the name of the client's
// key.
func (t *SessionTokens) sign(address, model, holder string) string {
	token := binary.BigEndian.AppendUint64(nil, uint64(t.now().Add(t.life).Unix()))
	token = append(append(token, t.sum(token, address, model, holder)...), address...)
	return base64.RawURLEncoding.EncodeToString(token)
}

// open returns the address in a token of sign with the same model and holder; empty: it
// is to be ignored, which is counted.
func (t *SessionTokens) open(token, model, holder string) (address string) {
	if len(token) > maxToken {
		t.count(tokenInvalid)
		return ""
	}
	text, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil || len(text) <= expirySize+sha256.Size {
		t.count(tokenInvalid)
		return ""
	}
	expiry, sum, address := text[:expirySize], text[expirySize:expirySize+sha256.Size], string(text[expirySize+sha256.Size:])
	if !hmac.Equal(sum, t.sum(expiry, address, model, holder)) {
		t.count(tokenInvalid)
		return ""
	}
	if uint64(t.now().Unix()) >= binary.BigEndian.Uint64(expiry) {
		t.count(tokenExpired)
		return ""
	}
	return address
}

func (t *SessionTokens) count(r tokenResult) { t.results[r].Add(1) }

// Collectors returns the metric of the tokens that came back.
func (t *SessionTokens) Collectors() (all []prometheus.Collector) {
	for r := range tokenResults {
		all = append(all, prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "kvrouter_session_tokens_total", Help: "Requests of gateways with a session token, by what came of it.", ConstLabels: prometheus.Labels{"result": r.String()}},
			func() float64 { return float64(t.results[r].Load()) }))
	}
	return all
}
