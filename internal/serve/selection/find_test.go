package selection

import (
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/policytest"
	"kvrouter/internal/testkit/routertest"
)

// testDeps returns what the router port needs, of one model; a fleet may be nil.
func testDeps(router *router.Router, fleet *workers.Fleet) Deps {
	set := routertest.Models(router)
	return Deps{Models: set, Fleet: fleet, Partitions: NewPartitions("", set), Log: slog.New(slog.DiscardHandler)}
}

// newFinder returns the router port over a router with a policy, without a
// server: what it answers to a POST.
func newFinder(t *testing.T, router *router.Router) (s *Service, ask func(path, body string) (int, gjson.Result)) {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	fleet := workers.New(workers.Settings{}, workers.Deps{Index: routertest.Index(router), Log: log})
	s = New(Settings{KVEvents: true}, testDeps(router, fleet))
	handler := s.Handler()
	return s, func(path, body string) (int, gjson.Result) {
		w := httptest.NewRecorder()
		request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader(body))
		request.Header.Set("Content-Type", "application/json")
		handler.ServeHTTP(w, request)
		return w.Code, gjson.Parse(w.Body.String())
	}
}

// find asks for a worker and returns the decision's id.
func find(t *testing.T, ask func(path, body string) (int, gjson.Result), body string) (id string) {
	t.Helper()
	status, answer := ask("/find_worker", body)
	if status != 200 || answer.Get("decision_id").Str == "" {
		t.Fatalf("%s: %d %s", body, status, answer)
	}
	return answer.Get("decision_id").Str
}

func TestFindWorkerBooksUntilFeedback(t *testing.T) {
	router := routertest.New(t, "thompson", 2)
	routertest.Hold(router, 0, testkit.Tokens(1, 8))
	routertest.Hold(router, 1, testkit.Tokens(1, 8))
	_, ask := newFinder(t, router)
	status, answer := ask("/find_worker", `{"tokens":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17],"prefix_id":"p","reuse_budget":3,"expected_osl":"LOW","interarrival":"HIGH"}`)
	id := answer.Get("decision_id").Str
	if status != 200 || !regexp.MustCompile(`^[0-9a-f]{12}4[0-9a-f]{3}[89ab][0-9a-f]{15}$`).MatchString(id) || answer.Get("prefix_hit_rate").Raw != "0.5" || !answer.Get("worker_id").Exists() {
		t.Fatalf("%d %s", status, answer)
	}
	worker := kv.WorkerKey{Worker: answer.Get("worker_id").Uint()}
	if load := router.Load(worker); load.InFlight != 1 || load.PrefillTokens != 9 {
		t.Errorf("booked %+v", load)
	}
	feedback := fmt.Sprintf(`{"decision_id":%q,"latency_ms":250,"tokens_out":10}`, id)
	status, ack := ask("/feedback", feedback)
	if status != 200 || !ack.Get("ok").Bool() || ack.Get("reward").Num != 0.5 || ack.Get("used_baseline").Num == 0 || ack.Get("worker_id").Uint() != worker.Worker || ack.Get("error").Exists() {
		t.Errorf("%d %s", status, ack)
	}
	if n := routertest.InFlight(router); n != 0 {
		t.Errorf("%d in flight after the feedback", n)
	}
	for _, unknown := range []string{feedback, `{"decision_id":"00000000000040008000000000000000","latency_ms":1}`} {
		status, ack := ask("/feedback", unknown)
		if status != 200 || ack.Get("ok").Bool() || ack.Get("error").Str != "unknown_decision" || ack.Get("reward").Raw != "0" || ack.Get("used_baseline").Raw != "0" || ack.Get("worker_id").Exists() {
			t.Errorf("%s: %d %s", unknown, status, ack)
		}
	}
}

