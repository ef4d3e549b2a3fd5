package telemetry

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
)

// asked is an exchange of a tenant that was routed.
func asked(name string, deadline time.Time) *proxy.Exchange {
	return &proxy.Exchange{Status: 200, Request: &router.Request{Tenant: fair.Tenant{Name: name}, Deadline: deadline}}
}

func TestTenantsAreAccounted(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	states := []fair.State{
		{Tenant: "a", Class: fair.Batch, Weight: 2, Waiting: 3, Running: 1, Behind: 5, Oldest: now.Add(-4 * time.Second)},
		{Tenant: "a", Class: fair.Interactive, Weight: 2, Running: 2},
	}
	tenants := NewTenants(func() []fair.State { return states })
	tenants.now = func() time.Time { return now }

	served := asked("a", now)
	tenants.Began(nil, served)
	served.Request.TPOT, served.Ending = time.Second/6, policy.Finished
	tenants.Accepted(served, nil)
	tenants.Decided(served, &router.Pair{Decode: router.Decision{QueueTime: 3 * time.Second}, Whole: router.WholeNoPair})
	served.FirstChunk, served.Decision.OverlapTokens = now, 64
	served.Usage = proxy.Usage{Known: true, PromptTokens: 100, OutputTokens: 7, CachedKnown: true, CachedTokens: 80}
	tenants.Finished(served, now.Add(time.Second))

	late := asked("a", now)
	late.Request.TPOT, late.Ending = time.Second, policy.Finished // of one token
	tenants.Accepted(late, nil)
	late.FirstChunk, late.Decision.OverlapTokens = now.Add(1), 64
	late.Usage = proxy.Usage{Known: true, PromptTokens: 50, OutputTokens: 1} // cached tokens are as predicted, of at most the prompt
	tenants.Finished(late, now)

	slow := asked("a", time.Time{})
	slow.Request.TPOT, slow.Ending, slow.FirstChunk = time.Second/6-1, policy.Finished, now
	slow.Usage = proxy.Usage{Known: true, OutputTokens: 7}
	tenants.Accepted(slow, nil)
	tenants.Finished(slow, now.Add(time.Second))
	slow.Ending = policy.Abandoned // whether it would have been in time is not known
	slow.Usage.OutputTokens = 0
	tenants.Accepted(slow, nil)
	tenants.Finished(slow, now.Add(time.Hour))

	whole := asked("a", now) // whether it was in time is not known
	tenants.Accepted(whole, nil)
	tenants.Finished(whole, now.Add(1))
	whole = asked("a", now)
	tenants.Accepted(whole, nil)
	tenants.Finished(whole, now)

	shed := asked("", now)
	tenants.Accepted(shed, nil)
	shed.Status, shed.Refused = 429, fmt.Errorf("wrapped: %w", &router.ShedError{})
	tenants.Finished(shed, now)
	tenants.Finished(&proxy.Exchange{}, now) // not routed

	none := map[string]int{"interactive": 0, "standard": 0, "batch": 0}
	want := []TenantRecord{
		{Tenant: CommonTenant, Waiting: none, Account: Account{Requests: 1, Shed: 1}},
		{Tenant: "a", Weight: 2, Waiting: map[string]int{"interactive": 0, "standard": 0, "batch": 3}, Running: 3, OldestWaitSeconds: 4, BehindMS: 5,
			Account: Account{Requests: 6, PromptTokens: 150, CachedTokens: 130, ComputedTokens: 20, AnsweredTokens: 15, WaitSeconds: 3, ObjectivesKept: 2, ObjectivesMissed: 1, TokensKept: 1, TokensMissed: 1}},
	}
	if diff := cmp.Diff(want, tenants.List()); diff != "" {
		t.Error(diff)
	}
	recorder := httptest.NewRecorder()
	tenants.ServeHTTP(recorder, httptest.NewRequest(http.MethodGet, "/tenants", nil))
	var answer struct{ Tenants []TenantRecord }
	if err := json.Unmarshal(recorder.Body.Bytes(), &answer); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, answer.Tenants); diff != "" {
		t.Error(diff)
	}
}

func TestAccountsAreBounded(t *testing.T) {
	tenants := NewTenants(func() []fair.State { return []fair.State{{Tenant: "waits", Waiting: 1}} })
	for i := range 3 * maxTenants {
		tenants.Accepted(asked(fmt.Sprint(i), time.Time{}), nil)
	}
	list := tenants.List()
	sum := uint64(0)
	for _, r := range list {
		sum += r.Requests
	}
	if len(list) > maxTenants+2 || sum != 3*maxTenants || list[0].Tenant != OtherTenants || list[0].Requests != 2*maxTenants {
		t.Errorf("%d tenants with %d requests, the first %+v", len(list), sum, list[0])
	}
}
