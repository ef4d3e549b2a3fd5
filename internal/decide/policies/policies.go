// Package policies creates routing policies by name.
package policies

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/thompson"
)

// Names lists the policies of this project.
var Names = []string{"standalone", "kv", "work", "cache-threshold", "variance", "thompson", "least-loaded", "power-of-two", "round-robin",
	"random"}

// own are the policies of Register, which adds to them before the program starts.
var own []ownPolicy

type ownPolicy struct {
	name string
	make func() policy.Policy
}

// ownName is the form of a name that Register takes.
var ownName = regexp.MustCompile(`^[a-z][a-z0-9]*(-[a-z0-9]+)*$`)

// Register adds a policy, which make makes. It is to be called before the program starts, and
// panics if the name is taken or has another form.
func Register(name string, make func() policy.Policy) {
	if !ownName.MatchString(name) {
		panic(fmt.Sprintf("policy %q: give it a name of lower-case letters, digits and hyphens, such as my-policy", name))
	}
	if slices.Contains(All(), name) || Canonical(name) != name {
		panic(fmt.Sprintf("policy %q: there is one of that name, give it another", name))
	}
	own = append(own, ownPolicy{name, make})
}

// All lists the policies of New.
func All() []string {
	all := slices.Clone(Names)
	for _, p := range own {
		all = append(all, p.name)
	}
	return all
}

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
	if hyphened := strings.ReplaceAll(name, "_", "-"); slices.Contains(All(), hyphened) {
		return hyphened
	} else if hyphened == "cache-aware" {
		return "work"
	}
	return name
}

// unknown returns the error about a name that is not in All.
func unknown(name string) error {
	hyphened, all := strings.ReplaceAll(name, "_", "-"), All()
	if nearest := cmp.Or(foreign[hyphened], settings.Nearest(hyphened, all)); nearest != "" {
		return fmt.Errorf("unknown policy %q: the nearest is %s; the policies are %s", name, nearest, strings.Join(all, ", "))
	}
	return fmt.Errorf("unknown policy %q: choose one of %s", name, strings.Join(all, ", "))
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
	if i := slices.IndexFunc(own, func(p ownPolicy) bool { return p.name == name }); i >= 0 {
		return own[i].make(), nil
	}
	switch {
	case name == "thompson":
		return thompson.New(of.Thompson)
	case !slices.Contains(Names, name):
		return nil, unknown(name)
	}
	return policy.New(name, of.Settings)
}
