package main

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/alecthomas/kong"

	"kvrouter/internal/base/manual"
)

var update = flag.Bool("update", false, "write the pages of docs/ that are generated")

const flagsPage = "docs/flags.md"

const flagsIntro = `# Flags

Each command has its own flags. ` + "`" + `kvrouter` + "`" + ` without a command is ` + "`" + `kvrouter serve` + "`" + `; other commands take their flags after their name.

- Each flag is also an environment variable, ` + "`" + `KVROUTER_` + "`" + ` and the flag in capitals with ` + "`" + `_` + "`" + ` for ` + "`" + `-` + "`" + ` and ` + "`" + `.` + "`" + ` (` + "`" + `--kv-p2p` + "`" + `: ` + "`" + `KVROUTER_KV_P2P` + "`" + `), and a key of the YAML file of ` + "`" + `--config` + "`" + `: its name without dashes. The command line overrides the environment, the environment overrides the file, and the file overrides the default.
- A file for ` + "`" + `serve` + "`" + ` can be given to the other commands, which read the keys that they have.
- Boolean flags take no value; ` + "`" + `[no-]` + "`" + ` means that ` + "`" + `--no-...` + "`" + ` disables them.
- — means no default, or a default described in the meaning.
- ` + "`" + `--help` + "`" + ` prints the most needed flags of a command, ` + "`" + `--help=all` + "`" + ` all, ` + "`" + `--help=GROUP` + "`" + ` or ` + "`" + `--help=FLAG` + "`" + ` some; ` + "`" + `--version` + "`" + ` prints the version. Arguments after ` + "`" + `--` + "`" + ` go to every started engine.

This page is generated: ` + "`" + `go test -run TestFlagsPage -update .` + "`" + `
`

