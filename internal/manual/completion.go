package manual

import (
	"fmt"
	"strings"

	"github.com/alecthomas/kong"
)

// bash returns a script for bash, from version 4 on. It requires no other package.
func bash(app *kong.Application) string {
	out := &strings.Builder{}
	program := app.Name
	fmt.Fprintf(out, "# bash completion for %[1]s: source it, or put it into /usr/share/bash-completion/completions/%[1]s\n", program)
	fmt.Fprintf(out, "_%s() {\n", program)
	out.WriteString(`  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command="" at
  COMPREPLY=()
  for ((at = 1; at < COMP_CWORD; at++)); do
    [[ ${COMP_WORDS[at]} != -- ]] || return 0
`)
	fmt.Fprintf(out, "    case ${COMP_WORDS[at]} in\n      %s) command=${COMP_WORDS[at]} ;;\n    esac\n  done\n", strings.Join(names(app.Children), " | "))
	out.WriteString(`  if [[ $word == = ]]; then # bash cuts words at =
    word=""
  elif [[ $before == = ]]; then
    before=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  case $before in
`)
	all := everyOption(app)
	for _, o := range all {
		if len(o.values) > 0 {
			fmt.Fprintf(out, "    %s) mapfile -t COMPREPLY < <(compgen -W '%s' -- \"$word\") && return 0 ;;\n", o.name, strings.Join(o.values, " "))
		}
	}
	arm := func(keep func(option) bool, body string) {
		var found []string
		for _, o := range all {
			if keep(o) {
				found = append(found, o.name)
			}
		}
		if len(found) > 0 {
			fmt.Fprintf(out, "    %s) %s ;;\n", strings.Join(found, " | "), body)
		}
	}
	arm(func(o option) bool { return o.file }, `compopt -o filenames 2>/dev/null; mapfile -t COMPREPLY < <(compgen -f -- "$word") && return 0`)
	arm(func(o option) bool { return o.takes && !o.file && len(o.values) == 0 }, "return 0")
	out.WriteString("  esac\n  local words\n  case $command in\n")
	spell := func(options []option) string {
		var words []string
		for _, o := range options {
			words = append(words, o.name)
		}
		return strings.Join(words, " ")
	}
	for _, command := range app.Children {
		if own := append(usedBy(command), spell(options(command.Flags))); strings.TrimSpace(strings.Join(own, " ")) != "" {
			fmt.Fprintf(out, "    %s) words='%s' ;;\n", command.Name, strings.TrimSpace(strings.Join(own, " ")))
		}
	}
	fmt.Fprintf(out, "    \"\") words='%s' ;;\n  esac\n", strings.Join(names(app.Children), " "))
	fmt.Fprintf(out, "  mapfile -t COMPREPLY < <(compgen -W \"${words-} %s\" -- \"$word\")\n}\ncomplete -F _%s %s\n", spell(options(app.Flags)), program, program)
	return out.String()
}

