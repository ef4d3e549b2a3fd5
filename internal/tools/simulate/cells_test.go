package simulate

import (
	"math"
	"os"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/engine"
)

// cellSettings are the defaults of what a day of cells reads.
func cellSettings() Settings {
	return Settings{CellSettings: testkit.Defaults[CellSettings](), Shape: testkit.Defaults[SyntheticSettings](), Routers: 1}
}

// smallDay is a day of four cells with three workers in three regions, with caches so small that
// blocks are evicted.
func smallDay(t testing.TB) *cellDay {
	t.Helper()
	regions, err := parseRegions(strings.NewReader("west -8 1 80 160\nmiddle 0, 80 1 90 # of the world\n\neast 9 160 90 1\n"))
	if err != nil {
		t.Fatal(err)
	}
	s := cellSettings()
	s.Cells, s.RTTMatrix, s.Day, s.DayLoad, s.Travel = 4, "-", 20*time.Second, 2, 0.3
	s.Shape.Groups, s.Shape.OutputTokens, s.Shape.ThinkTime = 10, 50, time.Second
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	sized := testkit.Engine()
	sized.Blocks = 400
	base := Simulation{Workers: 3, Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings](), Routing: testkit.Defaults[router.Settings](), Engine: sized, Seed: 1}
	day, err := s.day(base, regions, []string{cellPolicy})
	if err != nil {
		t.Fatal(err)
	}
	return day
}

func mustPlace(t testing.TB, day *cellDay, placement string) *CellReport {
	t.Helper()
	r, err := day.run(placement)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestEachPlacementAnswersAllRequestsOfADay(t *testing.T) {
	day := smallDay(t)
	reports := map[string]*CellReport{}
	for _, placement := range placements {
		r := mustPlace(t, day, placement)
		if reports[placement] = r; r.Requests != day.total || r.HitRate <= 0 || r.HitRate >= 1 || r.TTFT.Mean < 1 {
			t.Errorf("%s: %+v of %d requests", placement, *r, day.total)
		}
		t.Logf("%s: hit rate %.3f, first token %.1f ms, network %.1f ms, nearest %.2f", placement, r.HitRate, r.TTFT.Mean, r.NetworkMS, r.Nearest)
	}
	exact, summaries := reports[placeExact], reports[placeSummary]
	if summaries.HitRate < 0.9*exact.HitRate {
		t.Errorf("the summaries' hit rate is %.3f, that of one index %.3f", summaries.HitRate, exact.HitRate)
	}
	if turns := reports[placeTurns]; turns.TTFT.Mean < summaries.TTFT.Mean || turns.HitRate > summaries.HitRate {
		t.Errorf("the first token of summaries comes after %.1f ms, of turns after %.1f", summaries.TTFT.Mean, turns.TTFT.Mean)
	}
	if near := reports[placeNearest]; near.Nearest != 1 || near.NetworkMS != 1 {
		t.Errorf("nearest sent %v of the requests to the nearest cell, over %v ms", near.Nearest, near.NetworkMS)
	}
	s := summaries.Summary
	if s == nil || s.Operations == 0 || s.PerOperation <= 0 || s.PerOperation > 20 || s.FalsePositives > 4*s.Stated || s.Probes == 0 || s.Stale > 0.2 || s.Untold > 0.2 {
		t.Errorf("summaries: %+v", s)
	}
	var out strings.Builder
	if err := day.write(&out, []*CellReport{exact, summaries}); err != nil || !strings.Contains(out.String(), "bytes an operation") {
		t.Errorf("error %v, report %s", err, &out)
	}
}

func TestTwoDaysWithOneSeedAreEqual(t *testing.T) {
	for _, placement := range []string{placeExact, placeSummary, placeAggregates} {
		a, b := mustPlace(t, smallDay(t), placement), mustPlace(t, smallDay(t), placement)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %+v and %+v", placement, *a, *b)
		}
	}
}

func TestTrafficFollowsTheSunAndTravels(t *testing.T) {
	day := smallDay(t)
	byHalf := [3][2]int{}
	for i := range day.starts {
		r := &day.starts[i]
		if r.Arrival < 0 || r.Arrival >= day.Day || i > 0 && r.Arrival < day.starts[i-1].Arrival {
			t.Fatalf("conversation %d starts at %v", i, r.Arrival)
		}
		byHalf[r.origin][2*r.Arrival/day.Day]++
	}
	// At 0 to 12 h in UTC it is morning to night in the east, and night in the west.
	if west, east := byHalf[0], byHalf[2]; west[0] >= west[1] || east[0] <= east[1] {
		t.Errorf("conversations by half of the day: west %v, east %v", west, east)
	}
	if share := float64(day.travels) / float64(len(day.starts)); share < 0.1 || share > 0.3 {
		t.Errorf("%.2f of the conversations travel", share)
	}
}

