package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

var update = flag.Bool("update", false, "write the pages of docs/ that are generated")

const flagsPage = "docs/flags.md"

const flagsIntro = `# Flags

Each flag is also an environment variable and a key of the YAML file of ` + "`" + `--config` + "`" + ` (the flag's name without its dashes). The command line overrides the environment, the environment overrides the file, and the file overrides the default.

- The last column lists the commands that use the flag. Other commands ignore it, or refuse it with a reason.
- ` + "`" + `doctor` + "`" + ` reads all flags of ` + "`" + `serve` + "`" + `.
- Flags used by ` + "`" + `simulate` + "`" + `, ` + "`" + `replay-events` + "`" + `, ` + "`" + `top` + "`" + `, ` + "`" + `batch` + "`" + ` or ` + "`" + `doctor` + "`" + ` only are given after that word; the file has no keys for them.
- Boolean flags take no value; ` + "`" + `[no-]` + "`" + ` means that ` + "`" + `--no-...` + "`" + ` disables them.
- — means no default, or a default described in the meaning.
- ` + "`" + `--help` + "`" + ` and ` + "`" + `--version` + "`" + ` print their text and exit. Arguments after ` + "`" + `--` + "`" + ` go to every started engine.

This page is generated: ` + "`" + `go test -run TestFlagsPage -update .` + "`" + `
`

// flagGroup is one table of the page of flags.
type flagGroup struct {
	title string
	flags []*kong.Flag
}

// flagGroups returns all flags but --help and --version by group, in the order
// of help: first those that all commands parse, then those of one alone.
func flagGroups(t *testing.T) (groups []*flagGroup, of map[*kong.Flag][]string) {
	t.Helper()
	of = map[*kong.Flag][]string{}
	add := func(title string, flag *kong.Flag, commands ...string) {
		if flag.Group != nil {
			title = flag.Group.Title
		}
		i := slices.IndexFunc(groups, func(g *flagGroup) bool { return g.title == title })
		if i < 0 {
			i = len(groups)
			groups = append(groups, &flagGroup{title: title})
		}
		groups[i].flags = append(groups[i].flags, flag)
		of[flag] = commands
	}
	parser, err := newParser(new(cli))
	if err != nil {
		t.Fatal(err)
	}
	for _, flag := range parser.Model.Flags {
		if flag.Name == "help" || flag.Name == "version" {
			continue
		}
		var commands []string
		for _, command := range []string{CommandServe, CommandSimulate, CommandReplay, CommandTop, CommandBatch} {
			if takesFlag(command, flag) {
				commands = append(commands, command)
			}
		}
		add("", flag, commands...)
	}
	for _, command := range parser.Model.Children {
		for _, flag := range command.Flags {
			add("Simulation", flag, command.Name)
		}
	}
	return groups, of
}

// flagSpelling is how the page writes a flag.
func flagSpelling(flag *kong.Flag) string {
	if flag.Tag.Negatable != "" {
		return "--[no-]" + flag.Name
	}
	return "--" + flag.Name
}

// flagDefault is how the page writes a flag's default.
func flagDefault(flag *kong.Flag) string {
	switch {
	case flag.Target.Kind() == reflect.Pointer && flag.Default == "":
		return "—"
	case flag.IsBool() && flag.Default == "true":
		return "on"
	case flag.IsBool():
		return "off"
	case flag.Default == "":
		return "—"
	}
	return "`" + flag.Default + "`"
}

