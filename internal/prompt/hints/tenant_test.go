package hints

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"
)

func TestTenantsAndObjectives(t *testing.T) {
	for name, test := range map[string]struct {
		headers map[string]string
		tenant  string
		ttft    time.Duration
		tpot    time.Duration
		bad     string
	}{
		"none":                        {},
		"llm-d's":                     {headers: map[string]string{"x-llm-d-inference-fairness-id": "a", "x-gateway-inference-fairness-id": "b"}, tenant: "a"},
		"the gateway extension's":     {headers: map[string]string{"x-gateway-inference-fairness-id": "b"}, tenant: "b"},
		"a long name is cut":          {headers: map[string]string{HeaderFairness: strings.Repeat("ä", 100)}, tenant: strings.Repeat("ä", 32)},
		"what is no text is cut":      {headers: map[string]string{HeaderFairness: "a\xffb"}, tenant: "ab"},
		"an objective":                {headers: map[string]string{HeaderTTFT: "250"}, ttft: 250 * time.Millisecond},
		"half a millisecond":          {headers: map[string]string{HeaderTTFT: "0.5"}, ttft: 500 * time.Microsecond},
		"of further tokens":           {headers: map[string]string{HeaderTPOT: "40.5"}, tpot: 40500 * time.Microsecond},
		"of all tokens":               {headers: map[string]string{HeaderTPOT: "40", HeaderTTFT: "1000"}, ttft: time.Second, tpot: 40 * time.Millisecond},
		"of further tokens, none":     {headers: map[string]string{HeaderTPOT: "-1"}, bad: HeaderTPOT},
		"an objective of nothing":     {headers: map[string]string{HeaderTTFT: "0"}, bad: HeaderTTFT},
		"an objective below 0":        {headers: map[string]string{HeaderTTFT: "-1"}, bad: HeaderTTFT},
		"an objective beyond a day":   {headers: map[string]string{HeaderTTFT: "86400001"}, bad: HeaderTTFT},
		"an objective that is none":   {headers: map[string]string{HeaderTTFT: "NaN"}, bad: HeaderTTFT},
		"an objective that is a text": {headers: map[string]string{HeaderTTFT: "soon"}, bad: HeaderTTFT},
	} {
		t.Run(name, func(t *testing.T) {
			header := http.Header{}
			for name, value := range test.headers {
				header.Set(name, value)
			}
			got, bad := Read(header, gjson.Result{}, nil, true)
			if (bad != nil) != (test.bad != "") || bad != nil && bad.Param != test.bad {
				t.Fatalf("%v, want an error about %q", bad, test.bad)
			}
			if got.Tenant != test.tenant || bad == nil && (got.TTFT != test.ttft || got.TPOT != test.tpot) {
				t.Errorf("tenant %q within %v, then %v a token", got.Tenant, got.TTFT, got.TPOT)
			}
			if got, bad := Read(header, gjson.Result{}, nil, false); got.Tenant != "" || got.TTFT != 0 || got.TPOT != 0 || bad != nil {
				t.Errorf("of an untrusted client: %+v, %v", got, bad)
			}
		})
	}
}

// TestClasses: every client may name a class, and a name that is none is an error.
func TestClasses(t *testing.T) {
	for name, want := range map[string]string{"": "", "interactive": "interactive", "standard": "standard", "batch": "batch", "urgent": "error", "Batch": "error"} {
		for _, trusted := range []bool{true, false} {
			got := ""
			hints, bad := Read(http.Header{HeaderClass: {name}}, gjson.Result{}, nil, trusted)
			switch {
			case bad != nil && bad.Param == HeaderClass:
				got = "error"
			case hints.Class != nil:
				got = hints.Class.String()
			}
			if got != want {
				t.Errorf("%q, trusted %v: %q (%v), want %q", name, trusted, got, bad, want)
			}
		}
	}
}
