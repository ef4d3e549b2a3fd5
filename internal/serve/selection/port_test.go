package selection

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"fmt"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

// newPort returns what the router port over a router answers to any request.
func newPort(t *testing.T, rt *router.Router, s Settings) func(method, path, body string, headers ...string) (int, gjson.Result) {
	s.KVEvents = true
	service, _ := newFinder(t, rt)
	service.settings = s
	handler := service.Handler()
	return func(method, path, body string, headers ...string) (int, gjson.Result) {
		w := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		request.Host = "127.0.0.1:7000"
		for i := 0; i+1 < len(headers); i += 2 {
			if headers[i] == "Host" {
				request.Host = headers[i+1]
			}
			request.Header.Set(headers[i], headers[i+1])
		}
		handler.ServeHTTP(w, request)
		return w.Code, gjson.Parse(w.Body.String())
	}
}

// TestEveryEndOfAReservationIsToldOnce: clients of the router port do not say how a request ended.
func TestEveryEndOfAReservationIsToldOnce(t *testing.T) {
	for _, c := range []struct {
		name  string
		calls []string // METHOD path body
		want  []policytest.ToldEnding
	}{
		{"freed without a first token", []string{"DELETE /reservations/a"}, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"freed after the first token", []string{"POST /reservations/a/prefill_complete", "DELETE /reservations/a"}, []policytest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"freed twice", []string{"DELETE /reservations/a", "DELETE /reservations/a"}, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"mark_free", []string{`POST /route {"method":"mark_prefill","request_id":"a"}`, `POST /route {"method":"mark_free","request_id":"a"}`}, []policytest.ToldEnding{{Ending: policy.Finished, TokensOut: 0}}},
		{"another request has ended", []string{`POST /select_and_reserve {"selection_id":"b","token_ids":[1]}`, "DELETE /reservations/b"}, []policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}},
		{"chosen, but not booked", []string{`POST /select {"selection_id":"b","token_ids":[1]}`, `POST /find_best_worker {"token_ids":[1]}`}, nil},
		{"booked, but not chosen", []string{`POST /reservations {"selection_id":"b","token_ids":[1],"worker_id":0}`, "DELETE /reservations/b"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			policy := new(policytest.Clerk)
			rt := routertest.New(t, "", 1, routertest.WithPolicy(policy))
			ask := newPort(t, rt, Settings{})
			for _, call := range append([]string{`POST /select_and_reserve {"selection_id":"a","token_ids":[1]}`}, c.calls...) {
				parts := append(strings.SplitN(call, " ", 3), "")
				if status, answer := ask(parts[0], parts[1], parts[2]); status >= 300 && call != "DELETE /reservations/a" {
					t.Fatalf("%s: %d %s", call, status, answer.Raw)
				}
			}
			if got := policy.Endings(); !slices.Equal(got, c.want) {
				t.Errorf("told %v, want %v", got, c.want)
			}
		})
	}
	t.Run("nobody speaks of it", func(t *testing.T) {
		rule := new(policytest.Clerk)
		rt, clock := routertest.NewClocked(t, 1, routertest.WithPolicy(rule))
		routertest.MustRoute(t, rt, router.Request{ID: "forgotten", Tokens: testkit.Tokens(1, 8)})
		clock.Advance(router.BookingExpiry)
		rt.Loads()
		if got := fmt.Sprint(rule.Endings()); got != fmt.Sprint([]policytest.ToldEnding{{Ending: policy.Abandoned, TokensOut: 0}}) {
			t.Errorf("told %s", got)
		}
	})
}

func TestFindBestWorker(t *testing.T) {
	rt := routertest.New(t, "round-robin", 2)
	_, ask := newFinder(t, rt)
	post := func(body string) (int, gjson.Result) { return ask("/find_best_worker", body) }
	for _, bad := range []string{``, `{}`, `{"local_hashes":[1]}`, `{"local_hashes":[1],"num_tokens":0}`, `{"local_hashes":["x"],"num_tokens":4}`, `{"local_hashes":[1.5],"num_tokens":4}`} {
		if status, answer := post(bad); status != 400 || !answer.Get("error").Exists() {
			t.Errorf("%s: %d %s", bad, status, answer.Raw)
		}
	}
	for want := range 2 {
		if status, answer := post(`{"local_hashes":[14643705804678351452,-3],"num_tokens":9}`); status != 200 || answer.Get("worker_id").Int() != int64(want) {
			t.Errorf("%d %s", status, answer.Raw)
		}
	}
	rt.Down(kv.WorkerKey{Worker: 0})
	rt.Down(kv.WorkerKey{Worker: 1})
	if status, _ := post(`{"local_hashes":[1],"num_tokens":9}`); status != 503 {
		t.Errorf("no worker: %d", status)
	}
}

