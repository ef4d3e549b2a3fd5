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
	command, about := ctx.Selected(), ""
	if command == nil {
		command, about = ctx.Model.DefaultCmd, ctx.Model.Help
	}
	var text strings.Builder
	if h.topic == "" {
		h.printUsual(&text, ctx.Model, command, about)
	} else if err := h.printTopic(&text, command); err != nil {
		return err
	}
	_, err := io.WriteString(ctx.Stdout, strings.TrimPrefix(text.String(), "\n"))
	return err
}

// printUsual prints a command's short help; about is the text about the program, of
// which the help is then.
func (h *Help) printUsual(to *strings.Builder, app *kong.Application, command *kong.Node, about string) {
	line := app.Name + " " + command.Name
	if about != "" {
		line = app.Name + " [COMMAND]"
	}
	for _, argument := range command.Positional {
		line += " " + argument.Summary()
	}
	if len(command.Flags) > 0 {
		line += " [FLAGS]"
	}
	if about != "" {
		line += " [-- ENGINE ARGUMENTS]"
	} else {
		about = command.Help
	}
	fmt.Fprintf(to, "Usage: %s\n\n", line)
	for _, line := range wrap(about, helpWidth) {
		fmt.Fprintln(to, line)
	}

	var sections []section
	if about == app.Help {
		all := section{title: "Commands"}
		for _, child := range app.Children {
			all.rows = append(all.rows, row{usage(child), sentence(child.Help)})
		}
		sections = append(sections, all)
	}
	tasks, short := h.Usual[command.Name]
	for _, task := range tasks {
		s := section{title: task.Title}
		for _, name := range task.Flags {
			if i := slices.IndexFunc(command.Flags, func(f *kong.Flag) bool { return f.Name == name }); i >= 0 {
				s.rows = append(s.rows, row{flagUsage(command.Flags[i]), sentence(command.Flags[i].Help) + defaultOf(command.Flags[i])})
			}
		}
		sections = append(sections, s)
	}
	if !short {
		sections = append(sections, whole(groups(command.Flags))...)
	}
	printSections(to, sections)
	if !short {
		return
	}
	own := app.Name
	if about != app.Help {
		own += " " + command.Name
	}
	var topics []string
	for _, g := range groups(command.Flags) {
		topics = append(topics, topic(g.title))
	}
	fmt.Fprintf(to, "\nMore: %s --help=all, --help=FLAG, or --help=GROUP, where GROUP is one of\n", own)
	for _, line := range wrap(strings.Join(topics, ", ")+".", helpWidth-2) {
		fmt.Fprintln(to, "  "+line)
	}
	if about == app.Help {
		const rest = "%s COMMAND --help describes a command. Each flag is also an environment variable " +
			"(%s_ and the flag in capitals, _ for -) and a key of the file of --config."
		for _, line := range wrap(fmt.Sprintf(rest, app.Name, strings.ToUpper(app.Name)), helpWidth) {
			fmt.Fprintln(to, line)
		}
	}
}

// printTopic prints the flags of the topic.
func (h *Help) printTopic(to *strings.Builder, command *kong.Node) error {
	all := groups(command.Flags)
	if h.topic == everyFlag {
		printSections(to, whole(all))
		return nil
	}
	wanted := strings.ToLower(strings.TrimLeft(h.topic, "-"))
	named := func(match func(name, topic string) bool) []group {
		return slices.DeleteFunc(slices.Clone(all), func(g group) bool { return !match(topic(g.title), wanted) })
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
	if len(found) == 0 || wanted == "" {
		var topics []string
		for _, g := range all {
			topics = append(topics, topic(g.title))
		}
		return fmt.Errorf("--help=%s: %s has no such group or flag; the groups are %s", h.topic, command.Name, strings.Join(topics, ", "))
	}
	printSections(to, whole(found))
	return nil
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

// topic is the name of a group for --help.
func topic(title string) string { return strings.ReplaceAll(strings.ToLower(title), " ", "-") }

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
			for _, line := range wrap(r.text, helpWidth-left-4) {
				fmt.Fprintf(to, "  %-*s  %s\n", left, name, line)
				name = ""
			}
		}
	}
}

// wrap breaks a text into lines of at most width columns.
func wrap(text string, width int) (lines []string) {
	line := ""
	for word := range strings.FieldsSeq(text) {
		switch {
		case line == "":
			line = word
		case len(line)+1+len(word) > width:
			lines, line = append(lines, line), word
		default:
			line += " " + word
		}
	}
	return append(lines, line)
}
