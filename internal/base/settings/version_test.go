package settings

import (
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
)

func TestABuildTellsVersionCommitAndDate(t *testing.T) {
	platform := runtime.Version() + ", " + runtime.GOOS + "/" + runtime.GOARCH + ")"
	of := func(version string, settings ...string) *debug.BuildInfo {
		info := &debug.BuildInfo{}
		info.Main.Version = version
		for _, s := range settings {
			key, value, _ := strings.Cut(s, "=")
			info.Settings = append(info.Settings, debug.BuildSetting{Key: key, Value: value})
		}
		return info
	}
	for _, test := range []struct {
		name           string
		info           *debug.BuildInfo
		ok             bool
		version, build string
	}{
		{"a tag", of("v1.2.0", "vcs.revision=abc", "vcs.time=2026-11-22T16:47:12Z", "vcs.modified=false"), true, "v1.2.0", "v1.2.0 (commit abc, 2026-11-22T16:47:12Z, "},
		{"a changed tree", of("v1.2.0+dirty", "vcs.revision=abc", "vcs.modified=true"), true, "v1.2.0+dirty", "v1.2.0+dirty (commit abc with changes, "},
		{"no repository", of("(devel)"), true, "(devel)", "(devel) ("},
		{"no version", of(""), true, "unknown", "unknown ("},
		{"nothing", nil, false, "unknown", "unknown ("},
	} {
		if got := versionOf(test.info, test.ok); got != test.version {
			t.Errorf("%s: version %q, want %q", test.name, got, test.version)
		}
		if got := buildOf(test.info, test.ok); got != test.build+platform {
			t.Errorf("%s: build %q, want %q", test.name, got, test.build+platform)
		}
	}
}
