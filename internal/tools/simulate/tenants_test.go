package simulate

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"kvrouter/internal/base/fair"
)

func TestTenantsAreParsed(t *testing.T) {
	groups, err := parseTenants(strings.Split("flood:0.84, light*8:0.16:weight=2:class=batch,heavy:3:absent", ","))
	if err != nil || len(groups) != 3 {
		t.Fatal(groups, err)
	}
	flood, light, heavy := groups[0], groups[1], groups[2]
	if flood.share != 0.84 || len(flood.all) != 1 || flood.all[0].Tenant != (fair.Tenant{Name: "flood", Weight: 1}) || flood.class != fair.Standard || flood.absent {
		t.Errorf("%+v", flood)
	}
	if light.share != 0.16 || len(light.all) != 8 || light.all[7].Tenant != (fair.Tenant{Name: "light-7", Weight: 2}) || light.class != fair.Batch || !heavy.absent {
		t.Errorf("%+v, %+v", light, heavy)
	}
	for text, want := range map[string]string{
		"flood":              "give NAME[*COUNT]:SHARE",
		":1":                 "the name is missing",
		"a*0:1":              "*0: give a number of tenants",
		"a*x:1":              "*x: give a number of tenants",
		"a*1001:1":           "*1001: give a number of tenants",
		"a:0":                "0: give a share",
		"a:NaN":              "NaN: give a share",
		"a:1:weight=0":       "weight=0: give weight=",
		"a:1:weight=NaN":     "weight=NaN: give weight=",
		"a:1:class=urgent":   "class=urgent: give weight=",
		"a:1:absent=no":      "absent=no: give weight=",
		"a:1:loud":           "loud: give weight=",
		"a:1:ttft=0s":        "ttft=0s: give weight=",
		"a:1:ttft=2h":        "ttft=2h: give weight=",
		"a:1:ttft=soon":      "ttft=soon: give weight=",
		"a:1:ttft":           "ttft: give weight=",
		"a:1:limit=0":        "limit=0: give weight=",
		"a:1:limit=x":        "limit=x: give weight=",
		"a:1:sheddable=no":   "sheddable=no: give weight=",
		"a:1:sheddable":      "sheddable needs an objective",
		"a:1,a:2":            "a stands there twice",
		"a:1:absent":         "all are absent",
		"a*600:1,b*600:1":    "more than 1000 tenants",
		"a:1,b:2:class=soon": "class=soon: give weight=",
	} {
		if _, err := parseTenants(strings.Split(text, ",")); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", text, err, want)
		}
	}
}

func TestTermsOfTenantsAreParsed(t *testing.T) {
	for text, want := range map[string]tenantGroup{
		"a:1":                           {},
		"a:1:ttft=2s":                   {objective: 2 * time.Second},
		"a:1:ttft=1h:sheddable":         {objective: time.Hour, sheddable: true},
		"a:1:sheddable:ttft=5ms":        {objective: 5 * time.Millisecond, sheddable: true},
		"a:1:limit=4":                   {limit: 4},
		"a:1:ttft=2s:sheddable:limit=1": {objective: 2 * time.Second, sheddable: true, limit: 1},
	} {
		groups, err := parseTenants([]string{text})
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if g := groups[0]; g.objective != want.objective || g.sheddable != want.sheddable || g.limit != want.limit {
			t.Errorf("%s: %+v", text, g)
		}
	}
}

// TestFiguresOfAnObjective: of all requests the lost ones keep none, and of the shed ones as many
// would have kept it as of the spared ones, but none of those that were late already.
func TestFiguresOfAnObjective(t *testing.T) {
	for name, test := range map[string]struct {
		o              ObjectiveReport
		lost           int
		goodput, wrong float64
	}{
		"nothing":                  {ObjectiveReport{}, 0, 0, 0},
		"all kept":                 {ObjectiveReport{Kept: 8}, 0, 1, 0},
		"some late":                {ObjectiveReport{Kept: 6, Missed: 2}, 0, 0.75, 0},
		"some lost":                {ObjectiveReport{Kept: 6, Missed: 2}, 4, 0.5, 0},
		"shed, none spared":        {ObjectiveReport{Kept: 2, Shed: 6}, 6, 0.25, 0},
		"half of the spared kept":  {ObjectiveReport{Kept: 2, Shed: 6, Spared: 4, SparedKept: 2}, 6, 0.25, 0.5},
		"half of them shed late":   {ObjectiveReport{Kept: 2, Shed: 3, ShedLate: 3, Spared: 4, SparedKept: 2}, 6, 0.25, 0.25},
		"all of them were late":    {ObjectiveReport{Kept: 2, ShedLate: 6}, 6, 0.25, 0},
		"spared, and nothing shed": {ObjectiveReport{Kept: 2, Missed: 2, Spared: 2, SparedKept: 1}, 0, 0.5, 0},
	} {
		if goodput, wrong := test.o.Goodput(test.lost), test.o.Wrong(); goodput != test.goodput || wrong != test.wrong {
			t.Errorf("%s: goodput %v, wrong %v, want %v and %v", name, goodput, wrong, test.goodput, test.wrong)
		}
	}
}

