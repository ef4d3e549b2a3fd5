package manual

import (
	"slices"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

func TestHelpShowsWhatMostPeopleNeed(t *testing.T) {
	const want = `Usage: fruit [command] [flags] [-- engine arguments]

A picker of fruit: it picks.

Commands
  pick                      Pick it
  pack                      Pack what's picked
  completion bash|zsh|fish  Complete
  man                       Explain

Climb
  --ladder N                How high

More: fruit --help=all, --help=FLAG, or --help=GROUP, where GROUP is one of
trees, kinds-of-apple.
fruit COMMAND --help describes a command. Each flag is also an environment variable (FRUIT_ and the
flag in capitals, _ for -) and a key of the file of --config.
`
	if got := printed(t, "--help"); got != want {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if got := printed(t, "pick", "--help"); strings.Contains(got, "Commands") || !strings.HasPrefix(got, "Usage: fruit pick [flags]\n\nPick it.\n\nClimb\n") {
		t.Error(got)
	}
	if got := printed(t, "pack", "--help"); got != "Usage: fruit pack [flags]\n\nPack what's picked: all of it.\n\nFlags\n  --box DIR             Into what.\n" {
		t.Error(got)
	}
}

func TestHelpOfATopicShowsItsFlags(t *testing.T) {
	for topic, want := range map[string]string{
		"all": "ladder sort wax", "trees": "ladder", "tree": "ladder", "kinds-of-apple": "sort wax", "Kinds": "sort wax",
		"sort": "sort", "--sort": "sort", "ort": "sort", "thief": "thief", "a": "ladder wax",
	} {
		var got []string
		for line := range strings.Lines(printed(t, "--help="+topic)) {
			if _, name, is := strings.Cut(line, "  --"); is {
				name, _, _ = strings.Cut(strings.TrimPrefix(name, "[no-]"), " ")
				got = append(got, strings.TrimPrefix(strings.TrimSpace(name), "[no-]"))
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("--help=%s shows %q, want %q", topic, got, want)
		}
	}
	parser, err := kong.New(new(fruit), kong.Vars{"version": ""})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := (&Help{topic: "pear"}).sections(parser.Model.DefaultCmd); err == nil || err.Error() != "--help=pear: pick has no such group or flag; the groups are trees, kinds-of-apple" {
		t.Error(err)
	}
}

func TestCommandsShareFlagsThatAreTheSame(t *testing.T) {
	type flags struct {
		Same  int `default:"1" help:"S."`
		Other int `default:"1" help:"O."`
	}
	var app struct {
		First flags `cmd:"" default:"withargs"`
		Next  struct {
			Same  int `default:"1" help:"S."`
			Other int `default:"2" help:"O."`
		} `cmd:""`
	}
	parser, err := kong.New(&app)
	if err != nil {
		t.Fatal(err)
	}
	next := parser.Model.Children[1]
	if own := Own(parser.Model, next); !slices.Equal(Shared(parser.Model, next), []string{"same"}) || len(own) != 1 || own[0].Name != "other" {
		t.Errorf("%v are shared", Shared(parser.Model, next))
	}
	if first := parser.Model.Children[0]; len(Own(parser.Model, first)) != 2 || Shared(parser.Model, first) != nil {
		t.Error("the default command has no flags of its own")
	}
}
