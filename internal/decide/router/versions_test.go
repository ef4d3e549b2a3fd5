package router

import "testing"

func TestVersionPolicies(t *testing.T) {
	for _, c := range []struct {
		policy, version, latest string
		want                    bool
	}{
		{"", "", "9", true}, {"any", "1", "9", true},
		{"latest-only", "9", "9", true}, {"latest-only", "8", "9", false}, {"latest-only", "", "9", false},
		{"latest-only", "", "", true}, {"latest-only", "default", "default", true}, {"latest-only", "default", "1", false},
		{"min-version:8", "8", "9", true}, {"min-version:8", "10", "10", true}, {"min-version:8", "7", "9", false},
		{"min-version:8", "step-8", "9", true}, {"min-version:8", "default", "9", false},
		{"max-staleness:2", "7", "9", true}, {"max-staleness:2", "6", "9", false}, {"max-staleness:2", "10", "9", true},
		{"latest-only", "5", "20261129215834", false}, {"min-version:20261129215834", "20261129215833", "20261129215834", false},
		{"min-version:20261129215834", "20261129215834", "20261129215834", true}, {"max-staleness:1", "20261129215833", "20261129215834", true},
		{"max-staleness:1", "99999999999999999999999", "99999999999999999999999", true}, {"latest-only", "9", "99999999999999999999999", false},
		{"max-staleness:4294967295", "18446744073709551615", "18446744073709551615", true}, {"min-version:007", "7", "7", true},
		{"max-staleness:2", "default", "9", false}, {"max-staleness:2", "default", "default", true}, {"max-staleness:0", "8", "9", false},
	} {
		policy, err := ParseVersionPolicy(c.policy)
		if err != nil {
			t.Fatal(err)
		}
		if got := policy.takes(c.version, c.latest); got != c.want {
			t.Errorf("%s takes %q where %q is the latest: %v", c.policy, c.version, c.latest, got)
		}
	}
	for _, bad := range []string{"latest", "min-version", "min-version:", "max-staleness:", "max-staleness:-1", "max-staleness:x", "any:1x"} {
		if policy, err := ParseVersionPolicy(bad); err == nil || policy.Restricts() {
			t.Errorf("%s: %+v %v", bad, policy, err)
		}
	}
}
