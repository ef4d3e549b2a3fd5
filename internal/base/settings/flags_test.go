package settings

import (
	"slices"
	"testing"
)

func TestPairsAreSplitWhereAKeyBegins(t *testing.T) {
	for text, want := range map[string][]string{
		"a=1": {"a=1"}, "a=1,b=2": {"a=1", "b=2"}, "a=1,2,b=3": {"a=1,2", "b=3"}, "a=0=1s,1=2s,b.c=3": {"a=0=1s,1=2s", "b.c=3"},
		"a=x,y": {"a=x,y"}, "a=1, b=2": {"a=1", " b=2"}, "": {""}, "a": {"a"}, "a=1,": {"a=1,"}, "1=2": {"1=2"},
	} {
		if got := Pairs(text); !slices.Equal(got, want) {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
}
