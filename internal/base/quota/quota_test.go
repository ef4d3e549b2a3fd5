package quota

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"
)

// TestNoClientTakesAll: however many units a client asks for, another gets some.
func TestNoClientTakesAll(t *testing.T) {
	for _, all := range []int64{2, 8, 64, 1 << 20} {
		p := New(all)
		n := int64(0)
		for p.Take("greedy", 0, 1) {
			n++
		}
		if n >= all || all >= 64 && n < all*9/10 {
			t.Errorf("one client has %d of %d", n, all)
		}
		if !p.Take("other", 0, 1) {
			t.Errorf("with %d of %d taken, another client gets none", n, all)
		}
	}
}

// TestGreedyClientsHaveTheSame within a unit, and leave some.
func TestGreedyClientsHaveTheSame(t *testing.T) {
	const all, greedy = 1 << 12, 5
	p := New(all)
	for took := true; took; {
		took = false
		for i := range greedy {
			took = p.Take(fmt.Sprint(i), 0, 1) || took
		}
	}
	for i := range greedy {
		if n := p.of[fmt.Sprint(i)]; n < all/greedy*9/10 || n > p.of["0"] || n+1 < p.of["0"] {
			t.Errorf("client %d has %d of %d", i, n, all)
		}
	}
	if !p.Take("other", 0, all/100) {
		t.Error("nothing is left for another client")
	}
}

// TestTheOnlyRequestOfAClientMayHaveAll: one of the maximum size is served.
func TestTheOnlyRequestOfAClientMayHaveAll(t *testing.T) {
	p := New(100)
	if !p.Take("a", 0, 60) || !p.Take("a", 60, 40) || p.Take("a", 100, 1) || p.Take("b", 0, 1) {
		t.Errorf("%d of 100", p.Held())
	}
	p.Give("a", 100)
	if p.Held() != 0 || len(p.of) != 0 {
		t.Errorf("%d units, %v", p.Held(), p.of)
	}
}

// TestThePoolIsKept takes and returns at random.
func TestThePoolIsKept(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := New(1000)
		taken := map[string][]int64{}
		client := rapid.SampledFrom([]string{"", "a", "b", "c"})
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				c, n := client.Draw(t, "client"), rapid.Int64Range(0, 400).Draw(t, "units")
				if p.Take(c, 0, n) {
					taken[c] = append(taken[c], n)
				}
			},
			"give": func(t *rapid.T) {
				c := client.Draw(t, "client")
				if list := taken[c]; len(list) > 0 {
					p.Give(c, list[0])
					taken[c] = list[1:]
				}
			},
			"": func(t *rapid.T) {
				sum := int64(0)
				for c, list := range taken {
					own := int64(0)
					for _, n := range list {
						own += n
					}
					if sum += own; p.of[c] != own {
						t.Fatalf("%q has %d, of which %d are counted", c, own, p.of[c])
					}
				}
				if p.Held() != sum || sum > 1000 {
					t.Fatalf("%d units are taken, %d are counted", sum, p.Held())
				}
			},
		})
	})
}
