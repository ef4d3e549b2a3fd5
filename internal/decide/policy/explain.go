package policy

import (
	"cmp"
	"math"
	"slices"
)

// Explanation is the explanation of a choice. Choose fills in the one of its Query,
// if set, from the same terms by which it chooses.
type Explanation struct {
	Policy      string  `json:"policy"`
	How         How     `json:"how"`
	Rule        string  `json:"rule,omitempty"`         // the rule that applied, of a policy with several
	Draw        float64 `json:"draw,omitempty"`         // HowDraw: from 0 to 1, the place in the sum of the chances
	Temperature float64 `json:"temperature,omitempty"`  // HowDraw: of the softmax
	Decision    uint64  `json:"decision_id,omitempty"`  // identifies the decision in the feedback to a judged policy
	Reuse       *int    `json:"reuse_budget,omitempty"` // thompson: requests of the series to come
	Scores      []Score `json:"-"`                      // one for each candidate, in their order
}

// How is the method of choosing by scores.
type How string

// Values of How.
const (
	HowHighest How = "highest" // the highest total, then the highest tie break, then one at random
	HowDraw    How = "draw"    // by chance, in proportion to each candidate's Chance
)

// Score is a candidate's value to the policy. The highest wins: costs count
// as negative.
type Score struct {
	Terms    []Term   `json:"terms"` // they add up to Total
	Total    float64  `json:"total"`
	TieBreak *float64 `json:"tie_break,omitempty"` // decides between equal totals; nil: nothing does
	Chance   *float64 `json:"chance,omitempty"`    // HowDraw: from 0 to 1
	Excluded string   `json:"excluded,omitempty"`  // reason why it could not be chosen; empty: it could
}

// Term is a part of a score.
type Term struct {
	Name  string  `json:"name"`
	Value float64 `json:"value"`
}

// By sets the policy; it does nothing on a nil explanation.
func (e *Explanation) By(policy string) {
	if e != nil {
		e.Policy, e.How = policy, HowHighest
	}
}

// Rank adds each candidate's score.
func (e *Explanation) Rank(policy string, candidates []Candidate, score func(*Candidate) Score) {
	e.By(policy)
	for i := range candidates {
		e.Add(score(&candidates[i]))
	}
}

// Add adds the next candidate's score. JSON cannot hold numbers that are not finite.
func (e *Explanation) Add(s Score) {
	s.Total = Finite(s.Total)
	for i := range s.Terms {
		s.Terms[i].Value = Finite(s.Terms[i].Value)
	}
	e.Scores = append(e.Scores, s)
}

// Drawn sets that the choice was drawn: weights are in proportion to the chances,
// draw is from 0 to 1.
func (e *Explanation) Drawn(weights []float64, draw, temperature float64) {
	sum := 0.0
	for _, w := range weights {
		sum += w
	}
	e.How, e.Draw, e.Temperature = HowDraw, draw, temperature
	for i, w := range weights {
		chance := Finite(w / sum)
		e.Scores[i].Chance = &chance
	}
}

// Finite returns v, or the nearest finite number; 0 for NaN, never −0.
func Finite(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return min(max(v, -math.MaxFloat64), math.MaxFloat64) + 0
}

// Winners returns the candidates with the best score: one, or those of a tie, of
// which one was chosen at random. Without scores there are none.
func (e *Explanation) Winners() []int {
	if e.How == HowDraw {
		sum := 0.0
		for i := range e.Scores {
			if sum += *e.Scores[i].Chance; e.Draw <= sum {
				return []int{i}
			}
		}
	}
	var winners []int
	for i := range e.Scores {
		if e.Scores[i].Excluded != "" {
			continue
		}
		order := 1
		if len(winners) > 0 {
			order = e.Scores[i].compare(&e.Scores[winners[0]])
		}
		if order > 0 {
			winners = winners[:0]
		}
		if order >= 0 {
			winners = append(winners, i)
		}
	}
	return winners
}

// compare is more than 0 if s goes before other.
func (s *Score) compare(other *Score) int {
	order := cmp.Compare(s.Total, other.Total)
	if order == 0 && s.TieBreak != nil && other.TieBreak != nil {
		return cmp.Compare(*s.TieBreak, *other.TieBreak)
	}
	return order
}

// Margin returns the difference of the chosen candidate's total to that of the best
// other candidate; nil: there is no other. It is negative if a draw chose a worse
// one.
func (e *Explanation) Margin(chosen int) *float64 {
	if chosen >= len(e.Scores) {
		return nil
	}
	var best *float64
	for i := range e.Scores {
		if s := &e.Scores[i]; i != chosen && s.Excluded == "" && (best == nil || s.Total > *best) {
			best = &s.Total
		}
	}
	if best == nil {
		return nil
	}
	margin := Finite(e.Scores[chosen].Total - *best)
	return &margin
}

// OneTerm returns a score of one term.
func OneTerm(name string, value float64) Score {
	return Score{Terms: []Term{{name, value}}, Total: value}
}

// explainTurns notes how many turns each candidate is away from being the next.
func (e *Explanation) explainTurns(candidates []Candidate, next int) {
	order := make([]int, len(candidates))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int { return candidates[a].Target.Key.Compare(candidates[b].Target.Key) })
	first := slices.Index(order, next)
	turns := make([]float64, len(order))
	for place, i := range order {
		turns[i] = float64((place - first + len(order)) % len(order))
	}
	e.By("round-robin")
	for _, away := range turns {
		e.Add(OneTerm("turns", -away))
	}
}

// explainTwo notes which two candidates were drawn. Of equal ones the first is taken.
func (e *Explanation) explainTwo(candidates []Candidate, a, b int) {
	e.By("power-of-two")
	for i := range candidates {
		s := OneTerm("in_flight", -candidates[i].Load.each(candidates[i].Load.InFlight))
		switch first, second := 1.0, 0.0; i {
		case a:
			s.TieBreak = &first
		case b:
			s.TieBreak = &second
		default:
			s.Excluded = "not_drawn"
		}
		e.Add(s)
	}
}
