// Package manual generates shell completions and the man page from the command line's flags.
package manual

import (
	"cmp"
	"embed"
	"fmt"
	"slices"
	"strings"
	"text/template"

	"github.com/alecthomas/kong"
)

// Completion is a command that prints a shell completion script.
type Completion struct {
	Shell string `arg:"" enum:"bash,zsh,fish" help:"Shell: ${enum}."`
}

// AfterApply prints the completion and ends the parser.
func (c *Completion) AfterApply(app *kong.Kong) error {
	return end(app, c.Shell+".tmpl", app.Model)
}

// Page is a command that prints the manual page, in the language of man.
type Page struct{}

// AfterApply prints the page and ends the parser.
func (Page) AfterApply(app *kong.Kong, vars kong.Vars) error {
	version, _, _ := strings.Cut(strings.TrimPrefix(vars["version"], app.Model.Name+" "), " (")
	summary, _, _ := strings.Cut(app.Model.Help, ":")
	return end(app, "man.tmpl", struct {
		*kong.Application
		Version, Summary string
	}{app.Model, version, strings.TrimPrefix(summary, "A ")})
}

// texts are the scripts, for bash from version 4 on, zsh and fish from 3.2 on, and the
// page. The scripts ask for no other package.
//
//go:embed *.tmpl
var texts embed.FS

// end prints a text as the whole answer of a command.
func end(app *kong.Kong, name string, data any) error {
	text, err := template.New(name).Funcs(functions).ParseFS(texts, name)
	if err == nil {
		err = text.Execute(app.Stdout, data)
	}
	if err != nil {
		return fmt.Errorf("printing: %w", err)
	}
	app.Exit(0)
	return nil
}

// functions are those of the texts.
var functions = template.FuncMap{
	"everyOption": everyOption, "others": others, "own": Own, "shared": Shared, "options": options, "sentence": sentence, "spelling": spelling, "usage": usage, "usedBy": usedBy,
	"roff": roff, "upper": strings.ToUpper,
	"zshQuote":  strings.NewReplacer("'", "'\\''", "[", `\[`, "]", `\]`, ":", `\:`).Replace,
	"fishQuote": strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace,
	"join":      func(separator string, words []string) string { return strings.Join(words, separator) },
	"names": func(commands []*kong.Command) (names []string) {
		for _, command := range commands {
			names = append(names, command.Name)
		}
		return names
	},
	"spellings": spellings,
	"words": func(command *kong.Command) []string {
		return append(usedBy(command), spellings(options(command.Flags))...)
	},
	"paths": func(all []option) []option { return without(all, func(o option) bool { return !o.File }) },
	"free": func(all []option) []option {
		return without(all, func(o option) bool { return !o.Takes || o.File || len(o.Values) > 0 })
	},
}

// option is one spelling of a flag.
type option struct {
	Name   string   // with its dashes
	Short  bool     // of one letter
	Help   string   // its first sentence
	Takes  bool     // a value follows
	Values []string // that it may be; none: any
	File   bool     // the value is the path of a file or folder
}

// options returns every spelling of the flags that are shown.
func options(flags []*kong.Flag) []option {
	var all []option
	for _, flag := range flags {
		if flag.Hidden {
			continue
		}
		o := option{Name: "--" + flag.Name, Help: sentence(flag.Help), Takes: !flag.IsBool(), File: takesPath(flag)}
		if flag.Enum != "" {
			o.Values = flag.EnumSlice()
		}
		all = append(all, o)
		if flag.Short != 0 {
			o.Name, o.Short = "-"+string(flag.Short), true
			all = append(all, o)
		}
		if flag.Tag.Negatable != "" {
			all = append(all, option{Name: "--no-" + flag.Name, Help: "Not --" + flag.Name})
		}
	}
	return all
}

// everyOption returns the options of the program and of its commands, each once.
func everyOption(app *kong.Application) []option {
	all := options(app.Flags)
	for _, command := range app.Children {
		for _, o := range options(command.Flags) {
			if !slices.ContainsFunc(all, func(known option) bool { return known.Name == o.Name }) {
				all = append(all, o)
			}
		}
	}
	return all
}

// Own returns the shown flags of a command that the default command does not have, by
// group.
func Own(app *kong.Application, command *kong.Command) (own []*kong.Flag) {
	for _, g := range groups(command.Flags) {
		own = append(own, slices.DeleteFunc(g.flags, func(f *kong.Flag) bool { return isShared(app, command, f) })...)
	}
	return own
}

// Shared returns the names of the shown flags that a command has as the default command
// has them.
func Shared(app *kong.Application, command *kong.Command) (names []string) {
	for _, flag := range command.Flags {
		if !flag.Hidden && isShared(app, command, flag) {
			names = append(names, flag.Name)
		}
	}
	return names
}

// isShared reports whether the default command, which is another, has the same flag.
func isShared(app *kong.Application, command *kong.Command, flag *kong.Flag) bool {
	return app.DefaultCmd != nil && app.DefaultCmd != command && slices.ContainsFunc(app.DefaultCmd.Flags, func(f *kong.Flag) bool {
		return f.Name == flag.Name && f.Help == flag.Help && f.Default == flag.Default
	})
}

// others returns the names of the commands that are not the default one.
func others(app *kong.Application) (names []string) {
	for _, command := range app.Children {
		if command != app.DefaultCmd {
			names = append(names, command.Name)
		}
	}
	return names
}

// without returns the options that drop does not report.
func without(all []option, drop func(option) bool) []option {
	return slices.DeleteFunc(slices.Clone(all), drop)
}

// spellings returns the names of options.
func spellings(all []option) (names []string) {
	for _, o := range all {
		names = append(names, o.Name)
	}
	return names
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
	if at := strings.LastIndex(help, " ("); at > strings.LastIndex(help, ")") { // what was cut is in it
		help = help[:at]
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

// usage returns a command's name and what follows it.
func usage(command *kong.Command) string {
	text := command.Name
	for _, argument := range command.Positional {
		if argument.Enum != "" {
			text += " " + strings.Join(argument.EnumSlice(), "|")
		} else {
			text += " " + argument.Summary()
		}
	}
	return text
}

// spelling is how the page writes a flag, in bold, and its value.
func spelling(flag *kong.Flag) string {
	name := "--" + flag.Name
	if flag.Tag.Negatable != "" {
		name = "--[no-]" + flag.Name
	}
	text := "\\fB" + roff(name) + "\\fR"
	if flag.Short != 0 {
		text = "\\fB\\-" + string(flag.Short) + "\\fR, " + text
	}
	if !flag.IsBool() {
		value := cmp.Or(flag.PlaceHolder, "VALUE")
		if flag.PlaceHolder == "" && flag.Enum != "" {
			value = strings.Trim(strings.Join(flag.EnumSlice(), "|"), "|")
		}
		text += " \\fI" + roff(value) + "\\fR"
	}
	return text
}

// roff returns text escaped for man.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n", " ", `"`, `\(dq`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		return `\&` + text
	}
	return text
}
