package router

import (
	"reflect"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// TestDecisionsReadFewLines holds what decisions among thousands of workers read of each to few
// lines of the processor's cache: these decisions mostly wait for memory.
func TestDecisionsReadFewLines(t *testing.T) {
	const line = 64
	end := func(of any, field string) uintptr {
		f, found := reflect.TypeOf(of).FieldByName(field)
		if !found {
			t.Fatalf("%T has no field %s", of, field)
		}
		if len(f.Index) > 1 {
			t.Fatalf("%T.%s is promoted", of, field)
		}
		return f.Offset + f.Type.Size()
	}
	for _, c := range []struct {
		of    any
		field string // the last one that is read mostly
		lines uintptr
	}{
		{policy.Candidate{}, "Held", 1},
		{policy.Load{}, "Fresh", 2},
		{policy.Load{}, "ActiveBlocks", 3},
		{policy.Prefill{}, "AnsweredWhole", 1},
		{targetLoad{}, "number", 1},
	} {
		if end := end(c.of, c.field); end > c.lines*line {
			t.Errorf("%T.%s ends at byte %d, not within %d lines", c.of, c.field, end, c.lines)
		}
	}
	for _, of := range []any{kv.Target{}, policy.Candidate{}, policy.Load{}} {
		if size := reflect.TypeOf(of).Size(); size%line != 0 {
			t.Errorf("%T has %d bytes: give it a multiple of %d", of, size, line)
		}
	}
}