func TestHashingKeepsTheBound(t *testing.T) {
	s := &cellRun{cellDay: smallDay(t), inFlight: []int{9, 0, 0, 0}}
	same := func() *trip {
		return &trip{local: make([]uint64, 4), Request: engine.Request{Blocks: make([]kv.StoredBlock, 4)}}
	}
	first := -1
	for sent := 10; sent < 110; sent++ {
		c := s.byHash(same())
		if bound := int(math.Ceil(hashBound * float64(sent) / 4)); s.inFlight[c] >= bound {
			t.Fatalf("a cell with %d requests in flight got one more, at a bound of %d", s.inFlight[c], bound)
		}
		if first < 0 {
			first = c
		}
		s.inFlight[c]++
	}
	if s.inFlight[first] < 30 {
		t.Errorf("in flight: %v; the prefix's own cell is %d", s.inFlight, first)
	}
}

func TestMatricesThatAreRefused(t *testing.T) {
	for text, want := range map[string]string{
		"":                                      "no regions",
		"a 0":                                   "2 fields",
		"a 0 1 2":                               "2 round trips",
		"a 0 1 2\nb 0 1":                        "1 round trips",
		"a x 1":                                 "hours ahead of UTC",
		"a 15 1":                                "hours ahead of UTC",
		"a NaN 1":                               "hours ahead of UTC",
		"a 0 -1":                                "round trip of",
		"a 0 10001":                             "round trip of",
		"# a\n\na 0 1\nb 0 1 Inf":               "line 4",
		strings.Repeat("a 0 1\n", maxRegions+1): "more than",
	} {
		if _, err := parseRegions(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.30q: error %v, want one with %q", text, err, want)
		}
	}
}

func TestMatrixOfTestdata(t *testing.T) {
	regions, err := readRegions("../../../testdata/rtt/regions.txt")
	if err != nil || len(regions) != 16 || regions[0].name != "oregon" || regions[0].offset != -8 || regions[3].rtts[3] != time.Millisecond {
		t.Errorf("%d regions, error %v", len(regions), err)
	}
	for i, r := range regions {
		for j := range regions {
			if r.rtts[j] != regions[j].rtts[i] {
				t.Errorf("%s to %s: %v and %v", r.name, regions[j].name, r.rtts[j], regions[j].rtts[i])
			}
		}
	}
}

func TestCellSettingsThatAreRefused(t *testing.T) {
	for want, change := range map[string]func(*Settings){
		"--cells 257":         func(s *Settings) { s.Cells = 257 },
		"--rtt-matrix":        func(s *Settings) { s.RTTMatrix = "" },
		"--rtt-matrix is":     func(s *Settings) { s.Cells = 0 },
		"--trace":             func(s *Settings) { s.Trace = "x" },
		"--event-lag":         func(s *Settings) { s.Routers = 2 },
		"--synthetic-rate":    func(s *Settings) { s.Shape.Rate = 1 },
		"--day 1ms":           func(s *Settings) { s.Day = time.Millisecond },
		"--day-load":          func(s *Settings) { s.DayLoad = 0 },
		"--day-swing":         func(s *Settings) { s.DaySwing = 1.5 },
		"--placements":        func(s *Settings) { s.Placements = nil },
		"--placements away":   func(s *Settings) { s.Placements = []string{"away"} },
		"--synthetic-turns 0": func(s *Settings) { s.Shape.Turns = 0 },
	} {
		s := cellSettings()
		s.Cells, s.RTTMatrix = 2, "file"
		if change(&s); s.Validate() == nil || !strings.Contains(s.Validate().Error(), want) {
			t.Errorf("%s: error %v", want, s.Validate())
		}
	}
}

func FuzzMatrix(f *testing.F) {
	text, err := os.ReadFile("../../../testdata/rtt/regions.txt")
	if err != nil {
		f.Fatal(err)
	}
	for _, seed := range []string{string(text), "a 0 1", "a,1e1,\t1 # x\nb 0 1 1"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		regions, err := parseRegions(strings.NewReader(text))
		if err != nil {
			return
		}
		for _, r := range regions {
			if len(regions) > maxRegions || len(r.rtts) != len(regions) || r.name == "" || !(r.offset >= -maxOffset && r.offset <= maxOffset) {
				t.Fatalf("%q: %+v", text, r)
			}
			for _, rtt := range r.rtts {
				if rtt < 0 || rtt > maxRTT*time.Millisecond {
					t.Fatalf("%q: %+v", text, r)
				}
			}
		}
	})
}