// TestReportsOfTenants: a table of all, one of those with objectives, and the same as JSON.
func TestReportsOfTenants(t *testing.T) {
	reports := []*Report{
		{Policy: "none"},
		{Policy: "work", Tenants: []TenantReport{
			{Tenant: "flood", Tenants: 1, Class: "batch", Weight: 1, Requests: 90, Lost: 10},
			{Tenant: "light", Tenants: 8, Class: "standard", Weight: 2, Requests: 14, Lost: 6, Objective: &ObjectiveReport{Kept: 10, Missed: 4, Shed: 5, ShedLate: 1, Spared: 4, SparedKept: 1}},
		}},
	}
	lines := func(reports []*Report) []string {
		var out bytes.Buffer
		table := tabwriter.NewWriter(&out, 0, 0, 2, ' ', tabwriter.AlignRight)
		writeTenants(table, reports)
		if err := table.Flush(); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for line := range strings.Lines(out.String()) {
			if fields := strings.Fields(line); len(fields) > 0 {
				lines = append(lines, strings.Join(fields, " "))
			}
		}
		return lines
	}
	want := []string{
		"policy tenants class weight requests lost computed tok out tok TTFT ms mean p50 p99 e2e ms mean p50 p99",
		"work flood*1 batch 1 90 10 0 0 0.0 0.0 0.0 0.0 0.0 0.0",
		"work light*8 standard 2 14 6 0 0 0.0 0.0 0.0 0.0 0.0 0.0",
		"policy tenants in time late of all % shed shed late spared in time shed in vain %",
		"work light*8 10 4 50.0 5 1 4 1 20.8",
	}
	if got := lines(reports); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
	reports[1].Tenants = reports[1].Tenants[:1]
	if got := lines(reports); !slices.Equal(got, want[:2]) {
		t.Errorf("without objectives: %q", got)
	}
	if got := lines(reports[:1]); len(got) != 0 {
		t.Errorf("without tenants: %q", got)
	}
	text, err := json.Marshal(TenantReport{Objective: &ObjectiveReport{Kept: 1, Missed: 2, Shed: 3, ShedLate: 4, Spared: 5, SparedKept: 6}})
	if err != nil || !strings.Contains(string(text), `"objective":{"kept":1,"missed":2,"shed":3,"shed_late":4,"spared":5,"spared_kept":6}`) {
		t.Errorf("%s, %v", text, err)
	}
}

// tenanted is a run of chats of those tenants over workers that a flood fills.
func tenanted(t *testing.T, tenants, order string) Simulation {
	t.Helper()
	settings := syntheticSettings()
	settings.Conversations, settings.Rate, settings.Groups = 600, 30, 50
	groups, err := parseTenants(strings.Split(tenants, ","))
	if err != nil {
		t.Fatal(err)
	}
	s := simulation(assignTenants(mustChat(t, settings, 1), groups, 1), "work", 1)
	s.Workers, s.Engine.MaxSeqs, s.Tenants, s.Routing.RouterQueuePolicy = 2, 16, groups, order
	return s
}

// TestAFloodOfTheSimulator: light tenants wait less in a fair queue, those of class batch longest,
// and every request is of one tenant.
func TestAFloodOfTheSimulator(t *testing.T) {
	const tenants = "flood:0.7,light*4:0.15,night:0.15:class=batch"
	reports := map[string][]TenantReport{}
	for _, order := range []string{"fcfs", "fair"} {
		r := mustRun(t, tenanted(t, tenants, order))
		sum := 0
		for _, group := range r.Tenants {
			sum += group.Requests
			t.Logf("%s: %+v", order, group)
		}
		if sum != r.Requests {
			t.Errorf("%s: %d requests of tenants, %d in all", order, sum, r.Requests)
		}
		if again := mustRun(t, tenanted(t, tenants, order)); !reflect.DeepEqual(r.Tenants, again.Tenants) {
			t.Errorf("%s: two runs differ", order)
		}
		if text, err := json.Marshal(r); err != nil || !strings.Contains(string(text), `"tenants":[{"tenant":"flood","tenants":1,"class":"standard"`) {
			t.Errorf("%s: %s, %v", order, text, err)
		}
		reports[order] = r.Tenants
	}
	if fair, before := reports["fair"][1], reports["fcfs"][1]; fair.TTFT.Mean > before.TTFT.Mean/2 {
		t.Errorf("a light tenant's first token after %+v, without a fair queue %+v", fair.TTFT, before.TTFT)
	}
	if night, flood := reports["fair"][2], reports["fair"][0]; night.TTFT.Mean < flood.TTFT.Mean {
		t.Errorf("class batch goes before the flood: %+v, %+v", night.TTFT, flood.TTFT)
	}
}