func TestFeedbackTeachesByItsOwnLatency(t *testing.T) {
	router := routertest.New(t, "thompson", 1)
	_, ask := newFinder(t, router)
	for _, c := range []struct {
		name, feedback   string // without its id
		reward, baseline float64
		learned          bool
	}{
		{"the first is as fast as usual", `"latency_ms":100,"tokens_out":10`, 0.5, 100, true},
		{"three times as long", `"latency_ms":300,"tokens_out":10`, 0.25, 100, true},
		{"with all fields", `"latency_ms":140,"success":true,"tokens_in":4,"tokens_out":10,"finish_reason":"stop"`, 0.5, 140, true},
		{"null is unknown", `"latency_ms":50,"success":null,"tokens_in":null,"tokens_out":null,"finish_reason":null`, 0.5, 50, true},
		{"failed", `"latency_ms":1,"tokens_out":10,"success":false,"finish_reason":"error"`, 0, 140, true},
		{"cancelled", `"latency_ms":5000,"tokens_out":10,"success":false,"finish_reason":"cancelled"`, 0, 0, false},
		{"aborted", `"latency_ms":5000,"tokens_out":10,"finish_reason":"abort"`, 0, 0, false},
	} {
		id := find(t, ask, `{"tokens":[1,2,3,4]}`)
		before := routertest.ThompsonStats(t, router).Workers[0]
		status, ack := ask("/feedback", fmt.Sprintf(`{"decision_id":%q,%s}`, id, c.feedback))
		if status != 200 || !ack.Get("ok").Bool() || math.Abs(ack.Get("reward").Num-c.reward) > 1e-9 || math.Abs(ack.Get("used_baseline").Num-c.baseline) > 1e-9 {
			t.Errorf("%s: %d %s, want reward %v of baseline %v", c.name, status, ack, c.reward, c.baseline)
		}
		after := routertest.ThompsonStats(t, router).Workers[0]
		if learned := after.Alpha != before.Alpha || after.Beta != before.Beta; learned != c.learned {
			t.Errorf("%s: from %+v to %+v", c.name, before, after)
		}
		if c.learned && after.Reward != ack.Get("reward").Num {
			t.Errorf("%s: reward %v is told, %v kept", c.name, ack.Get("reward").Num, after.Reward)
		}
	}
	if pending := routertest.ThompsonStats(t, router).Pending; pending != 0 || routertest.InFlight(router) != 0 {
		t.Errorf("%d decisions pending, %d in flight", pending, routertest.InFlight(router))
	}
}

func TestDecisionsWithoutFeedbackAreForgotten(t *testing.T) {
	for _, fixes := range []string{"all", "none"} {
		synctest.Test(t, func(t *testing.T) {
			settings := testkit.Defaults[thompson.Settings]()
			settings.ThompsonOverride = []string{"fixes=" + fixes}
			policy, err := thompson.New(settings)
			if err != nil {
				t.Fatal(err)
			}
			router := routertest.New(t, "", 1, routertest.WithPolicy(policy))
			s, ask := newFinder(t, router)
			id := find(t, ask, `{"tokens":[1,2,3,4]}`)
			told := find(t, ask, `{"tokens":[1,2,3,4]}`)
			ask("/feedback", fmt.Sprintf(`{"decision_id":%q,"latency_ms":1}`, told))
			time.Sleep(s.feedbackTime() - time.Second)
			synctest.Wait()
			if n := routertest.InFlight(router); n != 1 {
				t.Errorf("%d in flight before the time is over", n)
			}
			time.Sleep(time.Second)
			synctest.Wait()
			if n := routertest.InFlight(router); n != 0 || len(s.decisions.byID) != 0 {
				t.Errorf("%d in flight, %d decisions open after it", n, len(s.decisions.byID))
			}
			if _, ack := ask("/feedback", fmt.Sprintf(`{"decision_id":%q,"latency_ms":1}`, id)); ack.Get("error").Str != "unknown_decision" {
				t.Errorf("late feedback: %s", ack)
			}
			// The original takes silence for a failure, at the next decision.
			find(t, ask, `{"tokens":[1,2,3,4]}`)
			want := map[string]uint64{"all": 0, "none": 1}[fixes]
			if stats := routertest.ThompsonStats(t, router); stats.Timeouts != want {
				t.Errorf("fixes %s: %d timeouts, want %d", fixes, stats.Timeouts, want)
			}
		})
	}
}

