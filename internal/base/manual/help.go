package manual

import (
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/alecthomas/kong"
)

// Help prints the help of a command line: with --help the flags of a command that most
// people need, with --help=TOPIC those of a group, one flag or those whose name contains
// the topic, with --help=all every flag.
type Help struct {
	// Usual are the flags that most people need, by command. The help of a command that
	// is not there shows all its flags.
	Usual map[string][]Task
	topic string
}

// Task is a heading of the help and its flags, by name.
type Task struct {
	Title string
	Flags []string
}

const (
	everyFlag = "all"
	helpWidth = 100 // columns
	leastLeft = 20  // columns of names
	mostLeft  = 24
)

// Take returns arguments with --help in the place of --help=TOPIC, which kong does not
// know, and keeps the topic.
func (h *Help) Take(args []string) []string {
	args = slices.Clone(args)
	for i, arg := range args {
		if topic, is := strings.CutPrefix(arg, "--help="); is {
			h.topic, args[i] = topic, "--help"
		}
	}
	return args
}

// row is a line of a table: a name and its explanation.
type row struct{ name, text string }

// section is a table under a heading.
type section struct {
	title string
	rows  []row
}

// Print prints the help of the command that was given; without one, that of the program
// and its default command. It is a kong.HelpPrinter.
func (h *Help) Print(_ kong.HelpOptions, ctx *kong.Context) error {
	app, command := ctx.Model, ctx.Selected()
	var to strings.Builder
	switch {
	case h.topic != "":
		if command == nil {
			command = app.DefaultCmd
		}
		sections, err := h.sections(command)
		if err != nil {
			return err
		}
		printSections(&to, sections)
	case command == nil:
		all := section{title: "Commands"}
		for _, child := range app.Children {
			all.rows = append(all.rows, row{usage(child), sentence(child.Help)})
		}
		_, arguments, _ := strings.Cut(usage(app.DefaultCmd), " ")
		words := strings.Join(strings.Fields("[command] "+arguments+" [flags] [-- engine arguments]"), " ")
		fmt.Fprintf(&to, "Usage: %s %s\n\n%s\n", app.Name, words, wrap(app.Help, helpWidth))
		h.printUsual(&to, app.Name, app.DefaultCmd, all)
		rest := fmt.Sprintf("%s COMMAND --help describes a command. Each flag is also an environment variable "+
			"(%s_ and the flag in capitals, _ for -) and a key of the file of --config.", app.Name, strings.ToUpper(app.Name))
		fmt.Fprintln(&to, wrap(rest, helpWidth))
	default:
		fmt.Fprintf(&to, "Usage: %s %s\n\n%s\n", app.Name, command.Summary(), wrap(command.Help, helpWidth))
		h.printUsual(&to, command.FullPath(), command)
	}
	_, err := io.WriteString(ctx.Stdout, strings.TrimPrefix(to.String(), "\n"))
	return err
}

// printUsual prints the flags of a command that most people need, after other sections.
// path are the words before the flags.
func (h *Help) printUsual(to *strings.Builder, path string, command *kong.Command, sections ...section) {
	tasks, short := h.Usual[command.Name]
	if !short {
		printSections(to, whole(groups(command.Flags)))
		return
	}
	for _, task := range tasks {
		s := section{title: task.Title}
		for _, name := range task.Flags {
			for _, flag := range command.Flags {
				if flag.Name == name {
					s.rows = append(s.rows, row{flagUsage(flag), sentence(flag.Help) + defaultOf(flag)})
				}
			}
		}
		sections = append(sections, s)
	}
	printSections(to, sections)
	fmt.Fprintf(to, "\nMore: %s --help=all, --help=FLAG, or --help=GROUP, where GROUP is one of\n", path)
	fmt.Fprintln(to, wrap(topics(command.Flags)+".", helpWidth))
}

