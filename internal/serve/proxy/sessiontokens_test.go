package proxy

import (
	"encoding/base64"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

const testSecret = "shared by the routers"

// newSessionTokens returns tokens that hold for 30 minutes.
func newSessionTokens(t testing.TB, secret string) *SessionTokens {
	t.Helper()
	tokens, err := NewSessionTokens(secret, 30*time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

// results is how many tokens came to what.
func results(t *SessionTokens) (n [tokenResults]uint64) {
	for r := range n {
		n[r] = t.results[r].Load()
	}
	return n
}

// changed returns a token with one bit of its bytes changed.
func changed(t testing.TB, token string, at int) string {
	t.Helper()
	text, err := base64.RawURLEncoding.DecodeString(token)
	if err != nil {
		t.Fatal(err)
	}
	text[at] ^= 1
	return base64.RawURLEncoding.EncodeToString(text)
}

func TestASessionTokenNamesItsWorkerToItsClientOnly(t *testing.T) {
	const address, model, holder = "10.0.0.1:8000", "m", "team-a"
	tokens := newSessionTokens(t, testSecret)
	var clock testkit.StandingClock
	tokens.now = clock.Now
	token := tokens.sign(address, model, holder)
	for name, test := range map[string]struct {
		token, model, holder string
		later                time.Duration
		want                 string
		result               tokenResult // where it is refused
	}{
		"its client":                          {token, model, holder, 0, address, 0},
		"just before it expires":              {token, model, holder, 30*time.Minute - time.Second, address, 0},
		"when it has expired":                 {token, model, holder, 30 * time.Minute, "", tokenExpired},
		"another key":                         {token, model, "team-b", 0, "", tokenInvalid},
		"another model":                       {token, "m2", holder, 0, "", tokenInvalid},
		"model and key apart elsewhere":       {token, "mt", "eam-a", 0, "", tokenInvalid},
		"another router's without the secret": {newSessionTokens(t, "another secret").sign(address, model, holder), model, holder, 0, "", tokenInvalid},
		"a later expiry":                      {changed(t, token, 3), model, holder, 0, "", tokenInvalid},
		"another signature":                   {changed(t, token, expirySize), model, holder, 0, "", tokenInvalid},
		"another address":                     {changed(t, token, expirySize+32), model, holder, 0, "", tokenInvalid},
		"cut":                                 {token[:len(token)-2], model, holder, 0, "", tokenInvalid},
		"no address":                          {tokens.sign("", model, holder), model, holder, 0, "", tokenInvalid},
		"an address in base64":                {base64.StdEncoding.EncodeToString([]byte(address)), model, holder, 0, "", tokenInvalid},
		"no base64":                           {"%", model, holder, 0, "", tokenInvalid},
		"too long":                            {tokens.sign(strings.Repeat("a", maxToken), model, holder), model, holder, 0, "", tokenInvalid},
	} {
		t.Run(name, func(t *testing.T) {
			tokens := newSessionTokens(t, testSecret) // of another router
			tokens.now = func() time.Time { return clock.Now().Add(test.later) }
			if got := tokens.open(test.token, test.model, test.holder); got != test.want {
				t.Errorf("address %q, want %q", got, test.want)
			}
			var want [tokenResults]uint64
			if test.want == "" {
				want[test.result] = 1
			}
			if got := results(tokens); got != want {
				t.Errorf("counted %v, want %v", got, want)
			}
		})
	}
}

// TestSecretsThatAreNotGivenAreRandom: a token holds for its process then.
func TestSecretsThatAreNotGivenAreRandom(t *testing.T) {
	one, other := newSessionTokens(t, ""), newSessionTokens(t, "")
	token := one.sign("a", "m", "")
	if one.open(token, "m", "") != "a" || other.open(token, "m", "") != "" {
		t.Error("a token of one process holds for another")
	}
}

// TestAnAnswerCarriesItsWorkersToken covers a client that may not see decisions, too.
func TestAnAnswerCarriesItsWorkersToken(t *testing.T) {
	rt := gatewayRouter(t, 1)
	tokens := newSessionTokens(t, testSecret)
	for _, silent := range []bool{false, true} {
		w, _, err := sendByGatewayAs(t, rt, func(u *Upstream) {
			u.Silent, u.Gateway.Tokens, u.Gateway.client = silent, tokens, Client{Key: "team-a", Model: "m"}
		}, func(Routed) (*http.Response, string, error) { return answered(200, "application/json", "{}"), "", nil })
		if err != nil {
			t.Fatal(err)
		}
		token := w.Header().Get(HeaderSession)
		if silent && token != "" || !silent && tokens.open(token, "m", "team-a") != "10.0.0.0:8000" {
			t.Errorf("silent %v: token %q", silent, token)
		}
	}
}

// FuzzSessionToken opens anything: only what was signed names an address.
func FuzzSessionToken(f *testing.F) {
	tokens := newSessionTokens(f, testSecret)
	token := tokens.sign("10.0.0.1:8000", "m", "team-a")
	f.Add(token)
	f.Add(token[:50])
	f.Add("MTAuMC4wLjE6ODAwMA==")
	f.Add("")
	valid, _ := base64.RawURLEncoding.DecodeString(token)
	f.Fuzz(func(t *testing.T, text string) {
		address := tokens.open(text, "m", "team-a")
		if decoded, err := base64.RawURLEncoding.DecodeString(text); address != "" && (err != nil || !slices.Equal(decoded, valid)) {
			t.Errorf("%q names %q", text, address)
		}
	})
}