// TestFlagsPage holds docs/flags.md against the flags.
func TestFlagsPage(t *testing.T) {
	groups, commands := flagGroups(t)
	page := &strings.Builder{}
	page.WriteString(flagsIntro)
	escape := strings.NewReplacer("|", `\|`, "*", `\*`)
	for _, group := range groups {
		fmt.Fprintf(page, "\n## %s\n\n| flag | default | environment variable | meaning | command |\n|---|---|---|---|---|\n", group.title)
		for _, flag := range group.flags {
			name := flagSpelling(flag)
			if flag.PlaceHolder != "" {
				name += " " + strings.ReplaceAll(flag.PlaceHolder, "|", `\|`)
			}
			fmt.Fprintf(page, "| `%s` | %s | `%s` | %s | %s |\n", name, flagDefault(flag), strings.Join(flag.Envs, "`, `"), escape.Replace(flag.Help), strings.Join(commands[flag], ", "))
		}
	}
	if *update {
		if err := os.WriteFile(flagsPage, []byte(page.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	written, err := os.ReadFile(flagsPage)
	if err != nil {
		t.Fatal(err)
	}
	if string(written) != page.String() {
		t.Errorf("%s differs from the flags: run go test -run TestFlagsPage -update .", flagsPage)
	}
}

// TestEveryFlagIsInATableWithItsDefault reads the page as a reader does, without
// what TestFlagsPage makes it from.
func TestEveryFlagIsInATableWithItsDefault(t *testing.T) {
	text, err := os.ReadFile(flagsPage)
	if err != nil {
		t.Fatal(err)
	}
	row := regexp.MustCompile("(?m)^\\| `--((?:\\[no-\\])?)([a-z0-9.-]+)[^`]*` \\| ([^|]*) \\| `KVROUTER_[A-Z0-9_]+` \\| .+ \\| ((?:replay-events|top|batch|doctor|(?:serve|simulate|serve, simulate)(?:, replay-events)?(?:, top)?(?:, batch)?)) \\|$")
	type spelling struct{ negatable, value string }
	rows := map[string]spelling{}
	for _, match := range row.FindAllStringSubmatch(string(text), -1) {
		name := match[2]
		if !strings.Contains(match[4], CommandServe) { // commands may have flags of the same name
			name += " of " + match[4]
		}
		if _, twice := rows[name]; twice {
			t.Errorf("--%s is documented twice", name)
		}
		rows[name] = spelling{match[1], strings.Trim(match[3], "`")}
	}
	if lines := strings.Count(string(text), "\n| `--"); lines != len(rows) {
		t.Errorf("%d rows begin with a flag, but %d have the expected format", lines, len(rows))
	}
	parser, err := newParser(new(cli))
	if err != nil {
		t.Fatal(err)
	}
	flags := map[string]*kong.Flag{}
	for _, flag := range parser.Model.Flags {
		flags[flag.Name] = flag
	}
	for _, command := range parser.Model.Children {
		for _, flag := range command.Flags {
			flags[flag.Name+" of "+command.Name] = flag
		}
	}
	for name, flag := range flags {
		if flag.Name == "help" || flag.Name == "version" {
			continue
		}
		row, found := rows[name]
		delete(rows, name)
		if !found {
			t.Errorf("--%s (%s) is in no table of %s", name, flag.Help, flagsPage)
			continue
		}
		want := spelling{value: flag.Default}
		if flag.Tag.Negatable != "" {
			want.negatable = "[no-]"
		}
		if flag.IsBool() && flag.Target.Kind() != reflect.Pointer {
			want.value = map[string]string{"true": "on", "false": "off", "": "off"}[flag.Default]
		}
		if want.value == "" {
			want.value = "—"
		}
		if row != want {
			t.Errorf("--%s is documented as %q, want %q", flag.Name, row, want)
		}
	}
	for name := range rows {
		t.Errorf("there is no flag --%s", name)
	}
}

// TestShellsAndManKnowEveryFlagAndCommand holds what `kvrouter completion` and
// `kvrouter man` print against the command line that parses.
func TestShellsAndManKnowEveryFlagAndCommand(t *testing.T) {
	parser, err := newParser(new(cli))
	if err != nil {
		t.Fatal(err)
	}
	for args, spelled := range map[string]string{"completion bash": "--%s", "completion zsh": "*--%s", "completion fish": "-l %s ", "man": "--%s"} {
		text, _ := helpOf(t, strings.Fields(args)...)
		text = strings.ReplaceAll(text, `\-`, "-")
		text = strings.ReplaceAll(text, "--[no-]", "--")
		for _, node := range append(parser.Model.Children, parser.Model.Node) {
			if node != parser.Model.Node && !regexp.MustCompile(`\b`+node.Name+`\b`).MatchString(text) {
				t.Errorf("%s has no command %s", args, node.Name)
			}
			for _, flag := range node.Flags {
				if !strings.Contains(text, fmt.Sprintf(spelled, flag.Name)) {
					t.Errorf("%s has no flag %s", args, flag.Name)
				}
			}
		}
	}
}

// TestLinksOfThePages follows every link between pages: to a file, and to a heading
// of that page if it has an anchor.
func TestLinksOfThePages(t *testing.T) {
	pages, anchors, links := map[string]string{}, map[string]map[string]bool{}, 0
	heading, dropped := regexp.MustCompile(`(?m)^#+ (.+)$`), regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "testdata/*/*.md"} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			pages[path] = regexp.MustCompile("(?s)```.*?```").ReplaceAllString(string(text), "")
			anchors[path] = map[string]bool{"": true}
			for _, match := range heading.FindAllStringSubmatch(pages[path], -1) {
				anchors[path][strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(match[1]), ""), " ", "-")] = true
			}
		}
	}
	for path, text := range pages {
		for _, match := range regexp.MustCompile(`\]\(([^)#:\s]*)#?([^):\s]*)\)`).FindAllStringSubmatch(text, -1) {
			target := path
			if links++; match[1] != "" {
				target = filepath.Join(filepath.Dir(path), match[1])
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s: %v", path, err)
			} else if match[2] != "" && !anchors[target][match[2]] {
				t.Errorf("%s: %s has no heading #%s", path, target, match[2])
			}
		}
	}
	if links < 200 {
		t.Errorf("only %d links found", links)
	}
}

// TestTestsNamedByThePagesExist holds what SECURITY.md says to prove.
func TestTestsNamedByThePagesExist(t *testing.T) {
	page, err := os.ReadFile("SECURITY.md")
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	err = filepath.WalkDir(".", func(path string, _ os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, match := range declared.FindAllSubmatch(text, -1) {
			known[string(match[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, match := range regexp.MustCompile("`(Test\\w+)`").FindAllSubmatch(page, -1) {
		if name := string(match[1]); !known[name] {
			t.Errorf("SECURITY.md names %s, which does not exist", name)
		}
	}
}
