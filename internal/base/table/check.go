package table

import "fmt"

// Check reports the first violated invariant of the table's structure.
func (t *Table) Check() error {
	if t.directory == nil {
		if t.count != 0 {
			return fmt.Errorf("no directory but %d entries", t.count)
		}
		return nil
	}
	if len(t.directory) != 1<<t.bits {
		return fmt.Errorf("directory of %d for %d bits", len(t.directory), t.bits)
	}
	total := 0
	for d := 0; d < len(t.directory); {
		s := t.directory[d]
		span := 1 << (t.bits - s.bits)
		if d%span != 0 {
			return fmt.Errorf("segment of %d bits starts at directory place %d", s.bits, d)
		}
		for i := d; i < d+span; i++ {
			if t.directory[i] != s {
				return fmt.Errorf("directory place %d does not share the segment of %d", i, d)
			}
		}
		d += span
		used := 0
		for _, e := range s.entries {
			if e.value == 0 {
				continue
			}
			used++
			if t.segment(t.hash(e.key, e.tag)) != s {
				return fmt.Errorf("entry (%d, %d) is in the wrong segment", e.key, e.tag)
			}
			if got := t.Get(e.key, e.tag); got != e.value {
				return fmt.Errorf("entry (%d, %d) holds %d, get returns %d", e.key, e.tag, e.value, got)
			}
		}
		if used != s.used || used > len(s.entries)/4*3 {
			return fmt.Errorf("segment of %d places counts %d entries and has %d", len(s.entries), s.used, used)
		}
		total += used
	}
	if total != t.count {
		return fmt.Errorf("table counts %d entries and has %d", t.count, total)
	}
	return nil
}
