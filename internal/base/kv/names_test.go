package kv

import (
	"fmt"
	"sync"
	"testing"
)

func TestWorkersAreCalledByNameOrID(t *testing.T) {
	for name, c := range map[string]struct {
		list []Worker
		want map[uint64]string // labels
	}{
		"nobody has a name":         {nil, map[uint64]string{0: "0", 3: "3", 1 << 52: "4503599627370496"}},
		"one has":                   {[]Worker{{ID: 9, Name: "pod-a"}, {ID: 8}}, map[uint64]string{9: "pod-a", 8: "8", 0: "0"}},
		"two of one name":           {[]Worker{{ID: 9, Name: "a"}, {ID: 8, Name: "a"}}, map[uint64]string{9: "a", 8: "a#8"}},
		"three, one of them cheats": {[]Worker{{ID: 7, Name: "a#8"}, {ID: 9, Name: "a"}, {ID: 8, Name: "a"}}, map[uint64]string{7: "a#8", 9: "a", 8: "a#8#8"}},
		"a number":                  {[]Worker{{ID: 9, Name: "0"}}, map[uint64]string{9: "0#9", 0: "0"}},
		"the word for nobody":       {[]Worker{{ID: 9, Name: "none"}}, map[uint64]string{9: "none#9"}},
	} {
		var n Names
		n.Set([]Worker{{ID: 1, Name: "before"}})
		n.Set(c.list)
		for id, want := range c.want {
			if got := n.Label(id); got != want {
				t.Errorf("%s: worker %d is called %s, want %s", name, id, got, want)
			}
			if back, found := n.ID(want); (n.Name(id) != "") != found || found && back != id {
				t.Errorf("%s: %s is worker %d, %v", name, want, back, found)
			}
		}
		if frozen := n.Now(); frozen.Label(9) != n.Label(9) {
			t.Errorf("%s: now, %s is %s", name, n.Label(9), frozen.Label(9))
		} else if n.Set(nil); len(c.list) > 0 && frozen.Name(9) == "" {
			t.Errorf("%s: what was known then changes", name)
		}
		if _, found := n.ID("before"); found || n.Label(1) != "1" {
			t.Errorf("%s: a name that was forgotten is known", name)
		}
	}
	var nobody *Names
	nobody.Set([]Worker{{ID: 1, Name: "a"}})
	if _, found := nobody.ID("a"); found || nobody.Label(1) != "1" || nobody.Name(1) != "" || nobody.Now().Label(1) != "1" {
		t.Error("nil knows a name")
	}
}

func TestNamesAreFoundWithoutMemory(t *testing.T) {
	var n Names
	n.Set([]Worker{{ID: 1 << 52, Name: "pod-a"}})
	if got := testing.AllocsPerRun(100, func() { n.Label(1 << 52) }); got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func TestNamesAreReadWhileTheyChange(t *testing.T) {
	var n Names
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for range 1000 {
				if label := n.Label(7); label != "7" && label != "a" {
					t.Error(label)
				}
			}
		})
	}
	for range 1000 {
		n.Set([]Worker{{ID: 7, Name: "a"}})
		n.Set(nil)
	}
	readers.Wait()
}

func BenchmarkLabel(b *testing.B) {
	for _, workers := range []int{0, 64, 4096} {
		b.Run(fmt.Sprintf("%d names", workers), func(b *testing.B) {
			var n Names
			var list []Worker
			for i := range uint64(workers) {
				list = append(list, Worker{ID: 1<<52 + i, Name: fmt.Sprintf("vllm-7d9f8c6b5-%05d", i)})
			}
			n.Set(list)
			b.ReportAllocs()
			for i := range b.N {
				n.Label(1<<52 + uint64(i)%64)
			}
		})
	}
}
