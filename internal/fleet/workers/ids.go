package workers

import "fmt"

// AssignIDs gives attached workers without an id the next free one, in their order;
// started workers have the ids from 0 on. An error names an id or a URL that is used
// twice, with the flag.
func AssignIDs(attached []Attached, started int) error {
	taken := map[uint64]string{}
	for id := range started {
		taken[uint64(id)] = "a started worker"
	}
	urls := map[string]bool{}
	for _, w := range attached {
		if urls[w.URL] {
			return fmt.Errorf("--worker url=%s is given twice", w.URL)
		}
		urls[w.URL] = true
		if !w.HasID {
			continue
		}
		if owner, dup := taken[w.ID]; dup {
			return fmt.Errorf("--worker id=%d,url=%s: id %d belongs to %s; choose another or leave it out", w.ID, w.URL, w.ID, owner)
		}
		taken[w.ID] = w.URL
	}
	var next uint64
	for i := range attached {
		w := &attached[i]
		if w.HasID {
			continue
		}
		for taken[next] != "" {
			next++
		}
		w.ID = next
		taken[next] = w.URL
	}
	return nil
}