func TestFindWorkerWithoutFeedback(t *testing.T) {
	for _, c := range []struct {
		name, policy string
		change       func(*Service)
	}{
		{"a policy that learns nothing", "kv", nil},
		{"the original's other rule", "kv_load", nil},
		{"too many are open", "thompson", func(s *Service) {
			for i := range maxOpenDecisions {
				s.decisions.byID[fmt.Sprint(i)] = nil
			}
		}},
	} {
		var options []routertest.Option
		if c.policy == "kv_load" {
			settings := testkit.Defaults[thompson.Settings]()
			settings.ThompsonOverride = []string{"infrastructure.router_type=kv_load"}
			policy, err := thompson.New(settings)
			if err != nil {
				t.Fatal(err)
			}
			options = append(options, routertest.WithPolicy(policy))
		}
		router := routertest.New(t, c.policy, 1, options...)
		s, ask := newFinder(t, router)
		if c.change != nil {
			c.change(s)
		}
		status, answer := ask("/find_worker", `{"tokens":[1,2,3,4]}`)
		if status != 200 || answer.Raw != `{"worker_id":0,"prefix_hit_rate":0,"decision_id":null}` {
			t.Errorf("%s: %d %s", c.name, status, answer)
		}
		if load := router.Load(kv.WorkerKey{}); load.InFlight != 0 || load.Bumped != 1 {
			t.Errorf("%s: %+v, want nothing booked and one more until the worker publishes", c.name, load)
		}
	}
}

func TestFindWorkerSaysThatThereIsNone(t *testing.T) {
	_, ask := newFinder(t, routertest.New(t, "thompson", 0))
	if status, answer := ask("/find_worker", `{"tokens":[1]}`); status != 200 || answer.Raw != `{"worker_id":-1,"prefix_hit_rate":0,"decision_id":null}` {
		t.Errorf("%d %s", status, answer)
	}
}

func TestFindWorkerPassesHintsOn(t *testing.T) {
	policy := new(policytest.Clerk)
	router := routertest.New(t, "", 1, routertest.WithPolicy(policy))
	_, ask := newFinder(t, router)
	for body, want := range map[string]hints.Prefix{
		`{"tokens":[]}`: {},
		`{"tokens":[1],"prefix_id":"<no_reuse>","reuse_budget":-2}`:                                    {},
		`{"tokens":[1],"prefix_id":"p","expected_osl":"low","interarrival":"LOW"}`:                     {ID: "p", OSL: hints.LevelLow, IAT: hints.LevelLow},
		`{"tokens":[1],"prefix_id":"p","reuse_budget":7,"expected_osl":"2000","interarrival":"never"}`: {ID: "p", OSL: hints.LevelHigh},
	} {
		ask("/find_worker", body)
		queries := policy.Queries()
		got := queries[len(queries)-1].Prefix
		wantBudget := int(max(0, gjson.Get(body, "reuse_budget").Int()))
		if got.Budget == nil || *got.Budget != wantBudget {
			t.Errorf("%s: budget %v, want %d", body, got.Budget, wantBudget)
		}
		if got.Budget = nil; got != want {
			t.Errorf("%s: %+v, want %+v", body, got, want)
		}
	}
}

func TestFindWorkerRefusesWhatMakesNoSense(t *testing.T) {
	_, ask := newFinder(t, routertest.New(t, "thompson", 1))
	for _, c := range []struct {
		path, body string
		status     int
		says       string
	}{
		{"/find_worker", `{}`, 422, "tokens"},
		{"/find_worker", `{"tokens":"1,2"}`, 422, "tokens"},
		{"/find_worker", `{"tokens":[-1]}`, 422, "tokens"},
		{"/find_worker", `{"tokens":[1],"expected_osl":1}`, 422, "expected_osl"},
		{"/find_worker", `{"tokens":[1],"prefix_id":"` + strings.Repeat("x", hints.MaxPrefixID+1) + `"}`, 400, "prefix_id"},
		{"/find_worker", `tokens`, 400, "bad body"},
		{"/find_worker", `[]`, 422, "it cannot be a JSON array"},
		{"/feedback", `feedback`, 400, "bad body"},
		{"/feedback", ``, 400, "bad body"},
	} {
		if status, answer := ask(c.path, c.body); status != c.status || !strings.Contains(answer.Get("error").Str, c.says) {
			t.Errorf("%s %.60s: %d %s, want %d about %s", c.path, c.body, status, answer, c.status, c.says)
		}
	}
}

