package settings

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
)

// CheckFiles returns an error if two flags name the same file, because one would
// overwrite the other. Only the cleaned paths are compared; empty names are ignored.
func CheckFiles(files map[string]string) error {
	whose := map[string]string{}
	for _, flag := range slices.Sorted(maps.Keys(files)) {
		if files[flag] == "" {
			continue
		}
		name := filepath.Clean(files[flag])
		if other, taken := whose[name]; taken {
			return fmt.Errorf("%s and %s both use %s: give each its own file", other, flag, files[flag])
		}
		whose[name] = flag
	}
	return nil
}
