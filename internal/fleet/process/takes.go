package process

import (
	"context"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

// lookForFlags prints which of the flags, named without dashes, the modules about arguments of a Python
// package do not have, as an option or as the field of a dataclass. Such a module, or a folder of it, has
// "arg" in its name. It does not import the package.
const lookForFlags = `import importlib.util, os, re, sys
text = ""
for root in importlib.util.find_spec(sys.argv[1]).submodule_search_locations:
    for folder, _, files in os.walk(root):
        for name in files:
            path = os.path.join(folder, name)
            if "arg" in os.path.relpath(path, root) and name.endswith(".py"):
                with open(path, encoding="utf-8", errors="replace") as file:
                    text += file.read()
for flag in sys.argv[2:] if text else ():
    if not re.search(r"(?<![\w-])(--%s|%s)(?![\w-])" % (flag, flag.replace("-", "_")), text):
        print(flag)
`

// Untaken returns which of the flags, named without dashes, the engine that a Python has does not take: those
// of newer versions. Where the engine cannot be examined, it returns none.
func Untaken(python, module string, flags []string) []string {
	untaken := strings.Fields(string(ask(python, append([]string{lookForFlags, module}, flags...)...)))
	return slices.DeleteFunc(untaken, func(flag string) bool { return !slices.Contains(flags, flag) })
}

// Source returns a file of the package that a Python has, named below its folder; empty: there is none.
func Source(python, module, file string) []byte {
	return ask(python, `import importlib.util, os, sys
with open(os.path.join(*importlib.util.find_spec(sys.argv[1]).submodule_search_locations, sys.argv[2]), "rb") as file:
    sys.stdout.buffer.write(file.read())
`, module, file)
}

// ask returns what a Python program prints; empty where it fails.
func ask(python string, program ...string) []byte {
	ctx, cancel := context.WithTimeout(context.Background(), askLimit)
	defer cancel()
	out, err := exec.CommandContext(ctx, python, append([]string{"-c"}, program...)...).Output()
	if err != nil {
		return nil
	}
	return out
}

// isValue matches an argument that is not a flag.
var isValue = regexp.MustCompile(`^([^-]|-\d|$)`)

// Taken returns the arguments without the flags of Untaken, and without their values.
func (s Settings) Taken(argv []string) (taken []string) {
	for i, out := 0, false; i < len(argv); i++ {
		if !isValue.MatchString(argv[i]) {
			out = slices.Contains(s.Untaken, strings.TrimPrefix(argv[i], "--"))
		}
		if !out {
			taken = append(taken, argv[i])
		}
	}
	return taken
}
