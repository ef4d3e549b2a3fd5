package policy

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"kvrouter/internal/testkit"
)

func TestTheSmallestTreeIsToldAsWhatDecided(t *testing.T) {
	settings := testkit.Defaults[Settings]()
	settings.Ties = tiesSmallestTree
	p, err := New("kv", settings)
	if err != nil {
		t.Fatal(err)
	}
	why := new(Explanation)
	chosen := p.Choose(Query{Tokens: 640, BlockSize: 64, Explain: why}, unnamed(Candidate{TreeBlocks: 2}, Candidate{TreeBlocks: 1}), rand.New(rand.NewPCG(1, 1)))
	if winners := why.Winners(); chosen != 1 || !slices.Equal(winners, []int{1}) {
		t.Errorf("candidate %d, by its explanation %v, want 1", chosen, winners)
	}
}

func TestWinnersAndMargin(t *testing.T) {
	low, high := 1.0, 2.0
	for _, test := range []struct {
		name    string
		scores  []Score
		winners []int
		margin  float64 // of the first winner
	}{
		{"the highest", []Score{{Total: 1}, {Total: 3}}, []int{1}, 2},
		{"a tie", []Score{{Total: 1}, {Total: 1}, {Total: 0}}, []int{0, 1}, 0},
		{"a tie that something decides", []Score{{Total: 1, TieBreak: &low}, {Total: 1, TieBreak: &high}}, []int{1}, 0},
		{"one that could not be chosen", []Score{{Total: 9, Excluded: "queue_limit"}, {Total: 1}, {Total: 0.5}}, []int{1}, 0.5},
	} {
		t.Run(test.name, func(t *testing.T) {
			e := Explanation{How: HowHighest, Scores: test.scores}
			if got := e.Winners(); !slices.Equal(got, test.winners) {
				t.Errorf("winners %v, want %v", got, test.winners)
			}
			if margin := e.Margin(test.winners[0]); margin == nil || *margin != test.margin {
				t.Errorf("margin %v, want %v", margin, test.margin)
			}
		})
	}
	if alone := (&Explanation{Scores: []Score{{Total: 1}}}).Margin(0); alone != nil {
		t.Errorf("the margin of the only candidate is %v", *alone)
	}
}

func TestWhatIsExplainedIsFinite(t *testing.T) {
	for _, test := range []struct{ v, want float64 }{{math.NaN(), 0}, {math.Inf(1), math.MaxFloat64}, {math.Inf(-1), -math.MaxFloat64}, {1.5, 1.5}} {
		if got := Finite(test.v); got != test.want {
			t.Errorf("Finite(%v) is %v, want %v", test.v, got, test.want)
		}
	}
	if math.Signbit(Finite(math.Copysign(0, -1))) {
		t.Error("−0 stays −0, which JSON shows")
	}
}
