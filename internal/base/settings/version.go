package settings

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
)

// Version returns the version of the build: the tag of the tree, else a pseudo-version of
// the commit's time and hash; "(devel)" or "unknown" if the build has neither.
func Version() string { return versionOf(debug.ReadBuildInfo()) }

func versionOf(info *debug.BuildInfo, ok bool) string {
	if !ok || info.Main.Version == "" {
		return "unknown"
	}
	return info.Main.Version
}

// Build returns one line of text: the version, then, where known, the commit, its
// date (UTC), the Go version and the platform.
func Build() string { return buildOf(debug.ReadBuildInfo()) }

func buildOf(info *debug.BuildInfo, ok bool) string {
	var known []string
	if ok {
		of := map[string]string{}
		for _, s := range info.Settings {
			of[s.Key] = s.Value
		}
		if commit := of["vcs.revision"]; commit != "" {
			if of["vcs.modified"] == "true" {
				commit += " with changes"
			}
			known = append(known, "commit "+commit)
		}
		if date := of["vcs.time"]; date != "" {
			known = append(known, date)
		}
	}
	known = append(known, runtime.Version(), runtime.GOOS+"/"+runtime.GOARCH)
	return fmt.Sprintf("%s (%s)", versionOf(info, ok), strings.Join(known, ", "))
}