func TestOverlapScoresAndDump(t *testing.T) {
	rt := routertest.New(t, "round-robin", 2)
	ask := newPort(t, rt, Settings{})
	routertest.Hold(rt, 0, testkit.Tokens(1, 8))
	routertest.Hold(rt, 1, testkit.Tokens(1, 4))
	_, g := ask("POST", "/overlap_scores", `{"token_ids":[1,2,3,4,5,6,7,8,9,10,11,12]}`)
	if g.Get("num_blocks").Int() != 3 || g.Get("workers.0.device_blocks").Int() != 2 || g.Get("workers.1.device_blocks").Int() != 1 {
		t.Errorf("%s", g.Raw)
	}
	_, g = ask("GET", "/dump", "")
	if list := g.Get("default:default.events").Array(); len(list) != 2 || list[0].Get("event.data.stored.parent_hash").Type != gjson.Null ||
		fmt.Sprint(list[0].Get("event.data.stored.blocks.#.tokens_hash")) != "[14643705804678351452,16777012769546811212]" {
		t.Errorf("%s", g.Raw)
	}
}

func TestSelectionRefusesBodiesOver8MiB(t *testing.T) {
	_, ask := newFinder(t, routertest.New(t, "round-robin", 1))
	for _, path := range []string{"/select", "/workers", "/reservations", "/route", "/find_best_worker"} {
		status, answer := ask(path, `{"token_ids":"`+strings.Repeat("x", SelectionBodyLimit)+`"}`)
		if status != 413 || !strings.Contains(answer.Get("error").String(), "8388608") {
			t.Errorf("%s: %d %s", path, status, answer.Raw)
		}
	}
}

// TestPagesOfOtherSitesRegisterNoWorker is what a browser can be made to send to a
// router on the same machine.
func TestPagesOfOtherSitesRegisterNoWorker(t *testing.T) {
	ask := newPort(t, routertest.New(t, "kv", 0), Settings{Host: "127.0.0.1", BlockSize: 64})
	body := `{"worker_id":66,"model_name":"m","endpoint":"http://127.0.0.1:9","kv_events_endpoint":"tcp://127.0.0.1:9"}`
	for _, test := range []struct {
		name, kind, origin, host string
		want                     int
	}{
		{"a form", "text/plain", "", "", 415},
		{"a page", "application/json", "http://evil.example", "", 403},
		{"a page whose name leads here", "application/json", "http://evil.example", "evil.example", 403},
		{"a program", "application/json", "", "", 201},
	} {
		headers := []string{"Content-Type", test.kind, "Host", cmp.Or(test.host, "127.0.0.1:7000")}
		if test.origin != "" {
			headers = append(headers, "Origin", test.origin)
		}
		status, answer := ask("POST", "/workers", body, headers...)
		if status != test.want {
			t.Errorf("%s: %d %s, want %d", test.name, status, answer.Raw, test.want)
		}
	}
}

// TestThePortReadsKeysAndPackedBodies: a body may be gzip, and begin with a byte order mark.
func TestThePortReadsKeysAndPackedBodies(t *testing.T) {
	ask := newPort(t, routertest.New(t, "kv", 1), Settings{Keys: web.NewKeys([]string{"r"})})
	if status, _ := ask("GET", "/dump", ""); status != 401 {
		t.Errorf("without a key: %d", status)
	}
	const body = "\xef\xbb\xbf" + `{"token_ids":[1]}`
	var packed bytes.Buffer
	zip := gzip.NewWriter(&packed)
	fmt.Fprint(zip, body)
	zip.Close()
	for coding, text := range map[string]string{"identity": body, "gzip": packed.String()} {
		if status, answer := ask("POST", "/potential_loads", text, "Authorization", "Bearer r", "Content-Encoding", coding); status != 200 {
			t.Errorf("%s: %d %s", coding, status, answer.Raw)
		}
	}
}