// zsh returns a script for zsh's completion system.
func zsh(app *kong.Application) string {
	out := &strings.Builder{}
	program := app.Name
	fmt.Fprintf(out, "#compdef %[1]s\n# zsh completion for %[1]s: put it into a folder of $fpath as _%[1]s, or source it after compinit\n_%[1]s() {\n", program)
	escape := strings.NewReplacer("'", "'\\''", "[", `\[`, "]", `\]`, ":", `\:`)
	lines := func(flags []*kong.Flag) string {
		var found []string
		for _, o := range options(flags) {
			spec := fmt.Sprintf("'*%s[%s]", o.name, escape.Replace(o.help))
			if o.takes {
				joint := "=" // between name and value, where they are one word
				if !strings.HasPrefix(o.name, "--") {
					joint = "+"
				}
				spec = fmt.Sprintf("'*%s%s[%s]:value:%s", o.name, joint, escape.Replace(o.help), zshValues(o))
			}
			found = append(found, "    "+spec+"'\n")
		}
		return strings.Join(found, "")
	}
	fmt.Fprintf(out, "  local -a every own commands\n  every=(\n%s  )\n  commands=(\n", lines(app.Flags))
	for _, command := range app.Children {
		fmt.Fprintf(out, "    '%s:%s'\n", command.Name, escape.Replace(sentence(command.Help)))
	}
	out.WriteString("  )\n  (( ${words[(I)--]} && ${words[(I)--]} < CURRENT )) && return 1\n  local at command\n  for at in ${words[2,CURRENT-1]}; do\n    case $at in\n")
	fmt.Fprintf(out, "      (%s) command=$at ;;\n    esac\n  done\n  case $command in\n", strings.Join(names(app.Children), "|"))
	for _, command := range app.Children {
		fmt.Fprintf(out, "    (%s) own=(\n%s", command.Name, lines(command.Flags))
		if words := usedBy(command); len(words) > 0 {
			fmt.Fprintf(out, "    '*:argument:(%s)'\n", strings.Join(words, " "))
		} else {
			fmt.Fprintf(out, "    '*: :'\n")
		}
		out.WriteString("    ) ;;\n")
	}
	fmt.Fprintf(out, "    (*) own=('*: :{_describe command commands}') ;;\n  esac\n  _arguments $every $own\n}\nif [[ $funcstack[1] == _%[1]s ]]; then _%[1]s \"$@\"; else compdef _%[1]s %[1]s; fi\n", program)
	return out.String()
}

// zshValues is zsh's action for the value of an option.
func zshValues(o option) string {
	switch {
	case len(o.values) > 0:
		return "(" + strings.Join(o.values, " ") + ")"
	case o.file:
		return "_files"
	}
	return " "
}

// fish returns a script for fish.
func fish(app *kong.Application) string {
	out := &strings.Builder{}
	program := app.Name
	fmt.Fprintf(out, "# fish completion for %[1]s: put it into ~/.config/fish/completions/%[1]s.fish\ncomplete -c %[1]s -f\n", program)
	escape := strings.NewReplacer(`\`, `\\`, "'", `\'`)
	all := strings.Join(names(app.Children), " ")
	for _, command := range app.Children {
		fmt.Fprintf(out, "complete -c %s -n 'not __fish_seen_subcommand_from %s' -a %s -d '%s'\n", program, all, command.Name, escape.Replace(sentence(command.Help)))
		if words := usedBy(command); len(words) > 0 {
			fmt.Fprintf(out, "complete -c %s -n '__fish_seen_subcommand_from %s' -a '%s'\n", program, command.Name, strings.Join(words, " "))
		}
	}
	lines := func(condition string, flags []*kong.Flag) {
		for _, o := range options(flags) {
			spelling := "-l " + strings.TrimPrefix(o.name, "--")
			if !strings.HasPrefix(o.name, "--") {
				spelling = "-s " + strings.TrimPrefix(o.name, "-")
			}
			fmt.Fprintf(out, "complete -c %s%s %s -d '%s'", program, condition, spelling, escape.Replace(o.help))
			switch {
			case len(o.values) > 0:
				fmt.Fprintf(out, " -x -a '%s'", strings.Join(o.values, " "))
			case o.file:
				out.WriteString(" -r -F")
			case o.takes:
				out.WriteString(" -x")
			}
			out.WriteByte('\n')
		}
	}
	lines("", app.Flags)
	for _, command := range app.Children {
		lines(" -n '__fish_seen_subcommand_from "+command.Name+"'", command.Flags)
	}
	return out.String()
}

// everyOption returns the options of the program and of its commands, each once.
func everyOption(app *kong.Application) []option {
	all := options(app.Flags)
	seen := map[string]bool{}
	for _, o := range all {
		seen[o.name] = true
	}
	for _, command := range app.Children {
		for _, o := range options(command.Flags) {
			if !seen[o.name] {
				seen[o.name] = true
				all = append(all, o)
			}
		}
	}
	return all
}

// names returns the names of commands.
func names(commands []*kong.Command) []string {
	var all []string
	for _, command := range commands {
		all = append(all, command.Name)
	}
	return all
}
