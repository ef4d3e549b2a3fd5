package hints

import (
	"errors"
	"math"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
)

func TestHintsAreReadFromBodyAndHeaders(t *testing.T) {
	worker := func(id uint64, rank uint32) *kv.WorkerKey { return &kv.WorkerKey{Worker: id, Rank: rank} }
	for _, c := range []struct {
		nvext                            string
		headerWorker, headerRank         string
		headerPrefill, headerPrefillRank string
		want                             Hints
		bad                              string // the parameter at fault
	}{
		{nvext: ``},
		{nvext: `null`},
		{nvext: `{}`},
		{nvext: `{"annotations":null,"agent_hints":null,"backend_instance_id":null,"dp_rank":null}`},
		{nvext: `{"annotations":["formatted_prompt","token_ids","x:y"],"greed_sampling":true,"extra_fields":["worker_id"]}`},
		{nvext: `{"annotations":["llm_metrics","query_instance_id"]}`, want: Hints{Query: true}},
		{nvext: `{"annotations":["query_instance_id:"]}`, want: Hints{Query: true}},
		{nvext: `{"annotations":["worker_instance_id:3"]}`, want: Hints{Pinned: worker(3, 0), Whole: true}},
		{nvext: `{"annotations":["worker_instance_id"]}`},
		{nvext: `{"backend_instance_id":18446744073709551615,"dp_rank":2}`, want: Hints{Pinned: worker(1<<64-1, 2), Whole: true}},
		{nvext: `{"backend_instance_id":4,"annotations":["worker_instance_id:3","query_instance_id"]}`, want: Hints{Pinned: worker(4, 0), Whole: true, Query: true}},
		{nvext: `{"backend_instance_id":4,"dp_rank":1}`, headerWorker: "5", headerRank: "6", want: Hints{Pinned: worker(5, 6), Whole: true}},
		{headerWorker: "5", want: Hints{Pinned: worker(5, 0), Whole: true}},
		{nvext: `{"decode_worker_id":5,"decode_dp_rank":1}`, want: Hints{Pinned: worker(5, 1)}},
		{nvext: `{"decode_worker_id":5,"backend_instance_id":4}`, want: Hints{Pinned: worker(5, 0)}},
		{nvext: `{"decode_worker_id":5}`, headerWorker: "6", want: Hints{Pinned: worker(6, 0), Whole: true}},
		{nvext: `{"prefill_worker_id":3,"prefill_dp_rank":2}`, want: Hints{PinnedPrefill: worker(3, 2)}},
		{nvext: `{"prefill_worker_id":3,"decode_worker_id":5}`, want: Hints{PinnedPrefill: worker(3, 0), Pinned: worker(5, 0)}},
		{nvext: `{"prefill_worker_id":3,"backend_instance_id":5}`, want: Hints{PinnedPrefill: worker(3, 0), Pinned: worker(5, 0)}},
		{nvext: `{"prefill_worker_id":5,"decode_worker_id":5,"prefill_dp_rank":1,"decode_dp_rank":1}`, want: Hints{Pinned: worker(5, 1), Whole: true}},
		{nvext: `{"prefill_worker_id":3}`, headerPrefill: "4", headerPrefillRank: "1", want: Hints{PinnedPrefill: worker(4, 1)}},
		{nvext: `{"agent_hints":{"priority":5,"strict_priority":4294967295,"osl":1024,"speculative_prefill":true}}`,
			want: Hints{PriorityJump: 5, StrictPriority: 1<<32 - 1, ExpectedOutput: 1024, Prefix: Prefix{OSL: LevelHigh}}},
		{nvext: `{"agent_hints":{"priority":-5}}`},
		{nvext: `{"agent_hints":{"priority":995,"latency_sensitivity":2.5}}`, want: Hints{PriorityJump: 2.5}},

		{nvext: `[]`, bad: "nvext"},
		{nvext: `{"annotations":"query_instance_id"}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":[1,2]}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":["query_instance_id",null]}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":["prefix_id:a",["b"]]}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":[{"prefix_id":"a"}]}`, bad: "nvext.annotations"},
		{nvext: `{"annotations":["worker_instance_id:three"]}`, bad: "nvext.annotations"},
		{nvext: `{"backend_instance_id":-1}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":1.5}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":"1"}`, bad: "nvext.backend_instance_id"},
		{nvext: `{"backend_instance_id":1,"dp_rank":4294967296}`, bad: "nvext.dp_rank"},
		{nvext: `{"dp_rank":1}`, bad: "nvext.dp_rank"},
		{headerRank: "0", bad: HeaderPinnedRank},
		{headerWorker: "one", bad: HeaderPinnedWorker},
		{headerPrefillRank: "0", headerWorker: "1", bad: headerPrefillRank},
		{headerPrefill: "-1", bad: HeaderPinnedPrefill},
		{nvext: `{"prefill_worker_id":"1"}`, bad: "nvext.prefill_worker_id"},
		{nvext: `{"prefill_dp_rank":1,"decode_worker_id":1}`, bad: "nvext.prefill_dp_rank"},
		{nvext: `{"agent_hints":1}`, bad: "nvext.agent_hints"},
		{nvext: `{"agent_hints":{"priority":"high"}}`, bad: "nvext.agent_hints.priority"},
		{nvext: `{"agent_hints":{"priority":1e999}}`, bad: "nvext.agent_hints.priority"},
		{nvext: `{"agent_hints":{"strict_priority":-1}}`, bad: "nvext.agent_hints.strict_priority"},
		{nvext: `{"agent_hints":{"osl":0.5}}`, bad: "nvext.agent_hints.osl"},
	} {
		header := http.Header{}
		for name, value := range map[string]string{
			HeaderPinnedWorker: c.headerWorker, HeaderPinnedRank: c.headerRank, HeaderPinnedPrefill: c.headerPrefill, headerPrefillRank: c.headerPrefillRank,
		} {
			if value != "" {
				header.Set(name, value)
			}
		}
		got, bad := Read(header, gjson.Parse(c.nvext), nil, true)
		switch {
		case c.bad != "" && (bad == nil || bad.Param != c.bad || !strings.Contains(bad.Error(), c.bad)):
			t.Errorf("%s %v: error %v, want one about %s", c.nvext, header, bad, c.bad)
		case c.bad == "" && (bad != nil || !reflect.DeepEqual(got, c.want)):
			t.Errorf("%s %v: %+v, %v, want %+v", c.nvext, header, got, bad, c.want)
		}
	}
}

