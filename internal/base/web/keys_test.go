package web

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/gin-gonic/gin"
	"pgregory.net/rapid"
)

// askFrom sends a request with a key from an address and returns the status.
func askFrom(k *Keys, address, key string) int {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("Authorization", "Bearer "+key)
	return answerTo(k, r, address)
}

// answerTo returns the status of the answer to a request from an address.
func answerTo(k *Keys, r *http.Request, address string) int { return answer(k, r, address).Code }

// answer returns that answer.
func answer(k *Keys, r *http.Request, address string) *httptest.ResponseRecorder {
	engine := gin.New()
	engine.GET("/", RequireKey(k, "the key", Fail))
	r.RemoteAddr = address
	w := httptest.NewRecorder()
	engine.ServeHTTP(w, r)
	return w
}

// TestWrongKeysAreSlowedByAddress: and the right one is never refused for them.
func TestWrongKeysAreSlowedByAddress(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	k := NewKeys([]string{"right"})
	k.now = func() time.Time { return now }
	tried := func(address string) (n int) {
		for range 3 * triesAtOnce {
			switch status := askFrom(k, address, "wrong"); status {
			case http.StatusUnauthorized:
				n++
			case http.StatusTooManyRequests:
			default:
				t.Errorf("a wrong key is answered %d", status)
			}
		}
		if status := askFrom(k, address, "right"); status != http.StatusOK {
			t.Errorf("%s: the right key is answered %d", address, status)
		}
		for _, none := range []string{"", "Bearer", "Bearer "} {
			r := httptest.NewRequest(http.MethodGet, "/", nil)
			r.Header.Set("Authorization", none)
			if status := answerTo(k, r, address); status != http.StatusUnauthorized {
				t.Errorf("%s: no key is answered %d", address, status)
			}
		}
		return n
	}
	for _, test := range []struct {
		address string
		after   time.Duration
		want    int
	}{
		{"10.0.0.1:1", 0, triesAtOnce},
		{"10.0.0.1:2", 0, 0},
		{"[::ffff:10.0.0.1]:2", 0, 0},
		{"10.0.0.2:1", 0, triesAtOnce},
		{"[2001:db8::1]:1", 0, triesAtOnce},
		{"[2001:db8::2]:1", 0, 0}, // one client has the whole network
		{"[2001:db8:0:1::1]:1", 0, triesAtOnce},
		{"[fe80::1%eth0]:1", 0, triesAtOnce},
		{"10.0.0.1:3", 2 * time.Second, 2 * triesPerSecond},
		{"10.0.0.1:3", time.Hour, triesAtOnce},
		{"", 0, triesAtOnce},
	} {
		now = now.Add(test.after)
		if n := tried(test.address); n != test.want {
			t.Errorf("%s: %d wrong keys could be tried, want %d", test.address, n, test.want)
		}
	}
}

func TestAddressesOfTriesAreBounded(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	k := NewKeys([]string{"right"})
	k.now = func() time.Time { return now }
	for i := range 2 * maxTriers {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr = fmt.Sprintf("10.1.%d.%d:1", i>>8, i&255)
		k.try(AddressOf(r))
	}
	if n := len(k.tries); n > maxTriers+1 {
		t.Errorf("%d addresses are remembered", n)
	}
	if status := askFrom(k, "10.9.9.9:1", "wrong"); status != http.StatusTooManyRequests {
		t.Errorf("a new address beyond the bound is answered %d", status)
	}
	now = now.Add(time.Minute)
	if status := askFrom(k, "10.9.9.9:1", "wrong"); status != http.StatusUnauthorized || len(k.tries) > 2 {
		t.Errorf("after a minute: %d, %d addresses", status, len(k.tries))
	}
}

// TestTriesNeverExceedTheRate: of one address, whatever others do.
func TestTriesNeverExceedTheRate(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now, began := time.Unix(1_000_000, 0), time.Unix(1_000_000, 0)
		k := NewKeys([]string{"right"})
		k.now = func() time.Time { return now }
		let := map[int]int{}
		for range rapid.IntRange(1, 200).Draw(t, "n") {
			now = now.Add(time.Duration(rapid.IntRange(0, 300).Draw(t, "ms")) * time.Millisecond)
			who := rapid.IntRange(1, 3).Draw(t, "who")
			if k.try(AddressOf(&http.Request{RemoteAddr: fmt.Sprintf("10.0.0.%d:1", who)})) {
				let[who]++
			}
			if most := triesAtOnce + triesPerSecond*now.Sub(began).Seconds() + 1e-6; float64(let[who]) > most {
				t.Fatalf("%d tries in %v", let[who], now.Sub(began))
			}
		}
	})
}
