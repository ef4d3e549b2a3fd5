// Package manual generates shell completions and the man page from the command line's flags.
package manual

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// Completion is a command that prints a shell completion script.
type Completion struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"Shell: ${enum}."`
}

// AfterApply prints the completion and ends the parser.
func (c *Completion) AfterApply(app *kong.Kong) error {
	write := map[string]func(*kong.Application) string{"bash": bash, "zsh": zsh, "fish": fish}[c.Shell]
	return end(app, write(app.Model))
}

// Page is a command that prints the manual page, in the language of man.
type Page struct{}

// AfterApply prints the page and ends the parser.
func (Page) AfterApply(app *kong.Kong, vars kong.Vars) error {
	return end(app, page(app.Model, vars["version"]))
}

// end prints text as the whole answer of a command.
func end(app *kong.Kong, text string) error {
	if _, err := fmt.Fprint(app.Stdout, text); err != nil {
		return fmt.Errorf("printing: %w", err)
	}
	app.Exit(0)
	return nil
}

// option is one spelling of a flag.
type option struct {
	name   string   // with its dashes
	help   string   // its first sentence
	takes  bool     // a value follows
	values []string // that it may be; none: any
	file   bool     // the value is the path of a file or folder
}

// options returns every spelling of the flags that are shown.
func options(flags []*kong.Flag) []option {
	var all []option
	for _, flag := range flags {
		o := option{name: "--" + flag.Name, help: sentence(flag.Help), takes: !flag.IsBool(), file: takesPath(flag)}
		if flag.Enum != "" {
			o.values = flag.EnumSlice()
		}
		all = append(all, o)
		if flag.Short != 0 {
			o.name = "-" + string(flag.Short)
			all = append(all, o)
		}
		if flag.Tag.Negatable != "" {
			all = append(all, option{name: "--no-" + flag.Name, help: "Not --" + flag.Name})
		}
	}
	return all
}

// takesPath reports, from a flag's placeholder, whether its value is a path.
func takesPath(flag *kong.Flag) bool {
	for word := range strings.SplitSeq(flag.PlaceHolder, "|") {
		if word == "FILE" || word == "DIR" || word == "PATH" {
			return true
		}
	}
	return false
}

// sentence returns the first sentence of a flag's help, or the part before its colon: the
// list that follows one is too long for a menu.
func sentence(help string) string {
	for _, end := range []string{". ", ": ", "; "} {
		if first, _, found := strings.Cut(help, end); found {
			help = first
		}
	}
	return strings.TrimSuffix(help, ".")
}

// usedBy returns the words that a command takes after its name.
func usedBy(command *kong.Command) []string {
	for _, argument := range command.Positional {
		if argument.Enum != "" {
			return argument.EnumSlice()
		}
	}
	return nil
}
