package process

import (
	"slices"
	"strconv"
	"strings"
)

// Flags reads an engine's arguments. It maps other spellings of flags, with their
// dashes, to the names that they mean, without.
type Flags map[string]string

// Name returns the name of the flag that an argument is, without dashes, value and
// the member of a JSON value (--flag.member), in the long spelling with dashes;
// empty if it is none.
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

// Value returns the value of a flag, of several the last, which is the one that an
// engine takes.
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

// Number returns the value that the user gave a flag; 0: none, or no number above
// it.
func (f Flags) Number(args []string, flag string) int {
	value, _ := f.Value(args, flag)
	n, _ := strconv.Atoi(value)
	return max(0, n)
}

// Defaults returns the flags and their values, one after the other in pairs, that
// the user did not give.
func (f Flags) Defaults(args []string, pairs ...string) (missing []string) {
	for i := 0; i+1 < len(pairs); i += 2 {
		if !f.Has(args, strings.TrimPrefix(pairs[i], "--")) {
			missing = append(missing, pairs[i], pairs[i+1])
		}
	}
	return missing
}