// modelOfFlags returns the commands with their flags.
func modelOfFlags(t *testing.T) *kong.Application {
	t.Helper()
	parser, err := newParser(new(cli), new(manual.Help))
	if err != nil {
		t.Fatal(err)
	}
	return parser.Model
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

// pageOf returns the how-to page of a flag that is hidden, the first that names it.
func pageOf(t *testing.T, flag *kong.Flag) string {
	t.Helper()
	paths, _ := filepath.Glob("docs/*.md")
	for _, path := range paths {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if path != flagsPage && path != "docs/benchmarks.md" && path != "docs/migrate.md" && regexp.MustCompile(`--`+flag.Name+`\b[^-]`).Match(text) {
			return filepath.Base(path)
		}
	}
	t.Errorf("no page names the hidden flag --%s", flag.Name)
	return ""
}

// writeFlags writes the section of a command: the flags that serve has not, by group, and
// the names of those that serve has.
func writeFlags(t *testing.T, page *strings.Builder, app *kong.Application, command *kong.Node) {
	t.Helper()
	fmt.Fprintf(page, "\n## %s\n\n%s\n", command.Name, command.Help)
	if shared := manual.Shared(app, command); len(shared) == len(manual.Own(app, app.DefaultCmd)) {
		page.WriteString("\nIt has all flags of `serve`, and these:\n")
	} else if len(shared) > 0 {
		fmt.Fprintf(page, "\nIt has these flags of `serve`: `--%s`.\n", strings.Join(shared, "`, `--"))
	}
	escape := strings.NewReplacer("|", `\|`, "*", `\*`)
	title := ""
	for _, flag := range manual.Own(app, command) {
		if flag.Group.Title != title {
			title = flag.Group.Title
			fmt.Fprintf(page, "\n### %s\n\n| flag | default | meaning |\n|---|---|---|\n", title)
		}
		name := flagSpelling(flag)
		if flag.PlaceHolder != "" {
			name += " " + strings.ReplaceAll(flag.PlaceHolder, "|", `\|`)
		}
		fmt.Fprintf(page, "| `%s` | %s | %s |\n", name, flagDefault(flag), escape.Replace(flag.Help))
	}
	if command != app.DefaultCmd {
		return
	}
	page.WriteString("\n### Rarely needed\n\nThese are not in the help:\n\n")
	for _, flag := range command.Flags {
		if flag.Hidden {
			fmt.Fprintf(page, "- `%s`, default %s: [%s](%s)\n", flagSpelling(flag), flagDefault(flag), pageOf(t, flag), pageOf(t, flag))
		}
	}
}

// TestFlagsPage holds docs/flags.md against the flags.
func TestFlagsPage(t *testing.T) {
	app := modelOfFlags(t)
	page := &strings.Builder{}
	page.WriteString(flagsIntro)
	for _, command := range app.Children {
		if len(command.Flags) > 0 {
			writeFlags(t, page, app, command)
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

// TestEveryFlagIsOnThePageWithItsDefault reads the page as a reader does, without what
// TestFlagsPage makes it from.
func TestEveryFlagIsOnThePageWithItsDefault(t *testing.T) {
	text, err := os.ReadFile(flagsPage)
	if err != nil {
		t.Fatal(err)
	}
	app := modelOfFlags(t)
	row := regexp.MustCompile("(?m)^(?:\\||-) `--((?:\\[no-\\])?)([a-z0-9.-]+)[^`]*`(?: \\||, default) ([^|]*?)(?: \\| .+ \\||: \\[.+)$")
	type spelling struct{ negatable, value string }
	sections := map[string]map[string]spelling{}
	for _, section := range strings.Split(string(text), "\n## ")[1:] {
		name, _, _ := strings.Cut(section, "\n")
		rows := map[string]spelling{}
		for _, match := range row.FindAllStringSubmatch(section, -1) {
			if _, twice := rows[match[2]]; twice {
				t.Errorf("--%s of %s is documented twice", match[2], name)
			}
			rows[match[2]] = spelling{match[1], strings.Trim(match[3], "`")}
		}
		if lines := strings.Count(section, "\n| `--") + strings.Count(section, "\n- `--"); lines != len(rows) {
			t.Errorf("%d rows of %s begin with a flag, but %d have the expected format", lines, name, len(rows))
		}
		sections[name] = rows
	}
	const mostOfServe = 150
	if rows := strings.Count(strings.Split(string(text), "\n## ")[1], "\n| `--"); rows > mostOfServe {
		t.Errorf("serve has %d rows, more than %d: hide rarely needed flags", rows, mostOfServe)
	}
	for _, command := range app.Children {
		rows := sections[command.Name]
		for _, flag := range command.Flags {
			row, found := rows[flag.Name]
			delete(rows, flag.Name)
			if !found {
				if _, of := sections["serve"][flag.Name]; command == app.DefaultCmd || !of && !slices.Contains(manual.Shared(app, command), flag.Name) && !flag.Hidden {
					t.Errorf("--%s of %s (%s) is in no table of %s", flag.Name, command.Name, flag.Help, flagsPage)
				}
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
			t.Errorf("%s has no flag --%s", command.Name, name)
		}
	}
}

// TestShellsAndManKnowEveryFlagAndCommand holds what `kvrouter completion` and
// `kvrouter man` print against the command line that parses.
func TestShellsAndManKnowEveryFlagAndCommand(t *testing.T) {
	app := modelOfFlags(t)
	for args, spelled := range map[string]string{"completion bash": "--%s", "completion zsh": "*--%s", "completion fish": "-l %s ", "man": "--%s"} {
		text, _ := helpOf(t, strings.Fields(args)...)
		text = strings.ReplaceAll(text, `\-`, "-")
		text = strings.ReplaceAll(text, "--[no-]", "--")
		for _, node := range append(app.Children, app.Node) {
			if node != app.Node && !regexp.MustCompile(`\b`+node.Name+`\b`).MatchString(text) {
				t.Errorf("%s has no command %s", args, node.Name)
			}
			for _, flag := range node.Flags {
				if strings.Contains(text, fmt.Sprintf(spelled, flag.Name)) == flag.Hidden {
					t.Errorf("%s has flag %s: %t, which is hidden: %t", args, flag.Name, !flag.Hidden, flag.Hidden)
				}
			}
		}
	}
}

// textsOfPages returns the pages by path.
func textsOfPages(t *testing.T) map[string]string {
	t.Helper()
	pages := map[string]string{}
	for _, pattern := range []string{"*.md", "docs/*.md", "deploy/*.md", "testdata/*/*.md"} {
		paths, _ := filepath.Glob(pattern)
		for _, path := range paths {
			text, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			pages[path] = string(text)
		}
	}
	return pages
}

// TestLinksOfThePages follows every link between pages: to a file, and to a heading
// of that page if it has an anchor.
func TestLinksOfThePages(t *testing.T) {
	pages, anchors, links := map[string]string{}, map[string]map[string]bool{}, 0
	heading, dropped := regexp.MustCompile(`(?m)^#+ (.+)$`), regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
	for path, text := range textsOfPages(t) {
		pages[path] = regexp.MustCompile("(?s)```.*?```").ReplaceAllString(text, "")
		anchors[path] = map[string]bool{"": true}
		for _, match := range heading.FindAllStringSubmatch(pages[path], -1) {
			anchors[path][strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(match[1]), ""), " ", "-")] = true
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

// plainValue is a value as a page or a default writes it, in ms or bytes: 5 s, 64 MiB, 65,536.
func plainValue(text string) string {
	match := regexp.MustCompile(`^([\d.,]+) ?([a-zA-Z/]*)$`).FindStringSubmatch(text)
	units := map[string]float64{"": 1, "ms": 1, "s": 1e3, "m": 60e3, "h": 3600e3, "MB/s": 1e6, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
	if match == nil || units[match[2]] == 0 {
		return ""
	}
	number, err := strconv.ParseFloat(strings.ReplaceAll(match[1], ",", ""), 64)
	if err != nil {
		return ""
	}
	return strconv.FormatFloat(number*units[match[2]], 'f', -1, 64)
}

// TestDefaultsInThePages holds each `--flag` (value) of a page, and the table of ports, against
// the defaults of the flags.
func TestDefaultsInThePages(t *testing.T) {
	defaults := map[string]string{}
	for _, command := range modelOfFlags(t).Children {
		for _, flag := range command.Flags {
			if _, of := defaults[flag.Name]; !of { // serve is the first
				defaults[flag.Name] = plainValue(flag.Default)
			}
		}
	}
	found := 0
	hold := func(path, flag, written string) {
		want, known := defaults[flag]
		if value := plainValue(written); value == "" || known && want == "" { // no value; computed at the start
			return
		} else if found++; value != want {
			t.Errorf("%s has %s for --%s; its default is %q", path, written, flag, want)
		}
	}
	for path, text := range textsOfPages(t) {
		for _, match := range regexp.MustCompile("`--([a-z0-9.-]+)` \\(([^;)]+)[;)]").FindAllStringSubmatch(text, -1) {
			if path != "SECURITY.md" { // it gives statuses
				hold(path, match[1], match[2])
			}
		}
		for _, match := range regexp.MustCompile("(?m)^\\| (\\d{4})(?: \\+ i)? \\| `--([a-z0-9-]+)`[^+|]*\\|").FindAllStringSubmatch(text, -1) {
			hold(path, match[2], match[1])
		}
	}
	if found < 40 {
		t.Errorf("only %d defaults found", found)
	}
}

// TestCommandsInThePages looks up the flags of every kvrouter command of a page, and every
// target of make.
func TestCommandsInThePages(t *testing.T) {
	makefile, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	app, commands, targets := modelOfFlags(t), 0, 0
	flags := map[string]string{}
	for _, command := range app.Children {
		for _, flag := range command.Flags {
			flags[command.Name] += " --" + flag.Name + " --no-" + flag.Name + " "
		}
	}
	for path, text := range textsOfPages(t) {
		text = strings.ReplaceAll(text, "\\\n", " ")
		for _, match := range regexp.MustCompile("(?m)(?:^|[`\"])make ([a-z][a-z-]+)").FindAllStringSubmatch(text, -1) {
			if targets++; !strings.Contains(string(makefile), "\n"+match[1]+":") {
				t.Errorf("%s: make has no target %s", path, match[1])
			}
		}
		for _, match := range regexp.MustCompile("(?m)(?:^|[`;] ?)(?:kvrouter|go run \\.) ([^\\n`#|]+)").FindAllStringSubmatch(text, -1) {
			line, _, _ := strings.Cut(match[1], " -- ")
			name, _, _ := strings.Cut(line, " ")
			if flags[name] == "" {
				name = "serve"
			}
			commands++
			for _, flag := range regexp.MustCompile(`(?:^|\s)(--[a-z][a-z0-9.-]+)`).FindAllStringSubmatch(line, -1) {
				if !strings.Contains(flags[name], " "+flag[1]+" ") && flag[1] != "--help" && flag[1] != "--version" {
					t.Errorf("%s: %s has no %s: %s", path, name, flag[1], match[0])
				}
			}
		}
	}
	if commands < 100 || targets < 80 {
		t.Errorf("only %d commands and %d targets found", commands, targets)
	}
}