// TestBadFeedbackIsAnsweredAsInTheOriginal: with ok false and the reason. The decision
// still waits for its feedback then.
func TestBadFeedbackIsAnsweredAsInTheOriginal(t *testing.T) {
	_, ask := newFinder(t, routertest.New(t, "thompson", 1))
	id := find(t, ask, `{"tokens":[1]}`)
	for _, c := range []struct{ rest, says string }{
		{`"latency_ms":null`, "latency_ms"},
		{`"tokens_in":1`, "latency_ms"},
		{`"latency_ms":-1`, "latency_ms"},
		{`"latency_ms":1e300`, "latency_ms"},
		{`"latency_ms":1e999`, "latency_ms"},
		{`"latency_ms":"1"`, "latency_ms"},
		{`"latency_ms":1,"tokens_out":-1`, "tokens_out"},
		{`"latency_ms":1,"tokens_in":1.5`, "tokens_in"},
		{`"latency_ms":1,"success":"yes"`, "success"},
	} {
		expectBadFeedback(t, ask, fmt.Sprintf(`{"decision_id":%q,%s}`, id, c.rest), c.says)
	}
	for text, says := range map[string]string{`{"latency_ms":1}`: "decision_id", `{"decision_id":7,"latency_ms":1}`: "decision_id", `{}`: "decision_id", `null`: "decision_id", `[]`: "it cannot be a JSON array"} {
		expectBadFeedback(t, ask, text, says)
	}
	if _, ack := ask("/feedback", fmt.Sprintf(`{"decision_id":%q,"latency_ms":1}`, id)); !ack.Get("ok").Bool() {
		t.Errorf("good feedback after bad: %s", ack)
	}
}

// expectBadFeedback expects an answer with all that the original's has, and what was
// wrong.
func expectBadFeedback(t *testing.T, ask func(path, body string) (int, gjson.Result), text, says string) {
	t.Helper()
	status, ack := ask("/feedback", text)
	if status != 200 || ack.Get("ok").Type != gjson.False || ack.Get("reward").Raw != "0" || ack.Get("used_baseline").Raw != "0" || !strings.HasPrefix(ack.Get("error").Str, "bad body: ") || !strings.Contains(ack.Get("error").Str, says) {
		t.Errorf("%s: %d %s, want ok false and an error about %s", text, status, ack, says)
	}
}

func TestBooksAreEvenAfterManyCallersOfFindWorker(t *testing.T) {
	router := routertest.New(t, "thompson", 3)
	s, ask := newFinder(t, router)
	var callers sync.WaitGroup
	for caller := range 4 {
		callers.Go(func() {
			random := rand.New(rand.NewPCG(1, uint64(caller)))
			for i := range 200 {
				id := find(t, ask, fmt.Sprintf(`{"tokens":[1,2,3,4,%d],"prefix_id":"p%d","reuse_budget":%d}`, i, random.IntN(20), random.IntN(4)))
				for range 1 + random.IntN(2) {
					ask("/feedback", fmt.Sprintf(`{"decision_id":%q,"latency_ms":%d,"success":%t}`, id, random.IntN(100), random.IntN(4) > 0))
				}
			}
		})
	}
	callers.Wait()
	if n := routertest.InFlight(router); n != 0 || len(s.decisions.byID) != 0 || routertest.ThompsonStats(t, router).Pending != 0 {
		t.Errorf("%d in flight, %d open, %d pending", n, len(s.decisions.byID), routertest.ThompsonStats(t, router).Pending)
	}
	if err := router.Check(); err != nil {
		t.Error(err)
	}
}
