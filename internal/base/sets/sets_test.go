package sets

import (
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestSetsEqualMaps compares with holders that have a map each. A set that two of them
// have is one.
func TestSetsEqualMaps(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := New(rapid.Uint64().Draw(t, "seed"))
		var ids [5]uint32
		var model [5]map[uint32]bool
		for i := range model {
			model[i] = map[uint32]bool{}
		}
		number := rapid.SampledFrom([]uint32{0, 1, 63, 64, 200})
		t.Repeat(map[string]func(*rapid.T){
			"toggle": func(t *rapid.T) {
				i, n := rapid.IntRange(0, len(ids)-1).Draw(t, "holder"), number.Draw(t, "number")
				to := s.Toggle(ids[i], n)
				s.Acquire(to)
				s.Release(ids[i])
				ids[i] = to
				if model[i][n] = !model[i][n]; !model[i][n] {
					delete(model[i], n)
				}
			},
			"": func(t *rapid.T) {
				refs := map[uint32]uint32{}
				for _, id := range ids {
					refs[id]++
				}
				if err := s.Check(func(id uint32) uint32 { return refs[id] }); err != nil {
					t.Fatal(err)
				}
				for i, id := range ids {
					for _, n := range []uint32{0, 1, 2, 63, 64, 65, 200, 1000} {
						if s.Has(id, n) != model[i][n] {
							t.Fatalf("%d is in set %d: %v, want %v", n, id, s.Has(id, n), model[i][n])
						}
					}
					if other := rapid.IntRange(0, len(ids)-1).Draw(t, "other"); maps.Equal(model[i], model[other]) != (id == ids[other]) {
						t.Fatalf("sets %v and %v have ids %d and %d", model[i], model[other], id, ids[other])
					}
				}
			},
		})
	})
}

func TestNarrowNotesWhoEnds(t *testing.T) {
	alive, held := []uint64{0b1110, 1}, make([]int32, 128)
	if !Narrow(alive, []uint64{0b0110}, 3, held) || !slices.Equal(alive, []uint64{0b0110, 0}) {
		t.Errorf("%b are left", alive)
	}
	if Narrow(alive, nil, 5, held) {
		t.Error("some are left of none")
	}
	if !slices.Equal(held[:4], []int32{0, 5, 5, 3}) || held[64] != 3 {
		t.Errorf("held are %v", held)
	}
}

func TestFreeSetsLendTheirMemory(t *testing.T) {
	s := New(1)
	once := func() {
		set := s.Toggle(0, 4095)
		s.Acquire(set)
		s.Release(set)
	}
	once()
	if n := testing.AllocsPerRun(100, once); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
