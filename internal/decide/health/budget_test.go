package health

import (
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// purse is a budget with a clock that the test advances.
type purse struct {
	*Budget
	now time.Time
}

func newPurse(share float64) *purse { return &purse{NewBudget(share), time.Unix(1_000_000, 0)} }

func (p *purse) ask(client string, n int) {
	for range n {
		p.Request(client, p.now)
	}
}

// take takes retries until one is denied, and returns how many there were.
func (p *purse) take(client string) (n int, why Denial) {
	for ; why == ""; n++ {
		why = p.Take(client, p.now)
	}
	return n - 1, why
}

func TestRetriesHaveABudget(t *testing.T) {
	p := newPurse(0.2)
	if n, why := p.take("a"); n != BudgetLeast || why != DeniedTotal {
		t.Errorf("%d retries without requests, then %q; want %d", n, why, BudgetLeast)
	}
	p.ask("a", 100)
	if n, _ := p.take("a"); n != 20 {
		t.Errorf("%d more retries for 100 requests, want 20", n)
	}
	p.now = p.now.Add(BudgetSeconds * time.Second)
	if n, _ := p.take("a"); n != BudgetLeast {
		t.Error("the budget does not come back")
	}
	if (*Budget)(nil).Take("a", p.now) != "" {
		t.Error("no budget is a bound")
	}
}

// TestAClientThatFailsLeavesOthersTheirRetries in either order of the clients.
func TestAClientThatFailsLeavesOthersTheirRetries(t *testing.T) {
	p := newPurse(0.2)
	p.ask("bad", 1000)
	p.ask("good", 100)
	fairOfGood := 0.2*100 + BudgetLeast/2
	bad, why := p.take("bad")
	if want := int(0.2*1100 + BudgetLeast - fairOfGood*reservedShare); bad != want || why != DeniedClient {
		t.Errorf("the one that fails gets %d retries, then %q; want %d: what is reserved for others stays", bad, why, want)
	}
	if good, why := p.take("good"); good != int(fairOfGood*reservedShare+0.5) || why != DeniedTotal {
		t.Errorf("the other gets %d, then %q", good, why)
	}
}

// TestNobodyGetsFarMoreThanItsShare: a small client of a large fleet.
func TestNobodyGetsFarMoreThanItsShare(t *testing.T) {
	p := newPurse(0.2)
	p.ask("large", 10_000)
	p.ask("small", 100)
	if n, why := p.take("small"); n != mostOfFair*(20+BudgetLeast/2) || why != DeniedClient {
		t.Errorf("it gets %d retries for 100 requests, then %q", n, why)
	}
	if n, _ := p.take("large"); n < 1900 {
		t.Errorf("the other gets %d for 10,000", n)
	}
}

// TestIdleSharesAreUsed: idle clients have no share.
func TestIdleSharesAreUsed(t *testing.T) {
	p := newPurse(0.2)
	for i := range 20 {
		p.ask(fmt.Sprint(i), 10)
	}
	p.now = p.now.Add(BudgetSeconds * time.Second)
	if n, _ := p.take("0"); n != BudgetLeast || len(p.clients) != 1 {
		t.Errorf("it gets %d retries beside %d clients", n, len(p.clients)-1)
	}
}

// TestManySmallClientsShareTheirParts: each alone has less than one retry.
func TestManySmallClientsShareTheirParts(t *testing.T) {
	p := newPurse(0.2)
	p.ask("bad", 1000)
	for i := range 100 {
		p.ask(fmt.Sprint(i), 1)
	}
	p.take("bad")
	granted := 0
	for i := range 100 {
		if p.Take(fmt.Sprint(i), p.now) == "" {
			granted++
		}
	}
	if granted < 10 || granted > 16 {
		t.Errorf("100 clients of one request each get %d retries, want some 15", granted)
	}
}

func TestABudgetKnowsABoundedNumberOfClients(t *testing.T) {
	p := newPurse(0.2)
	for i := range 3 * budgetClients {
		p.ask(fmt.Sprint(i), 1)
		p.Take(fmt.Sprint(i), p.now)
	}
	if len(p.clients) > budgetClients || p.recent.Len() != len(p.clients) {
		t.Errorf("%d clients are known, %d in order", len(p.clients), p.recent.Len())
	}
	if p.all.requests != 3*budgetClients {
		t.Errorf("%d requests are counted in all", p.all.requests)
	}
}

// TestBudgetKeepsItsPromises compares a budget with a model that records every request and
// retry, under random calls.
func TestBudgetKeepsItsPromises(t *testing.T) {
	const share = 0.2
	type event struct {
		at     int64
		client string
		retry  bool
	}
	rapid.Check(t, func(t *rapid.T) {
		p := newPurse(share)
		var events []event
		client := rapid.SampledFrom([]string{"a", "b", "c", "d"})
		count := func(client string, retry bool) (n int) {
			for _, e := range events {
				if (client == "" || e.client == client) && e.retry == retry && p.now.Unix()-e.at < BudgetSeconds {
					n++
				}
			}
			return n
		}
		t.Repeat(map[string]func(*rapid.T){
			"request": func(t *rapid.T) {
				c, n := client.Draw(t, "client"), rapid.IntRange(1, 60).Draw(t, "n")
				p.ask(c, n)
				for range n {
					events = append(events, event{p.now.Unix(), c, false})
				}
			},
			"retry": func(t *rapid.T) {
				c := client.Draw(t, "client")
				for range rapid.IntRange(1, 30).Draw(t, "n") {
					taken, asked := count(c, true), count(c, false)
					why := p.Take(c, p.now)
					fair := BudgetLeast/float64(len(p.clients)) + share*float64(asked)
					total := BudgetLeast + share*float64(count("", false))
					switch {
					case why != "" && float64(taken+1) <= reservedShare*fair-1e-9:
						t.Fatalf("%s has had %d of a fair share of %.1f, and is denied another (%s)", c, taken, fair, why)
					case why == "" && float64(taken+1) > mostOfFair*fair+1e-9:
						t.Fatalf("%s has had %d of a fair share of %.1f, and gets another", c, taken, fair)
					case why == "" && float64(count("", true)) >= total+1e-9 && float64(taken+1) > reservedShare*fair+1e-9:
						t.Fatalf("%s gets a retry beyond the total of %.1f", c, total)
					case why == "":
						events = append(events, event{p.now.Unix(), c, true})
					}
				}
			},
			"time": func(t *rapid.T) {
				p.now = p.now.Add(time.Duration(rapid.IntRange(-500, 4000).Draw(t, "ms")) * time.Millisecond)
				if p.now.Unix() < p.all.at { // the clock may go back within a second, the budget counts on
					p.now = time.Unix(p.all.at, 0)
				}
			},
			"": func(t *rapid.T) {
				p.all.upTo(p.now.Unix())
				if p.all.requests != count("", false) || p.all.retries != count("", true) {
					t.Fatalf("%d requests and %d retries are counted, there were %d and %d", p.all.requests, p.all.retries, count("", false), count("", true))
				}
				for name, e := range p.clients {
					s := e.Value.(*spending)
					s.upTo(p.now.Unix())
					if s.requests != count(name, false) || s.retries != count(name, true) {
						t.Fatalf("%s: %d requests and %d retries are counted, there were %d and %d", name, s.requests, s.retries, count(name, false), count(name, true))
					}
				}
			},
		})
	})
}

func BenchmarkBudget(b *testing.B) {
	p := newPurse(0.2)
	for i := range budgetClients {
		p.ask(fmt.Sprint(i), 10)
	}
	b.Run("request", func(b *testing.B) {
		for b.Loop() {
			p.Request("7", p.now)
		}
	})
	b.Run("denied", func(b *testing.B) {
		p.ask("bad", 5000)
		for p.Take("bad", p.now) == "" {
		}
		for b.Loop() {
			p.Take("bad", p.now)
		}
	})
}
