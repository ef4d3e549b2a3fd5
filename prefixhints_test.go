package main

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/tidwall/gjson"
)

// clerk is a policy that takes the first candidate and writes down what it is
// asked and told.
type clerk struct {
	mu        sync.Mutex // guards all below
	asked     []Query
	chosen    []WorkerKey
	feedbacks []Feedback
}

func (p *clerk) Traits() Traits { return Traits{} }

func (p *clerk) Choose(q Query, candidates []Candidate, _ *rand.Rand) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked = append(p.asked, q)
	p.chosen = append(p.chosen, candidates[0].Target.Key)
	return 0
}

func (p *clerk) Judge(f Feedback) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.feedbacks = append(p.feedbacks, f)
}

// told returns what the policy was told so far.
func (p *clerk) told() []Feedback {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.feedbacks)
}

// queries returns what the policy was asked so far.
func (p *clerk) queries() []Query {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.asked)
}

func TestPrefixHintsComeFromThreePlaces(t *testing.T) {
	none := PrefixHints{}
	for _, c := range []struct {
		nvext   string
		headers []string
		want    PrefixHints
		bad     string // the parameter at fault
	}{
		{``, nil, none, ""},
		{`{"annotations":["prefix_id:a:b","total_requests:10","osl:high","iat:LOW"]}`, nil, PrefixHints{ID: "a:b", Total: 10, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"annotations":["prefix_id","osl",7,null,{"osl":1}]}`, nil, none, ""},
		{`{"agent_hints":{"prefix_id":"p","total_requests":7,"osl":2048,"iat":50}}`, nil, PrefixHints{ID: "p", Total: 7, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"agent_hints":{"prefix_id":null,"total_requests":null,"osl":null,"iat":null}}`, nil, none, ""},
		{``, []string{"x-prefix-id", "h", "x-prefix-total-requests", "3", "x-prefix-osl", "LOW", "x-prefix-iat", "900"}, PrefixHints{ID: "h", Total: 3, OSL: LevelLow, IAT: LevelHigh}, ""},

		// Who goes first, one by one.
		{`{"annotations":["prefix_id:first","prefix_id:second","osl:LOW","osl:HIGH","total_requests:x","total_requests:9"]}`, nil, PrefixHints{ID: "first", Total: 1, OSL: LevelLow}, ""},
		{`{"annotations":["prefix_id:a","total_requests:2","osl:LOW","iat:LOW"],"agent_hints":{"prefix_id":"b","osl":512}}`, nil, PrefixHints{ID: "b", Total: 2, IAT: LevelLow}, ""},
		{`{"agent_hints":{"prefix_id":"b","total_requests":5,"osl":2000,"iat":2000}}`, []string{"x-prefix-id", "c", "x-prefix-iat", "LOW"}, PrefixHints{ID: "c", Total: 5, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"agent_hints":{"total_requests":5,"osl":2000}}`, []string{"x-prefix-total-requests", "many", "x-prefix-osl", "some"}, PrefixHints{Total: 1}, ""},

		// Numbers and the levels they are.
		{``, []string{"x-prefix-osl", "255.9", "x-prefix-iat", "99"}, PrefixHints{OSL: LevelLow, IAT: LevelLow}, ""},
		{``, []string{"x-prefix-osl", "256", "x-prefix-iat", "100"}, none, ""},
		{``, []string{"x-prefix-osl", "1023", "x-prefix-iat", "499"}, none, ""},
		{``, []string{"x-prefix-osl", "1024", "x-prefix-iat", "500"}, PrefixHints{OSL: LevelHigh, IAT: LevelHigh}, ""},
		{`{"agent_hints":{"osl":255,"iat":499}}`, nil, PrefixHints{OSL: LevelLow}, ""},
		{``, []string{"x-prefix-osl", " High ", "x-prefix-iat", "nan"}, PrefixHints{OSL: LevelHigh}, ""},

		// Leniency, where the text has no type.
		{`{"annotations":["total_requests:ten","osl:long","iat:"]}`, nil, PrefixHints{Total: 1}, ""},
		{``, []string{"x-prefix-total-requests", "-3"}, PrefixHints{Total: 1}, ""},
		{``, []string{"x-prefix-total-requests", "99999999999"}, PrefixHints{Total: 1}, ""},
		{`{"agent_hints":{"total_requests":0}}`, nil, PrefixHints{Total: 1}, ""},

		{`{"agent_hints":{"prefix_id":7}}`, nil, none, "nvext.agent_hints.prefix_id"},
		{`{"agent_hints":{"total_requests":"7"}}`, nil, none, "nvext.agent_hints.total_requests"},
		{`{"agent_hints":{"total_requests":-1}}`, nil, none, "nvext.agent_hints.total_requests"},
		{`{"agent_hints":{"osl":"LOW"}}`, nil, none, "nvext.agent_hints.osl"},
		{`{"agent_hints":{"iat":2.5}}`, nil, none, "nvext.agent_hints.iat"},
		{`{"agent_hints":{"prefix_id":"` + strings.Repeat("x", maxPrefixID+1) + `"}}`, nil, none, "nvext.agent_hints.prefix_id"},
		{`{"annotations":["prefix_id:` + strings.Repeat("x", maxPrefixID+1) + `"]}`, nil, none, "nvext.annotations"},
		{``, []string{"x-prefix-id", strings.Repeat("x", maxPrefixID+1)}, none, "X-Prefix-Id"},
	} {
		header := http.Header{}
		for i := 0; i < len(c.headers); i += 2 {
			header.Set(c.headers[i], c.headers[i+1])
		}
		got, bad := readHints(header, gjson.Parse(c.nvext))
		switch {
		case c.bad != "" && (bad == nil || bad.param != c.bad):
			t.Errorf("%.80s %.80q: error %v, want one about %s", c.nvext, c.headers, bad, c.bad)
		case c.bad == "" && (bad != nil || !reflect.DeepEqual(got.Prefix, c.want)):
			t.Errorf("%s %q: %+v, %v, want %+v", c.nvext, c.headers, got.Prefix, bad, c.want)
		}
	}
}

func TestPrefixHintsReachThePolicy(t *testing.T) {
	worker := newFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) })
	h := newHouse(t, Config{}, worker.URL)
	policy := new(clerk)
	h.router.policy = policy
	body := `{"prompt":"p","messages":[],"nvext":{"agent_hints":{"prefix_id":"s","osl":2000},"annotations":["iat:LOW"]}}`
	for _, path := range []string{chatPath, completionsPath, "/v1/responses", "/v1/messages", "/v1/embeddings"} {
		if response, answer := h.post(t, path, body, "x-prefix-total-requests", "4"); response.StatusCode != 200 {
			t.Fatalf("%s: %s", path, answer)
		}
		queries := policy.queries()
		if got, want := queries[len(queries)-1].Prefix, (PrefixHints{ID: "s", Total: 4, OSL: LevelHigh, IAT: LevelLow}); got != want {
			t.Errorf("%s: the policy saw %+v, want %+v", path, got, want)
		}
	}
	for _, got := range worker.received() {
		if got != body {
			t.Errorf("the worker got %s", got)
		}
	}
}

func FuzzHints(f *testing.F) {
	f.Add(`{"annotations":["prefix_id:a","total_requests:10","osl:high","iat:5"]}`, "h", "3", "LOW", "9e9")
	f.Add(`{"agent_hints":{"prefix_id":"p","total_requests":7,"osl":2048,"iat":50}}`, "", "", "", "")
	f.Add(`{"agent_hints":{"total_requests":1e99,"prefix_id":{}},"annotations":[[]]}`, "", "-1", "nan", " ")
	f.Fuzz(func(t *testing.T, nvext, id, total, osl, iat string) {
		header := http.Header{"X-Prefix-Id": {id}, "X-Prefix-Total-Requests": {total}, "X-Prefix-Osl": {osl}, "X-Prefix-Iat": {iat}}
		hints, bad := readHints(header, gjson.Parse(nvext))
		p := hints.Prefix
		if bad == nil && (len(p.ID) > maxPrefixID || p.Total < 0 || p.OSL > LevelHigh || p.IAT > LevelHigh || p.Budget != nil || hints.ExpectedOutput < 0) {
			t.Errorf("%+v", hints)
		}
		if bad == nil && id != "" && p.ID != id || bad == nil && total != "" && p.Total < 1 {
			t.Errorf("headers %q %q, read %+v", id, total, p)
		}
	})
}
