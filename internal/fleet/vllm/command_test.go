package vllm

import (
	"io/fs"
	"slices"
	"strings"
	"testing"
)

func TestPluginFolderHoldsTheEntryPointsOfItsModules(t *testing.T) {
	var files []string
	err := fs.WalkDir(Engine().Plugin, "plugin", func(path string, d fs.DirEntry, err error) error {
		if !d.IsDir() {
			files = append(files, strings.TrimPrefix(path, "plugin/"))
		}
		return err
	})
	want := []string{"kvrouter_loopback.py", "kvrouter_nixl.py", "kvrouter_stats.dist-info/METADATA", "kvrouter_stats.dist-info/entry_points.txt", "kvrouter_stats.py", "kvrouter_tiers.py"}
	if err != nil || !slices.Equal(files, want) {
		t.Errorf("files %q, %v; want %q", files, err, want)
	}
}
