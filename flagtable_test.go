package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// tableFlag is a flag as a table tells of it.
type tableFlag struct {
	where, spelling string // spelling has [no-] where the table has
	told            string // the default
	noDefaults      bool   // the table has no column for them
}

var (
	tableName = regexp.MustCompile("`--((?:\\[no-\\])?[a-z0-9.-]+)")
	prose     = regexp.MustCompile("^$|^none$| ") // tells how a default is found, or that there is none
)

// flagTables reads the tables of a document whose first column is "flag". The
// rows of several flags have as many defaults, or one that all share.
func flagTables(t *testing.T, name string) (flags []tableFlag) {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	inside, noDefaults := false, false
	for number, line := range strings.Split(string(text), "\n") {
		cells := strings.Split(line, "|")
		if len(cells) < 4 {
			inside = false
			continue
		}
		first, second := strings.TrimSpace(cells[1]), strings.TrimSpace(cells[2])
		if first == "flag" {
			inside, noDefaults = true, second != "default"
			continue
		}
		names := tableName.FindAllStringSubmatch(first, -1)
		if !inside || strings.HasPrefix(first, "---") {
			continue
		}
		where := fmt.Sprintf("%s:%d", name, number+1)
		defaults := []string{second}
		if several := strings.Split(strings.ReplaceAll(second, " and ", ", "), ", "); len(several) == len(names) {
			defaults = several
		}
		for i, match := range names {
			flags = append(flags, tableFlag{where, match[1], strings.Trim(defaults[min(i, len(defaults)-1)], "`"), noDefaults})
		}
	}
	return flags
}

func TestEveryFlagIsInATableWithItsDefault(t *testing.T) {
	var c cli
	parser, err := kong.New(&c, kong.Vars{"policies": ""})
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]tableFlag{}
	for _, row := range append(flagTables(t, "README.md"), flagTables(t, "docs/operations.md")...) {
		name := strings.TrimPrefix(row.spelling, "[no-]")
		if other, twice := rows[name]; twice {
			t.Errorf("%s: --%s is in %s already", row.where, name, other.where)
		}
		rows[name] = row
	}
	for _, flag := range parser.Model.Flags {
		if flag.Name == "help" {
			continue
		}
		row, told := rows[flag.Name]
		delete(rows, flag.Name)
		if !told {
			t.Errorf("--%s (%s) is in no table of flags, neither README.md's nor docs/operations.md's", flag.Name, flag.Help)
			continue
		}
		spelling := flag.Name
		if flag.Tag.Negatable != "" {
			spelling = "[no-]" + spelling
		}
		if row.spelling != spelling {
			t.Errorf("%s: --%s is told of as --%s", row.where, spelling, row.spelling)
		}
		want := flag.Default
		if flag.IsBool() {
			want = map[string]string{"true": "on", "false": "off", "": "off"}[flag.Default]
		}
		switch {
		case row.noDefaults, row.told == want:
		case want == "" && (row.told == "off" || prose.MatchString(row.told)):
		case want == "off" && row.told == "":
		default:
			t.Errorf("%s: --%s has the default %q, and the table %q", row.where, spelling, want, row.told)
		}
	}
	for name, row := range rows {
		t.Errorf("%s: there is no flag --%s", row.where, name)
	}
}
