// Package policies creates routing policies by name.
package policies

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/thompson"
)

// Names lists the policies of New.
var Names = []string{"standalone", "kv", "work", "cache-threshold", "variance", "thompson", "least-loaded", "power-of-two", "round-robin",
	"random"}

// foreign is what comes nearest to policies of other routers.
var foreign = map[string]string{
	"bucket": "work, which weighs the uncached length of each prompt", "prefix-hash": "work", "kv-aware": "work", "kvaware": "work",
	"prefixaware": "work", "loadaware": "work", "consistent-hash": sticky, "consistent-hashing": sticky, "rendezvous-hash": sticky, "manual": sticky,
	"session": sticky, "sticky-least-loaded": sticky,
}

const sticky = "work with --session-header NAME, which keeps the requests of a session on one worker"

// Canonical returns the name of New for a policy's name as other routers write it:
// round_robin, power_of_two, and cache_aware for the default.
func Canonical(name string) string {
	if hyphened := strings.ReplaceAll(name, "_", "-"); slices.Contains(Names, hyphened) {
		return hyphened
	} else if hyphened == "cache-aware" {
		return "work"
	}
	return name
}

// unknown returns the error about a name that is not in Names.
func unknown(name string) error {
	hyphened := strings.ReplaceAll(name, "_", "-")
	if nearest := cmp.Or(foreign[hyphened], settings.Nearest(hyphened, Names)); nearest != "" {
		return fmt.Errorf("unknown policy %q: the nearest is %s; the policies are %s", name, nearest, strings.Join(Names, ", "))
	}
	return fmt.Errorf("unknown policy %q: choose one of %s", name, strings.Join(Names, ", "))
}

// Settings are the settings of all policies.
type Settings struct {
	policy.Settings
	Thompson thompson.Settings `embed:""`
}

// New returns the policy of that name. Its errors name the flag. Settings of other
// policies need to be valid, but have no effect.
func New(name string, of Settings) (policy.Policy, error) {
	if err := of.Validate(); err != nil {
		return nil, err
	}
	switch {
	case name == "thompson":
		return thompson.New(of.Thompson)
	case !slices.Contains(Names, name):
		return nil, unknown(name)
	}
	return policy.New(name, of.Settings)
}
