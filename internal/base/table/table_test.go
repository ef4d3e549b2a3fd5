package table

import (
	"maps"
	"testing"

	"pgregory.net/rapid"
)

func TestTableEqualsMap(t *testing.T) {
	type key struct {
		key uint64
		tag uint32
	}
	rapid.Check(t, func(t *rapid.T) {
		table, model := Table{Seed: rapid.Uint64().Draw(t, "seed")}, map[key]uint32{}
		steps := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) [4]uint32 {
			return [4]uint32{
				rapid.Uint32Range(0, 3).Draw(t, "op"),
				rapid.Uint32Range(0, 5000).Draw(t, "first"),
				rapid.Uint32Range(1, 3000).Draw(t, "n"),
				rapid.Uint32Range(0, 2).Draw(t, "tag"),
			}
		}), 1, 6).Draw(t, "steps")
		for _, s := range steps {
			for k := s[1]; k < s[1]+s[2]; k++ {
				at := key{uint64(k), s[3]}
				if s[0] == 0 {
					if got := table.Delete(at.key, at.tag); got != model[at] {
						t.Fatalf("delete %v returned %d, want %d", at, got, model[at])
					}
					delete(model, at)
				} else {
					table.Put(at.key, at.tag, k+s[0])
					model[at] = k + s[0]
				}
			}
			if err := table.Check(); err != nil {
				t.Fatal(err)
			}
		}
		got := map[key]uint32{}
		table.Each(func(k uint64, tag, value uint32) bool {
			got[key{k, tag}] = value
			return true
		})
		if !maps.Equal(got, model) || table.Len() != len(model) {
			t.Fatalf("table of %d entries yields %d, want %d", table.Len(), len(got), len(model))
		}
		if v := table.Get(1<<40, 0); v != 0 {
			t.Fatalf("absent key has value %d", v)
		}
		values := map[uint32]int{}
		for table.Len() > 0 {
			limit := rapid.IntRange(1, 500).Draw(t, "limit")
			before := table.Len()
			n := table.Drain(limit, func(value uint32) { values[value]++ })
			if n > limit || n == 0 || table.Len() != before-n {
				t.Fatalf("drain of %d from %d visited %d and left %d", limit, before, n, table.Len())
			}
		}
		for _, value := range model {
			values[value]--
		}
		for value, n := range values {
			if n != 0 {
				t.Fatalf("value %d was drained %+d times too often", value, n)
			}
		}
	})
}

func TestTableIterationStopsWhenTold(t *testing.T) {
	table := Table{}
	for k := range uint64(10) {
		table.Put(k, 0, 1)
	}
	n := 0
	table.Each(func(uint64, uint32, uint32) bool { n++; return n < 3 })
	if n != 3 {
		t.Errorf("%d entries yielded, want 3", n)
	}
}
