package simulate

import (
	"bytes"
	"cmp"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
)

// queued is a run in which prompts have to wait: 40 conversations on two workers.
func queued(t *testing.T, threshold float64) Simulation {
	t.Helper()
	settings := syntheticSettings()
	settings.Groups, settings.ThinkTime, settings.UserTokens = 200, 100*time.Millisecond, 2000
	s := simulation(mustChat(t, settings, 1), "kv", 0)
	s.Workers, s.Concurrency = 2, 40
	s.Routing.RouterQueueThreshold = &threshold
	return s
}

// expectAllOver holds that every request of a run ended and nothing is left of it.
func expectAllOver(t *testing.T, run *simulator) {
	t.Helper()
	lost := 0
	for _, n := range run.lost {
		lost += n
	}
	if run.done != run.total || len(run.ledger)+lost != run.total || run.open != 0 {
		t.Errorf("%d of %d requests are over, %d were answered, %d lost, %d conversations are open", run.done, run.total, len(run.ledger), lost, run.open)
	}
	for _, r := range run.routers {
		for w := range run.workers {
			if l := r.Load(kv.WorkerKey{Worker: uint64(w)}); l.InFlight != 0 || l.PrefillTokens != 0 {
				t.Errorf("worker %d has %d in flight at the end", w, l.InFlight)
			}
			if err := run.workers[w].engine.Check(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestAQueueThatNobodyNeedsChangesNothing(t *testing.T) {
	s := queued(t, 1000)
	with := mustRun(t, s)
	s.Routing.RouterQueueThreshold = nil
	without := mustRun(t, s)
	if with.TTFT != without.TTFT || with.EndToEnd != without.EndToEnd || with.Queue != nil || with.Lost != nil {
		t.Errorf("TTFT %v, without a queue %v; %+v", with.TTFT, without.TTFT, with.Queue)
	}
}

func TestRequestsWaitWhileAllWorkersHaveEnoughToDo(t *testing.T) {
	s := queued(t, 0)
	run := finishedRun(t, s)
	expectAllOver(t, run)
	waited := 0
	for _, f := range run.ledger {
		if f.sent > f.simulated.asked {
			waited++
		}
	}
	report := run.report()
	if waited < 100 || report.Queue == nil || report.Queue.Waited != waited || report.Queue.WaitMS.Mean <= 0 {
		t.Errorf("%d waited, told of are %+v", waited, report.Queue)
	}
	if without := mustRun(t, func() Simulation { s.Routing.RouterQueueThreshold = nil; return s }()); report.Requests != without.Requests {
		t.Errorf("%d answers, without a queue %d", report.Requests, without.Requests)
	}
	var text bytes.Buffer
	report.writeTroubles(&text)
	if !strings.Contains(text.String(), "queued in the router") {
		t.Error(text.String())
	}
}

// overtakes counts the pairs of requests that waited of which the one asked first was
// sent last.
func overtakes(run *simulator) (n int) {
	waited := slices.DeleteFunc(slices.Clone(run.ledger), func(f *flight) bool { return f.sent == f.simulated.asked })
	slices.SortStableFunc(waited, func(a, b *flight) int {
		return cmp.Or(cmp.Compare(a.simulated.asked, b.simulated.asked), cmp.Compare(a.sent, b.sent))
	})
	for i := range waited[1:] {
		if waited[i+1].sent < waited[i].sent {
			n++
		}
	}
	return n
}

func TestTheQueuesPolicySaysWhoGoesFirst(t *testing.T) {
	waits := map[string]float64{}
	for _, name := range []string{"fcfs", "wspt", "lcfs"} {
		s := queued(t, 0)
		s.Routing.RouterQueuePolicy = name
		run := finishedRun(t, s)
		expectAllOver(t, run)
		waits[name] = run.report().Queue.WaitMS.Mean
		if n := overtakes(run); (n == 0) != (name == "fcfs") {
			t.Errorf("%s: %d overtook another", name, n)
		}
	}
	if waits["wspt"] >= waits["fcfs"] {
		t.Errorf("mean waits %v: the shortest first waits for longest", waits)
	}
}

func TestConversationsOfPriorityGoFirst(t *testing.T) {
	for jump, atMost := range map[float64]float64{0: 0.7, 0.2: 0.95} {
		s := queued(t, 0)
		s.Concurrency = 150
		s.Priority = PrioritySettings{PriorityShare: 0.2, PriorityJump: jump}
		run := finishedRun(t, s)
		expectAllOver(t, run)
		report := run.report()
		if report.Priority == nil || report.Priority.Mean > atMost*report.TTFT.Mean {
			t.Errorf("jump %v: TTFT %+v, of those of priority %+v", jump, report.TTFT, report.Priority)
		}
		prior := map[*TraceRequest]bool{}
		for _, f := range run.ledger {
			prior[f.simulated.request] = f.simulated.prior
		}
		first := 0
		for i := range s.Requests {
			is := prior[&s.Requests[i]]
			if is {
				first++
			}
			for r := &s.Requests[i]; r != nil; r = r.Next {
				if prior[r] != is {
					t.Fatal("the turns of one conversation differ")
				}
			}
		}
		if share := float64(first) / float64(len(s.Requests)); share < 0.1 || share > 0.3 {
			t.Errorf("%v of the conversations have priority", share)
		}
	}
}

func TestWhatTheRouterRefusesIsLostAndItsConversationGoesOn(t *testing.T) {
	for why, change := range map[string]func(*router.Settings){
		lostQueue:   func(k *router.Settings) { k.RouterQueueLimit = 1 },
		lostTimeout: func(k *router.Settings) { k.RouterQueueTimeout = 500 * time.Millisecond },
		lostBusy: func(k *router.Settings) {
			most := 1
			k.RouterQueueThreshold, k.ActivePrefillTokensThreshold = nil, &most
		},
	} {
		s := queued(t, 0)
		change(&s.Routing)
		run := finishedRun(t, s)
		expectAllOver(t, run)
		if len(run.lost) != 1 || run.lost[why] == 0 {
			t.Errorf("%s: lost %v", why, run.lost)
		}
		report := run.report()
		if share := report.LostShare(); share <= 0 || share != float64(run.lost[why])/float64(run.total) {
			t.Errorf("%s: %v are lost", why, share)
		}
		if why == lostTimeout && slices.Max(run.waits) > 500 {
			t.Errorf("one waited %v ms", slices.Max(run.waits))
		}
	}
}

func TestTwoRunsWithAQueueAreEqual(t *testing.T) {
	s := queued(t, 0)
	s.Routers, s.Priority.PriorityShare = 2, 0.3
	a, b := mustRun(t, s), mustRun(t, s)
	if a.TTFT != b.TTFT || a.EndToEnd != b.EndToEnd || a.Queue.WaitMS != b.Queue.WaitMS {
		t.Errorf("TTFT %v and %v", a.TTFT, b.TTFT)
	}
}

func TestWhatCannotBeSimulatedIsRefused(t *testing.T) {
	threshold := 1.0
	for says, change := range map[string]func(*Simulation){
		"are not simulated with disaggregation": func(s *Simulation) { s.Prefills, s.Routing.RouterQueueThreshold = 1, &threshold },
		"leave out --faults":                    func(s *Simulation) { s.Prefills, s.Faults = 1, []string{"worker=1 at=1s for=1s kind=hang"} },
		"--record-decisions":                    func(s *Simulation) { s.Routing.RecordDecisions = true },
		"--priority-share":                      func(s *Simulation) { s.Priority.PriorityShare = 2 },
		"--faults":                              func(s *Simulation) { s.Faults = []string{"worker=9 at=1s for=1s kind=hang"} },
		"65 routers":                            func(s *Simulation) { s.Routers = 65 },
	} {
		s := simulation(mustChat(t, syntheticSettings(), 1), "kv", 64)
		s.Scoring = testkit.Defaults[policies.Settings]()
		change(&s)
		if _, err := s.Run(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %q", err, says)
		}
	}
}
