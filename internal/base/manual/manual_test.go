package manual

import (
	"bytes"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// fruit is a command line with one of each: a choice, a file, a switch with its
// contrary, a short name, a command's own flag, and text that is hard to quote.
type fruit struct {
	Kind  string `group:"Trees" default:"apple" enum:"apple,pear" help:"What to pick: ${enum}. It's [ripe] \\ \"now\"."`
	List  string `group:"Trees" placeholder:"FILE" help:".hidden list: of 'trees'"`
	Count int    `group:"Trees" short:"n" help:"How many."`
	Wash  bool   `group:"After" default:"true" negatable:"" help:"Wash them."`

	Pick struct {
		Ladder int    `group:"Trees" help:"How high. In meters."`
		Thief  bool   `group:"Trees" hidden:"" help:"Not yours."`
		Sort   string `group:"Kinds of apple" default:"all" help:"Which: all or one."`
		Wax    bool   `group:"Kinds of apple" default:"true" negatable:"" help:"Wax it."`
	} `cmd:"" default:"withargs" help:"Pick it."`
	Pack struct {
		Box string `placeholder:"DIR" help:"Into what."`
	} `cmd:"" help:"Pack what's picked: all of it."`
	Completion Completion `cmd:"" help:"Complete."`
	Man        Page       `cmd:"" help:"Explain."`
}

// printed returns what the command line prints, which must end the parser with 0.
func printed(t *testing.T, args ...string) string {
	t.Helper()
	help := &Help{Usual: map[string][]Task{"pick": {{Title: "Climb", Flags: []string{"ladder"}}}}}
	var out bytes.Buffer
	ended := -1
	parser, err := kong.New(new(fruit), kong.Name("fruit"), kong.Description("A picker of fruit: it picks."), kong.DefaultEnvars("FRUIT"), kong.Help(help.Print),
		kong.Vars{"version": "fruit v1.2 (commit x)"}, kong.Writers(&out, &out), kong.Exit(func(code int) { ended = code }))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := parser.Parse(help.Take(args)); err != nil && ended < 0 {
		t.Fatal(err)
	}
	if ended != 0 {
		t.Fatalf("%v ended with %d", args, ended)
	}
	return out.String()
}

// program returns the path of a program that only some machines have.
func program(t *testing.T, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Skip(name + " is not installed")
	}
	return path
}

// said runs a program over input.
func said(t *testing.T, input, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), program(t, name), args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.Output()
	var failed *exec.ExitError
	if errors.As(err, &failed) {
		t.Fatalf("%s: %v: %s%s", name, err, out, failed.Stderr)
	}
	if err != nil {
		t.Fatal(err)
	}
	return string(out)
}

// needsVersion skips a test where a program is older than the completion is written for.
func needsVersion(t *testing.T, name string, major, minor int) {
	t.Helper()
	text := said(t, "", name, "--version")
	var has [2]int
	if at := strings.IndexAny(text, "0123456789"); at < 0 {
		t.Skipf("%s tells no version: %q", name, text)
	} else if _, err := fmt.Sscanf(text[at:], "%d.%d", &has[0], &has[1]); err != nil {
		t.Skipf("%s tells no version: %q", name, text)
	}
	if slices.Compare(has[:], []int{major, minor}) < 0 {
		t.Skipf("%s %d.%d is too old", name, has[0], has[1])
	}
}

