package mocker

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the table of keys in docs/mock-workers.md")

// TestKeysPage holds the table of docs/mock-workers.md against the keys of --mock.
func TestKeysPage(t *testing.T) {
	const page, begin, end = "../../../docs/mock-workers.md", "-update -->\n", "<!-- end of keys -->"
	parser, err := newParser(new(Settings))
	if err != nil {
		t.Fatal(err)
	}
	var table strings.Builder
	table.WriteString("| key | default | meaning | simulate |\n|---|---|---|---|\n")
	escape := strings.NewReplacer("|", `\|`, "*", `\*`)
	for _, key := range parser.Model.Flags {
		value, used := key.Default, ""
		if key.IsBool() {
			value = "false"
		}
		if value == "" {
			value = "—"
		} else {
			value = "`" + value + "`"
		}
		if key.Tag.Has("simulate") {
			used = "yes"
		}
		name := key.Name
		if key.PlaceHolder != "" {
			name += "=" + key.PlaceHolder
		}
		fmt.Fprintf(&table, "| `%s` | %s | %s | %s |\n", name, value, escape.Replace(key.Help), used)
	}
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(text), begin)
	has, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		t.Fatalf("%s has no place for the keys", page)
	}
	if *update {
		if err := os.WriteFile(page, []byte(before+begin+table.String()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		has = table.String()
	}
	if has != table.String() {
		t.Errorf("%s differs from the keys: run go test ./internal/tools/mocker -run TestKeysPage -update", page)
	}
}

func TestMockTakesPairs(t *testing.T) {
	ratio := 3.0
	for _, test := range []struct {
		flags Flags
		check func(s Settings) bool
	}{
		{Flags{}, func(s Settings) bool { return s.NumGPUBlocks == 16384 && s.SpeedupRatio == 1 }},
		{Flags{Pairs: []string{"num-gpu-blocks=5", "num-gpu-blocks=6,api=sglang"}}, func(s Settings) bool { return s.NumGPUBlocks == 6 && s.API == "sglang" }},
		{Flags{Pairs: []string{"prefill-ms=1,2,3,decode-ms=4,5,6, lora = a,b"}}, func(s Settings) bool {
			return len(s.PrefillMS) == 3 && s.DecodeMS[2] == 6 && len(s.Lora) == 2
		}},
		{Flags{Pairs: []string{"hang-worker=0=1s,2=3s,array-events=true"}}, func(s Settings) bool { return s.HangWorker[2].Seconds() == 3 && s.ArrayEvents }},
		{Flags{Pairs: []string{"speedup-ratio=2"}}, func(s Settings) bool { return s.SpeedupRatio == 2 }},
		{Flags{Pairs: []string{"speedup-ratio=2"}, SpeedupRatio: &ratio}, func(s Settings) bool { return s.SpeedupRatio == 3 }},
	} {
		if s, err := test.flags.Settings(); err != nil || !test.check(s) {
			t.Errorf("%v: %+v, %v", test.flags.Pairs, s, err)
		}
	}
}

func TestErrorsOfMockNameTheKey(t *testing.T) {
	for pairs, want := range map[string]string{
		"num-gpu-block=5":       `--mock num-gpu-block=5: unknown key "num-gpu-block"; did you mean "num-gpu-blocks"?`,
		"array-events":          "--mock array-events: give KEY=VALUE, such as",
		"":                      "--mock : give KEY=VALUE",
		"error-rate=often":      "--mock error-rate",
		"api=trt":               `--mock api must be one of "vllm","sglang" but got "trt"`,
		"kv-lease=soon":         "--mock kv-lease",
		"output-tokens=3,extra": "--mock output-tokens",
	} {
		if _, err := (Flags{Pairs: []string{pairs}}).Settings(); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%q: %v, want %q", pairs, err, want)
		}
	}
}
