package hints

import (
	"net/http"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/fair"
)

// TestARouterBelowHonorsWhatTheRouterAboveSays: not what its client says in the body.
func TestARouterBelowHonorsWhatTheRouterAboveSays(t *testing.T) {
	body := gjson.Parse(`{"backend_instance_id": 3, "agent_hints": {"strict_priority": 9, "osl": 77}, "annotations": ["worker_instance_id:4"]}`)
	header := http.Header{}
	header.Set(HeaderPinnedWorker, "5")
	header.Set(HeaderFairness, "forged")
	now := time.Now()
	Routed{Tenant: "team", Class: fair.Batch, Deadline: now.Add(1500 * time.Millisecond), TPOT: 20 * time.Millisecond, Output: 55, SessionHeader: "X-Session", Session: "s"}.Sign(header, now)
	if header.Get("X-Session") != "s" {
		t.Error("the session is not told")
	}
	h, bad := Read(header, body, nil, true)
	if bad != nil {
		t.Fatal(bad)
	}
	if h.Pinned != nil || h.StrictPriority != 0 {
		t.Errorf("the client's body counts: %+v", h)
	}
	if h.Tenant != "team" || h.TTFT != 1500*time.Millisecond || h.TPOT != 20*time.Millisecond || h.Class == nil || *h.Class != fair.Batch || h.ExpectedOutput != 55 {
		t.Errorf("the router's headers do not count: %+v", h)
	}
	if !h.FromAbove {
		t.Error("it does not come from a router above")
	}
	if h, _ = Read(header, body, nil, false); h.Tenant != "" || h.TTFT != 0 || h.ExpectedOutput != 0 {
		t.Errorf("a router that is not trusted speaks for tenants: %+v", h)
	}
	keyed := http.Header{"X-Session": {"s"}}
	if (Routed{SessionHeader: "X-Session", Session: "team\x00s"}).Sign(keyed, now); keyed.Get("X-Session") != "team%00s" {
		t.Errorf("the session of a key is told as %q", keyed.Get("X-Session"))
	}
	if (Routed{SessionHeader: "X-Session"}).Sign(keyed, now); keyed.Get("X-Session") != "" {
		t.Error("the client's own name of a session is told")
	}
	late := http.Header{}
	Routed{Deadline: now.Add(-time.Second)}.Sign(late, now)
	if h, bad = Read(late, gjson.Result{}, nil, true); bad != nil || h.TTFT != time.Millisecond {
		t.Errorf("an objective that has passed is %v (%v)", h.TTFT, bad)
	}
}
