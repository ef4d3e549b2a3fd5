package router

import (
	"fmt"
	"kvrouter/internal/policy"
	"testing"
)

func MustPolicy(t testing.TB, name string) policy.Policy {
	t.Helper()
	p, err := policy.NewPolicy(name)
	if err != nil {
		t.Fatal(fmt.Errorf("policy %s: %w", name, err))
	}
	return p
}
