// Package policies creates routing policies by name.
package policies

import (
	"fmt"
	"slices"
	"strings"

	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/thompson"
)

// Names lists the policies of New.
var Names = []string{"standalone", "kv", "work", "cache-threshold", "variance", "thompson", "least-loaded", "power-of-two", "round-robin",
	"random"}

// Settings are the settings of all policies.
type Settings struct {
	policy.Settings
	Thompson thompson.Settings `embed:""`
}

// New returns the policy of that name. Its errors name the flag. Settings of other
// policies need to be valid, but have no effect.
func New(name string, settings Settings) (policy.Policy, error) {
	if err := settings.Validate(); err != nil {
		return nil, err
	}
	switch {
	case name == "thompson":
		return thompson.New(settings.Thompson)
	case !slices.Contains(Names, name):
		return nil, fmt.Errorf("unknown policy %q: choose one of %s", name, strings.Join(Names, ", "))
	}
	return policy.New(name, settings.Settings)
}