func TestSessionIsReadFromTheHeaderThenTheCookie(t *testing.T) {
	header := func(values ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(values); i += 2 {
			h.Add(values[i], values[i+1])
		}
		return h
	}
	for _, test := range []struct {
		header             http.Header
		name, cookie, want string
	}{
		{header("X-Session-Id", "a"), "x-session-id", "", "a"},
		{header("X-Session-Id", "a"), "", "", ""},
		{header("X-Session-Id", "a", "X-Session-Id", "b"), "x-session-id", "", "a"},
		{header("Cookie", "x=1; sid=c", "X-Session-Id", "a"), "x-session-id", "sid", "a"},
		{header("Cookie", "x=1; sid=c"), "x-session-id", "sid", "c"},
		{header("Cookie", "x=1", "Cookie", "sid=\"d\""), "", "sid", "d"},
		{header("Cookie", "SID=c"), "", "sid", ""},
		{header("Cookie", "sid="), "", "sid", ""},
		{header(), "x-session-id", "sid", ""},
	} {
		if got := Session(test.header, test.name, test.cookie); got != test.want {
			t.Errorf("%v by %q and %q: %q, want %q", test.header, test.name, test.cookie, got, test.want)
		}
	}
}

func TestWorkersAreNamedByWhatTheyAreCalled(t *testing.T) {
	names := new(kv.Names)
	names.Set([]kv.Worker{{ID: 1 << 52, Name: "pod-a"}, {ID: 1<<52 + 1, Name: "10.0.0.1:8000"}})
	a, b := kv.WorkerKey{Worker: 1 << 52}, kv.WorkerKey{Worker: 1<<52 + 1}
	for _, c := range []struct {
		nvext, worker, prefill string
		want, wantPrefill      *kv.WorkerKey
		bad                    string
	}{
		{worker: "pod-a", want: &a},
		{worker: "4503599627370496", want: &a},
		{worker: "10.0.0.1:8000", want: &b},
		{worker: "3", want: &kv.WorkerKey{Worker: 3}},
		{prefill: "pod-a", wantPrefill: &a},
		{nvext: `{"backend_instance_id":"pod-a"}`, want: &a},
		{nvext: `{"annotations":["worker_instance_id:10.0.0.1:8000"]}`, want: &b},
		{nvext: `{"prefill_worker_id":"pod-a","decode_worker_id":"10.0.0.1:8000"}`, want: &b, wantPrefill: &a},
		{worker: "pod-b", bad: "X-Worker-Instance-Id is pod-b: it must be the name of a known worker, or an id"},
		{nvext: `{"backend_instance_id":"pod"}`, bad: `nvext.backend_instance_id is "pod": it must be the name of a known worker, or an id`},
		{nvext: `{"backend_instance_id":["pod-a"]}`, bad: "nvext.backend_instance_id"},
		{worker: "none", bad: HeaderPinnedWorker},
	} {
		header := http.Header{}
		for name, value := range map[string]string{HeaderPinnedWorker: c.worker, HeaderPinnedPrefill: c.prefill} {
			if value != "" {
				header.Set(name, value)
			}
		}
		got, bad := Read(header, gjson.Parse(c.nvext), names, true)
		switch {
		case c.bad != "" && (bad == nil || !strings.HasPrefix(bad.Error(), c.bad)):
			t.Errorf("%+v: error %v", c, bad)
		case c.bad == "" && (bad != nil || !reflect.DeepEqual(got.Pinned, c.want) || !reflect.DeepEqual(got.PinnedPrefill, c.wantPrefill)):
			t.Errorf("%+v: %+v, %v", c, got, bad)
		}
		if got, bad := Read(header, gjson.Parse(c.nvext), names, false); bad != nil || !reflect.DeepEqual(got, Hints{}) {
			t.Errorf("%+v, of a client that is not trusted: %+v, %v", c, got, bad)
		}
	}
	err := &PinnedError{Worker: &a, Prefill: &kv.WorkerKey{Worker: 3, Rank: 1}, Names: names, Err: errors.New("gone")}
	if want := "prefill worker 3 rank 1 with worker pod-a rank 0, which"; !strings.HasPrefix(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}

// TestAnUntrustedClientClaimsNoCost: in a fair queue the length of its answer is what the others
// wait for.
func TestAnUntrustedClientClaimsNoCost(t *testing.T) {
	nvext := gjson.Parse(`{"agent_hints":{"osl":2147483647,"priority":9,"latency_sensitivity":9,"strict_priority":4294967295}}`)
	for trusted, want := range map[bool]int{true: math.MaxInt32, false: 0} {
		got, bad := Read(http.Header{headerOutput: {"2147483647"}}, nvext, nil, trusted)
		if bad != nil || got.ExpectedOutput != want || (got.PriorityJump > 0 || got.StrictPriority > 0) != trusted {
			t.Errorf("trusted %v: %+v, %v", trusted, got, bad)
		}
	}
}
