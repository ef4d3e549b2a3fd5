package process

import (
	"slices"
	"strconv"
	"strings"
)

// Flags reads an engine's arguments. It maps other spellings of flags, with dashes,
// to their names without dashes.
type Flags map[string]string

// Name returns the flag name of an argument in its long spelling, without leading
// dashes, value and the member of a JSON value (--flag.member); empty if the
// argument is not a flag.
func (f Flags) Name(arg string) string {
	name, _, _ := strings.Cut(arg, "=")
	name, _, _ = strings.Cut(name, ".")
	name = strings.ReplaceAll(name, "_", "-")
	if long, known := f[name]; known {
		return long
	}
	long, _ := strings.CutPrefix(name, "--")
	if long == name {
		return ""
	}
	return long
}

// Has reports whether the user set one of the flags.
func (f Flags) Has(args []string, names ...string) bool {
	return slices.ContainsFunc(args, func(arg string) bool {
		name := f.Name(arg)
		return name != "" && slices.Contains(names, name)
	})
}

// Value returns the last value of a flag, which is the one that an engine uses.
func (f Flags) Value(args []string, flag string) (value string, given bool) {
	for i, arg := range args {
		if f.Name(arg) != flag {
			continue
		}
		var inside bool
		if _, value, inside = strings.Cut(arg, "="); !inside && i+1 < len(args) {
			value = args[i+1]
		}
		given = true
	}
	return value, given
}

// Number returns the user's value of a flag; 0: none, or not a positive number.
func (f Flags) Number(args []string, flag string) int {
	value, _ := f.Value(args, flag)
	n, _ := strconv.Atoi(value)
	return max(0, n)
}

// Defaults returns the flags that the user did not set, as pairs of flag and value.
func (f Flags) Defaults(args []string, pairs ...string) (missing []string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if !f.Has(args, strings.TrimPrefix(pairs[i], "--")) {
			missing = append(missing, pairs[i], pairs[i+1])
		}
	}
	return missing
}