func TestBashCompletes(t *testing.T) {
	needsVersion(t, "bash", 4, 0)
	script := printed(t, "completion", "bash")
	for _, test := range []struct{ name, words, want string }{
		{"commands and flags", "fruit ''", "pick pack completion man --ladder --sort --wax --no-wax --help -h --kind --list --count -n --wash --no-wash"},
		{"the start of a command", "fruit pa", "pack"},
		{"the start of a flag", "fruit --k", "--kind"},
		{"a command's own flag", "fruit pack --b", "--box"},
		{"the default command's flag", "fruit --la", "--ladder"},
		{"its flag after its name", "fruit pick --la", "--ladder"},
		{"its flag after another name", "fruit pack --la", ""},
		{"a hidden flag", "fruit --th", ""},
		{"no other command's flag", "fruit pick --b", ""},
		{"a choice", "fruit --kind ''", "apple pear"},
		{"a choice after =", "fruit --kind = p", "pear"},
		{"a choice after a bare =", "fruit --kind =", "apple pear"},
		{"an argument", "fruit completion z", "zsh"},
		{"a file", "fruit --list manual.g", "manual.go"},
		{"a folder of a command", "fruit pack --box manual.g", "manual.go"},
		{"a number", "fruit --count ''", ""},
		{"a number by its short name", "fruit -n ''", ""},
		{"the engine's arguments", "fruit -- --k", ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			input := script + "\nCOMP_WORDS=(" + test.words + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _fruit; echo ${COMPREPLY[*]}\n"
			if got := strings.TrimSpace(said(t, input, "bash", "-u")); got != test.want {
				t.Errorf("got %q, want %q", got, test.want)
			}
		})
	}
}

func TestZshTakesItsCompletion(t *testing.T) {
	script := printed(t, "completion", "zsh")
	said(t, script, "zsh", "-n")
	if got := said(t, "compdef() { print -r -- $* }\n"+script, "zsh", "-f"); got != "_fruit fruit\n" {
		t.Errorf("sourced it says %q", got)
	}
	// Every word that _arguments is given, as zsh reads it.
	specs := said(t, "compdef() { :; }\n_arguments() { print -rl -- $* }\n"+script+"\nwords=(fruit pack --); CURRENT=3; _fruit\n", "zsh", "-f")
	for _, want := range []string{
		`*--kind=[What to pick]:value:(apple pear)`, `*--list=[.hidden list]:value:_files`, `*-n+[How many]:value: `,
		`*--wash[Wash them]`, `*--no-wash[Not --wash]`, `*--box=[Into what]:value:_files`,
	} {
		if !strings.Contains(specs, want+"\n") {
			t.Errorf("%q is not among\n%s", want, specs)
		}
	}
}

func TestFishCompletes(t *testing.T) {
	needsVersion(t, "fish", 3, 2)
	script := printed(t, "completion", "fish")
	for _, test := range []struct{ line, want string }{
		{"fruit pa", "pack\tPack what's picked"},
		{"fruit --k", "--kind\tWhat to pick"},
		{"fruit --kind ", "apple\tWhat to pick\npear\tWhat to pick"},
		{"fruit pack --b", "--box\tInto what"},
		{"fruit --la", "--ladder\tHow high"},
		{"fruit pick --la", "--ladder\tHow high"},
		{"fruit pack --la", ""},
		{"fruit --th", ""},
		{"fruit pick --b", ""},
		{"fruit completion z", "zsh"},
	} {
		got := said(t, script+"\ncomplete -C '"+test.line+"'\n", "fish", "--no-config")
		if got = strings.TrimSpace(got); got != test.want {
			t.Errorf("%s: got %q, want %q", test.line, got, test.want)
		}
	}
}

func TestTheManualPageReadsAsItStands(t *testing.T) {
	text := printed(t, "man")
	for _, want := range []string{
		`.TH FRUIT 1 "" "fruit v1.2" "User Commands"`, `fruit \- picker of fruit`, "\\fB\\-\\-kind\\fR \\fIapple|pear\\fR", "\\fB\\-\\-[no\\-]wash\\fR",
		"\\fB\\-n\\fR, \\fB\\-\\-count\\fR", "\n\\&.hidden list", "FRUIT_ and the flag in capitals", ".B completion bash|zsh|fish", ".SH OPTIONS OF PICK\nThey may be given without the command.", ".SH OPTIONS OF PACK",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in\n%s", want, text)
		}
	}
	cmd := exec.CommandContext(t.Context(), program(t, "groff"), "-man", "-Tutf8", "-ww", "-P-c")
	cmd.Stdin = strings.NewReader(text)
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	shown, err := cmd.Output()
	if err != nil || complaints.Len() > 0 {
		t.Errorf("groff: %v: %s", err, complaints.String())
	}
	if !strings.Contains(string(shown), `It's [ripe] \ "now".`) {
		t.Errorf("shown as\n%s", shown)
	}
}
