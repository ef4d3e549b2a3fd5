package hints

import (
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

func TestPrefixHintsComeFromThreePlaces(t *testing.T) {
	none := Prefix{}
	for _, c := range []struct {
		nvext   string
		headers []string
		want    Prefix
		bad     string // the parameter at fault
	}{
		{``, nil, none, ""},
		{`{"annotations":["prefix_id:a:b","total_requests:10","osl:high","iat:LOW"]}`, nil, Prefix{ID: "a:b", Total: 10, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"annotations":["prefix_id","osl","iat"]}`, nil, none, ""},
		{`{"agent_hints":{"prefix_id":"p","total_requests":7,"osl":2048,"iat":50}}`, nil, Prefix{ID: "p", Total: 7, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"agent_hints":{"prefix_id":null,"total_requests":null,"osl":null,"iat":null}}`, nil, none, ""},
		{``, []string{"x-prefix-id", "h", "x-prefix-total-requests", "3", "x-prefix-osl", "LOW", "x-prefix-iat", "900"}, Prefix{ID: "h", Total: 3, OSL: LevelLow, IAT: LevelHigh}, ""},

		// Who goes first, one by one.
		{`{"annotations":["prefix_id:first","prefix_id:second","osl:LOW","osl:HIGH","total_requests:x","total_requests:9"]}`, nil, Prefix{ID: "first", Total: 1, OSL: LevelLow}, ""},
		{`{"annotations":["prefix_id:a","total_requests:2","osl:LOW","iat:LOW"],"agent_hints":{"prefix_id":"b","osl":512}}`, nil, Prefix{ID: "b", Total: 2, IAT: LevelLow}, ""},
		{`{"agent_hints":{"prefix_id":"b","total_requests":5,"osl":2000,"iat":2000}}`, []string{"x-prefix-id", "c", "x-prefix-iat", "LOW"}, Prefix{ID: "c", Total: 5, OSL: LevelHigh, IAT: LevelLow}, ""},
		{`{"agent_hints":{"total_requests":5,"osl":2000}}`, []string{"x-prefix-total-requests", "many", "x-prefix-osl", "some"}, Prefix{Total: 1}, ""},

		// Numbers and the levels they are.
		{``, []string{"x-prefix-osl", "255.9", "x-prefix-iat", "99"}, Prefix{OSL: LevelLow, IAT: LevelLow}, ""},
		{``, []string{"x-prefix-osl", "256", "x-prefix-iat", "100"}, none, ""},
		{``, []string{"x-prefix-osl", "1023", "x-prefix-iat", "499"}, none, ""},
		{``, []string{"x-prefix-osl", "1024", "x-prefix-iat", "500"}, Prefix{OSL: LevelHigh, IAT: LevelHigh}, ""},
		{`{"agent_hints":{"osl":255,"iat":499}}`, nil, Prefix{OSL: LevelLow}, ""},
		{``, []string{"x-prefix-osl", " High ", "x-prefix-iat", "nan"}, Prefix{OSL: LevelHigh}, ""},

		// Leniency, where the text has no type.
		{`{"annotations":["total_requests:ten","osl:long","iat:"]}`, nil, Prefix{Total: 1}, ""},
		{``, []string{"x-prefix-total-requests", "-3"}, Prefix{Total: 1}, ""},
		{``, []string{"x-prefix-total-requests", "99999999999"}, Prefix{Total: 1}, ""},
		{`{"agent_hints":{"total_requests":0}}`, nil, Prefix{Total: 1}, ""},

		{`{"agent_hints":{"prefix_id":7}}`, nil, none, "nvext.agent_hints.prefix_id"},
		{`{"agent_hints":{"total_requests":"7"}}`, nil, none, "nvext.agent_hints.total_requests"},
		{`{"agent_hints":{"total_requests":-1}}`, nil, none, "nvext.agent_hints.total_requests"},
		{`{"agent_hints":{"osl":"LOW"}}`, nil, none, "nvext.agent_hints.osl"},
		{`{"agent_hints":{"iat":2.5}}`, nil, none, "nvext.agent_hints.iat"},
		{`{"agent_hints":{"prefix_id":"` + strings.Repeat("x", MaxPrefixID+1) + `"}}`, nil, none, "nvext.agent_hints.prefix_id"},
		{`{"annotations":["prefix_id:` + strings.Repeat("x", MaxPrefixID+1) + `"]}`, nil, none, "nvext.annotations"},
		{``, []string{"x-prefix-id", strings.Repeat("x", MaxPrefixID+1)}, none, "X-Prefix-Id"},
	} {
		header := http.Header{}
		for i := 0; i < len(c.headers); i += 2 {
			header.Set(c.headers[i], c.headers[i+1])
		}
		got, bad := Read(header, gjson.Parse(c.nvext), nil, true)
		switch {
		case c.bad != "" && (bad == nil || bad.Param != c.bad):
			t.Errorf("%.80s %.80q: error %v, want one about %s", c.nvext, c.headers, bad, c.bad)
		case c.bad == "" && (bad != nil || !reflect.DeepEqual(got.Prefix, c.want)):
			t.Errorf("%s %q: %+v, %v, want %+v", c.nvext, c.headers, got.Prefix, bad, c.want)
		}
	}
}

func FuzzHints(f *testing.F) {
	f.Add(`{"annotations":["prefix_id:a","total_requests:10","osl:high","iat:5"]}`, "h", "3", "LOW", "9e9")
	f.Add(`{"agent_hints":{"prefix_id":"p","total_requests":7,"osl":2048,"iat":50}}`, "", "", "", "")
	f.Add(`{"agent_hints":{"total_requests":1e99,"prefix_id":{}},"annotations":[[]]}`, "", "-1", "nan", " ")
	f.Fuzz(func(t *testing.T, nvext, id, total, osl, iat string) {
		header := http.Header{"X-Prefix-Id": {id}, "X-Prefix-Total-Requests": {total}, "X-Prefix-Osl": {osl}, "X-Prefix-Iat": {iat}}
		hints, bad := Read(header, gjson.Parse(nvext), nil, true)
		p := hints.Prefix
		if bad == nil && (len(p.ID) > MaxPrefixID || p.Total < 0 || p.OSL > LevelHigh || p.IAT > LevelHigh || p.Budget != nil || hints.ExpectedOutput < 0) {
			t.Errorf("%+v", hints)
		}
		if bad == nil && id != "" && p.ID != id || bad == nil && total != "" && p.Total < 1 {
			t.Errorf("headers %q %q, read %+v", id, total, p)
		}
	})
}