// TestOneTenantLosesLittleInAFairQueue holds what docs/fairness.md says: where few long prefixes
// are shared by most requests, waiting in the router keeps them where they are.
func TestOneTenantLosesLittleInAFairQueue(t *testing.T) {
	if testing.Short() {
		t.Skip("two runs of a whole trace, too slow for the short tests")
	}
	run := func(order string) *Report {
		s := simulation(loadTraces(t)["synthetic"], "work", 256)
		s.Engine.MaxSeqs, s.Routing.RouterQueuePolicy = 16, order
		return mustRun(t, s)
	}
	none, fair := run("fcfs"), run("fair")
	if fair.OutputPerSec < 0.99*none.OutputPerSec || fair.Reuse < 0.97*none.Reuse {
		t.Errorf("%.0f tokens per second and a hit rate of %.3f, without a queue %.0f and %.3f", fair.OutputPerSec, fair.Reuse, none.OutputPerSec, none.Reuse)
	}
}

// TestAbsentTenantsChangeNobodysConversations: those of the others are the same without them.
func TestAbsentTenantsChangeNobodysConversations(t *testing.T) {
	all, alone := tenanted(t, "flood:0.84,light*8:0.16", "fair"), tenanted(t, "flood:0.84:absent,light*8:0.16", "fair")
	var lights []TraceRequest
	for _, r := range all.Requests {
		if r.tenant.group.name == "light" {
			lights = append(lights, r)
		}
	}
	if len(lights) == 0 || len(lights) != len(alone.Requests) {
		t.Fatalf("%d conversations of light tenants, %d alone", len(lights), len(alone.Requests))
	}
	for i := range lights {
		if lights[i].Arrival != alone.Requests[i].Arrival || lights[i].Prompt != alone.Requests[i].Prompt || lights[i].tenant.Name != alone.Requests[i].tenant.Name {
			t.Errorf("conversation %d differs", i)
		}
	}
	if r := mustRun(t, alone); len(r.Tenants) != 1 || r.Tenants[0].Requests != r.Requests {
		t.Errorf("%+v", r.Tenants)
	}
}

// TestTurnsOfATraceAreOfOneTenant: requests with the same turns before them are of one
// conversation, those that share a system prompt only are not.
func TestTurnsOfATraceAreOfOneTenant(t *testing.T) {
	const system, conversations = 7, 16
	var requests []TraceRequest
	for turn := range 3 {
		for c := range uint64(conversations) {
			hashes := []uint64{system}
			for part := range uint64(turn + 1) {
				hashes = append(hashes, 1000*(c+1)+part)
			}
			requests = append(requests, TraceRequest{Hashes: hashes})
		}
	}
	for i, begun := range conversationsOf(requests) {
		if begun != i%conversations {
			t.Errorf("request %d continues %d, want %d", i, begun, i%conversations)
		}
	}
	groups, err := parseTenants([]string{"a*40:1"})
	if err != nil {
		t.Fatal(err)
	}
	tenants := map[*tenant]bool{}
	all := assignTenants(requests, groups, 1)
	for i, r := range all {
		if tenants[r.tenant] = true; r.tenant != all[i%conversations].tenant {
			t.Errorf("request %d is of %s, the first of its conversation of %s", i, r.tenant.Name, all[i%conversations].tenant.Name)
		}
	}
	if len(tenants) < 8 {
		t.Errorf("%d conversations are of %d tenants", conversations, len(tenants))
	}
}

// TestObjectivesOfTheSimulator: each request keeps or misses its objective, or is refused. Shedding
// keeps more of them, and hardly any request is shed that would have kept its own.
func TestObjectivesOfTheSimulator(t *testing.T) {
	goodput := map[string]float64{}
	for _, tenants := range []string{"a:1:ttft=2s", "a:1:ttft=2s:sheddable"} {
		r := mustRun(t, tenanted(t, tenants, "fair"))
		a := r.Tenants[0]
		o := a.Objective
		t.Logf("%s: %+v, %+v", tenants, a, o)
		if o.Kept+o.Missed != a.Requests || o.Shed+o.ShedLate > a.Lost {
			t.Errorf("%s: %+v of %+v", tenants, o, a)
		}
		if shed := o.Shed+o.ShedLate+o.Spared > 0; shed != strings.Contains(tenants, "sheddable") {
			t.Errorf("%s: %+v", tenants, o)
		}
		goodput[tenants] = o.Goodput(a.Lost)
	}
	if goodput["a:1:ttft=2s:sheddable"] <= goodput["a:1:ttft=2s"] {
		t.Errorf("the objective is kept for %v", goodput)
	}
}

// TestLimitsOfTheSimulator: a tenant has no more requests in flight than it may.
func TestLimitsOfTheSimulator(t *testing.T) {
	r := mustRun(t, tenanted(t, "a:0.9:limit=2,b:0.1", "fcfs"))
	if r.Lost[lostLimit] == 0 || r.Tenants[0].Lost != r.Lost[lostLimit] || r.Tenants[1].Lost != 0 {
		t.Errorf("%v, %+v", r.Lost, r.Tenants)
	}
}