// sections returns the flags of the topic.
func (h *Help) sections(command *kong.Command) ([]section, error) {
	all := groups(command.Flags)
	if h.topic == everyFlag {
		return whole(all), nil
	}
	wanted := strings.ToLower(strings.TrimLeft(h.topic, "-"))
	named := func(match func(name, topic string) bool) []group {
		return slices.DeleteFunc(slices.Clone(all), func(g group) bool { return !match(g.topic(), wanted) })
	}
	found := named(func(name, topic string) bool { return name == topic })
	if i := slices.IndexFunc(command.Flags, func(f *kong.Flag) bool { return f.Name == wanted }); len(found) == 0 && i >= 0 {
		found = []group{{titleOf(command.Flags[i]), command.Flags[i : i+1]}} // a hidden one, too
	}
	if len(found) == 0 {
		found = named(strings.HasPrefix)
	}
	if len(found) == 0 {
		found = groups(slices.DeleteFunc(slices.Clone(command.Flags), func(f *kong.Flag) bool { return !strings.Contains(f.Name, wanted) }))
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("--help=%s: %s has no such group or flag; the groups are %s", h.topic, command.Name, topics(command.Flags))
	}
	return whole(found), nil
}

// group is the shown flags of one group.
type group struct {
	title string
	flags []*kong.Flag
}

// groups returns the flags that are shown, by group, in the order of the first of each.
func groups(flags []*kong.Flag) (all []group) {
	for _, flag := range flags {
		if flag.Hidden {
			continue
		}
		i := slices.IndexFunc(all, func(g group) bool { return g.title == titleOf(flag) })
		if i < 0 {
			i, all = len(all), append(all, group{title: titleOf(flag)})
		}
		all[i].flags = append(all[i].flags, flag)
	}
	return all
}

// titleOf is the title of a flag's group.
func titleOf(flag *kong.Flag) string {
	if flag.Group == nil {
		return "Flags"
	}
	return flag.Group.Title
}

// topic is the group's name for --help.
func (g group) topic() string { return strings.ReplaceAll(strings.ToLower(g.title), " ", "-") }

// topics are the names of the groups of flags for --help.
func topics(flags []*kong.Flag) string {
	var names []string
	for _, g := range groups(flags) {
		names = append(names, g.topic())
	}
	return strings.Join(names, ", ")
}

// whole returns groups with the whole help of each flag.
func whole(groups []group) (sections []section) {
	for _, g := range groups {
		s := section{title: g.title}
		for _, flag := range g.flags {
			s.rows = append(s.rows, row{flagUsage(flag), flag.Help + defaultOf(flag)})
		}
		sections = append(sections, s)
	}
	return sections
}

// flagUsage is how the help writes a flag and its value.
func flagUsage(flag *kong.Flag) string {
	name := "--" + flag.Name
	if flag.Tag.Negatable != "" {
		name = "--[no-]" + flag.Name
	}
	if flag.IsBool() {
		return name
	}
	return name + " " + placeholder(flag)
}

// placeholder is what stands for a flag's value.
func placeholder(flag *kong.Flag) string {
	switch {
	case flag.PlaceHolder != "":
		return flag.PlaceHolder
	case flag.Enum != "":
		return strings.Trim(strings.Join(flag.EnumSlice(), "|"), "|")
	case flag.Target.Type() == reflect.TypeFor[time.Duration]():
		return "TIME"
	case flag.Target.CanInt() || flag.Target.CanUint():
		return "N"
	case flag.Target.CanFloat():
		return "NUMBER"
	}
	return "TEXT"
}

// defaultOf is how the help writes a flag's default.
func defaultOf(flag *kong.Flag) string {
	switch {
	case flag.IsBool() && flag.Default == "true":
		return " [on]"
	case flag.IsBool() || flag.Default == "":
		return ""
	}
	return " [" + flag.Default + "]"
}

// printSections prints tables whose columns are aligned.
func printSections(to *strings.Builder, sections []section) {
	left := leastLeft
	for _, s := range sections {
		for _, r := range s.rows {
			if len(r.name) <= mostLeft {
				left = max(left, len(r.name))
			}
		}
	}
	for _, s := range sections {
		fmt.Fprintf(to, "\n%s\n", s.title)
		for _, r := range s.rows {
			name := r.name
			if len(name) > left {
				fmt.Fprintf(to, "  %s\n", name)
				name = ""
			}
			for line := range strings.SplitSeq(wrap(r.text, helpWidth-left-4), "\n") {
				fmt.Fprintf(to, "  %-*s  %s\n", left, name, line)
				name = ""
			}
		}
	}
}

// wrap breaks a text into lines of at most width columns.
func wrap(text string, width int) string {
	var wrapped strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case column == 0:
		case column+1+len(word) > width:
			wrapped.WriteByte('\n')
			column = 0
		default:
			wrapped.WriteByte(' ')
			column++
		}
		wrapped.WriteString(word)
		column += len(word)
	}
	return wrapped.String()
}
