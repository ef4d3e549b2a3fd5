package testkit

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// WantEqual fails the test with the difference if got is not want.
func WantEqual(t *testing.T, what string, got, want any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}
