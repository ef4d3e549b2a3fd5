package router

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"

	"kvrouter/internal/base/kv"
)

// VersionPolicy says which versions of the weights a request takes. The zero value is any.
type VersionPolicy struct {
	kind   versionKind
	least  string // versionLeast
	behind uint64 // versionBehind
}

type versionKind uint8

const (
	versionAny    versionKind = iota
	versionLeast              // that one and later ones
	versionBehind             // those that are at most so many behind the latest
)

// ParseVersionPolicy reads any, latest-only, min-version:V or max-staleness:N.
func ParseVersionPolicy(text string) (v VersionPolicy, err error) {
	name, value, _ := strings.Cut(text, ":")
	switch {
	case text == "" || text == "any":
		return v, nil
	case text == "latest-only":
		return VersionPolicy{kind: versionBehind}, nil
	case name == "min-version" && value != "" && len(value) <= kv.MaxVersion:
		return VersionPolicy{kind: versionLeast, least: value}, nil
	case name == "max-staleness":
		if n, err := strconv.ParseUint(value, 10, 32); err == nil {
			return VersionPolicy{kind: versionBehind, behind: n}, nil
		}
	}
	return v, fmt.Errorf("%.80q: want any, latest-only, min-version:VERSION or max-staleness:NUMBER", text)
}

// Restricts reports whether not every version is taken.
func (v VersionPolicy) Restricts() bool { return v.kind != versionAny }

// takes reports whether the policy takes a version where latest is the latest of all.
func (v VersionPolicy) takes(version, latest string) bool {
	switch v.kind {
	case versionLeast:
		return compareVersions(version, v.least) >= 0
	case versionBehind:
		at, last := versionNumber(version), versionNumber(latest)
		if n, err := strconv.ParseUint(at, 10, 64); v.behind > 0 && err == nil {
			if m, err := strconv.ParseUint(last, 10, 64); err == nil {
				return n >= m || m-n <= v.behind
			}
		}
		return compareVersions(version, latest) >= 0
	}
	return true
}

// versionNumber returns the number that ends a version, such as that of step-17, without zeros before it; empty: there is
// none.
func versionNumber(version string) string {
	digits := len(version)
	for digits > 0 && version[digits-1] >= '0' && version[digits-1] <= '9' {
		digits--
	}
	number := version[digits:]
	for len(number) > 1 && number[0] == '0' {
		number = number[1:]
	}
	return number
}

// compareVersions orders versions of weights by the number at their end; those without one come first, and an unknown
// one, which is empty, before all.
func compareVersions(a, b string) int {
	n, m := versionNumber(a), versionNumber(b)
	return cmp.Or(cmp.Compare(len(n), len(m)), cmp.Compare(n, m), cmp.Compare(min(len(a), 1), min(len(b), 1)))
}
