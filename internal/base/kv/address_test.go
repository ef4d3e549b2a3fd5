package kv

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

func FuzzParseURL(f *testing.F) {
	for _, seed := range []string{"http://h:8100", "https://[::1]/x/", "http://u:p@h", "http://h?x#y", "http://h:99999", "http://%41/", "HTTP://h//", "http://h/%zz", "http://h /", "http://0:"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		base, err := ParseURL(value)
		if err != nil {
			return
		}
		request, err := http.NewRequest(http.MethodGet, base+"/health", nil)
		if err != nil {
			t.Fatalf("%q: %v", base, err)
		}
		u := request.URL
		if u.User != nil || u.RawQuery != "" || u.Fragment != "" || !strings.HasSuffix(u.Path, "/health") || u.Hostname() == "" {
			t.Errorf("%q became %q", value, u)
		}
		given, err := url.Parse(value)
		if err != nil || given.Hostname() != u.Hostname() || given.Port() != u.Port() {
			t.Errorf("%q leads to %q", value, u.Host)
		}
	})
}

func FuzzParseEndpoint(f *testing.F) {
	for _, seed := range []string{"tcp://h:5557", "ipc:///run/x", "tcp://*:1", "tcp://[::1]:5557", "tcp://h:70000", "ipc://", "tcp://a b:1", "tcp://h:1\n"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, value string) {
		endpoint, err := ParseEndpoint(value)
		if err == nil && (endpoint != value || len(endpoint) > maxAddress || strings.ContainsAny(endpoint, " \n\r\t")) {
			t.Errorf("%q became %q", value, endpoint)
		}
	})
}
