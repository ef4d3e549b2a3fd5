package manual

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// page returns the manual page of section 1.
func page(app *kong.Application, version string) string {
	out := &strings.Builder{}
	program := app.Name
	name, _, _ := strings.Cut(strings.TrimPrefix(version, program+" "), " (")
	fmt.Fprintf(out, ".TH %s 1 \"\" \"%s %s\" \"User Commands\"\n.nh\n.ad l\n", strings.ToUpper(program), program, roff(name))
	summary, _, _ := strings.Cut(app.Help, ":")
	fmt.Fprintf(out, ".SH NAME\n%s \\- %s\n", program, roff(strings.TrimPrefix(summary, "A ")))
	fmt.Fprintf(out, ".SH SYNOPSIS\n.B %[1]s\n[\\fIcommand\\fR] [\\fIflags\\fR] [\\fB\\-\\-\\fR \\fIengine arguments\\fR]\n", program)
	fmt.Fprintf(out, ".SH DESCRIPTION\n%s\n", roff(app.Help))
	out.WriteString(".SH COMMANDS\n")
	for _, command := range app.Children {
		fmt.Fprintf(out, ".TP\n.B %s\n%s\n", roff(strings.Join(append([]string{command.Name}, arguments(command)...), " ")), roff(command.Help))
	}
	out.WriteString(".SH OPTIONS\nAll commands accept these flags; \\-\\-help after a command lists those that it uses.\n")
	flagGroups(out, app.Flags)
	for _, command := range app.Children {
		if len(command.Flags) > 0 {
			fmt.Fprintf(out, ".SH OPTIONS OF %s\n", strings.ToUpper(roff(command.Name)))
			flagGroups(out, command.Flags)
		}
	}
	out.WriteString(`.SH ENVIRONMENT
Each flag can also be set by the environment variable shown, or as a key in the YAML file of \fB\-\-config\fR: its name without dashes.
Precedence: command line, environment, file, default.
.SH EXIT STATUS
0 after SIGTERM or SIGINT, or when a command succeeds; 1 with one line on standard error if it fails.
.SH SIGNALS
.TP
.B SIGTERM
Shut down: report not ready, then let in-flight requests finish. A second signal exits immediately.
.TP
.B SIGHUP
Reload keys, TLS files, log level and busy thresholds.
`)
	return out.String()
}

// flagGroups writes flags under the titles of their groups, in the order of help.
func flagGroups(out *strings.Builder, flags []*kong.Flag) {
	title := ""
	for _, flag := range flags {
		if flag.Group != nil && flag.Group.Title != title {
			title = flag.Group.Title
			fmt.Fprintf(out, ".SS \"%s\"\n", roff(title))
		}
		fmt.Fprintf(out, ".TP\n%s\n%s\n", spelling(flag), roff(flag.Help))
		var more []string
		if flag.Default != "" && !flag.IsBool() {
			more = append(more, "Default: "+roff(flag.Default)+".")
		}
		if len(flag.Envs) > 0 {
			more = append(more, "Environment: \\fB"+roff(strings.Join(flag.Envs, ", "))+"\\fR.")
		}
		if len(more) > 0 {
			out.WriteString(strings.Join(more, "\n") + "\n")
		}
	}
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

// arguments returns what follows a command's name.
func arguments(command *kong.Command) []string {
	var all []string
	for _, argument := range command.Positional {
		if argument.Enum != "" {
			all = append(all, strings.Join(argument.EnumSlice(), "|"))
		} else {
			all = append(all, argument.Summary())
		}
	}
	return all
}

// roff returns text escaped for man.
func roff(text string) string {
	text = strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n", " ", `"`, `\(dq`).Replace(text)
	if strings.HasPrefix(text, ".") || strings.HasPrefix(text, "'") {
		return `\&` + text
	}
	return text
}
