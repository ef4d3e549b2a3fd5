package openai

import (
	"net/http"
	"testing"

	"kvrouter/internal/serve/keys"
)

func TestWhoIsOneClient(t *testing.T) {
	for _, test := range []struct {
		name, key, from, want string
	}{
		{"a key", "team-a", "10.0.0.1:2000", "key team-a"},
		{"no key", "", "10.0.0.1:2000", "10.0.0.1"},
		{"IPv4 over a socket for both", "", "[::ffff:10.0.0.1]:2000", "10.0.0.1"},
		{"a network of IPv6", "", "[2001:db8:0:1:aaaa::1]:2000", "2001:db8:0:1::/64"},
		{"another address of that", "", "[2001:db8:0:1:bbbb::2]:3000", "2001:db8:0:1::/64"},
		{"an interface's own", "", "[fe80::1%eth0]:3000", "fe80::/64"},
		{"a request of this process", "", "", ""},
		{"what is no address", "", "@", ""},
	} {
		r := &http.Request{RemoteAddr: test.from, Header: http.Header{"X-Forwarded-For": {"192.0.2.9"}, "Forwarded": {"for=192.0.2.9"}}}
		if got := clientOf(r, &keys.Caller{Name: test.key}); got != test.want {
			t.Errorf("%s: %q, want %q", test.name, got, test.want)
		}
	}
}
