package test

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"kvrouter/internal/tools/simulate"
)

// grid runs scripts/grid.py over a file with this text, or over the file of that name.
func grid(t *testing.T, text string, args ...string) (out string, err error) {
	t.Helper()
	program, err := PlainProgram()
	if err != nil {
		t.Fatal(err)
	}
	file := text
	if !strings.HasSuffix(text, ".toml") {
		file = filepath.Join(t.TempDir(), "grid.toml")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	command := exec.Command("python3", append([]string{"scripts/grid.py", file, "--binary", program}, args...)...)
	printed, err := command.CombinedOutput()
	return string(printed), err
}

const smallGrid = `
[policies]
work = "work"
"by turns" = "round-robin"
[tenants]
two = "a:0.5,b:0.5"
[loads]
busy = ["g9 c10 n40 w2 o20 #1,2", "g9 c8 n20 w2 @two"]
calm = ["g3 r1 n30 w3 o20 kv4096 lag50ms"]
`

// TestGridReportsWhatEachSimulationReports compares a grid's CSV file with single
// simulations: the mean over the seeds, and what an earlier file is reused for.
func TestGridReportsWhatEachSimulationReports(t *testing.T) {
	file := filepath.Join(t.TempDir(), "grid.csv")
	out, err := grid(t, smallGrid, "--csv", file)
	if err != nil {
		t.Fatal(err, out)
	}
	for _, want := range []string{"busy: g9 c10 n40 w2 o20 #1,2 (", "work to the best of the others: TTFT", "geometric means", "above 1.06", "\nall ", "\nwork      a "} {
		if !strings.Contains(out, want) {
			t.Errorf("nothing of %q in\n%s", want, out)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || len(lines) != 7 {
		t.Fatalf("%d lines, %v", len(lines), err)
	}
	mean := 0.0
	for seed := range 2 {
		printed, err := Output(t, strings.Fields(fmt.Sprintf("simulate --json --synthetic chat --synthetic-groups 9 --concurrency 10 --synthetic-conversations 40 --workers 2 --synthetic-output-tokens 20 --policy round-robin --seed %d", seed+1))...)
		var report simulate.Report
		if err == nil {
			err = json.Unmarshal([]byte(printed), &report)
		}
		if err != nil {
			t.Fatal(err, printed)
		}
		mean += report.TTFT.Mean / 2
	}
	if got, _ := strconv.ParseFloat(lines[2][5], 64); lines[2][2] != "by turns" || lines[0][5] != "ttft_mean_ms" || got != mean {
		t.Errorf("%v, want a mean first token after %v ms", lines[2], mean)
	}
	lines[2][5], lines[1][5] = "12345", "12345"
	var changed bytes.Buffer
	_ = csv.NewWriter(&changed).WriteAll(lines)
	if err := os.WriteFile(file, changed.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	if out, err = grid(t, smallGrid, "--known", file, "--only", "o20 #1,2"); err != nil || strings.Count(out, "12345") != 1 {
		t.Errorf("%v: the other policy's results are not reused, or those of work are:\n%s", err, out)
	}
}

// TestGridRefuses has files and arguments that are wrong.
func TestGridRefuses(t *testing.T) {
	const policies = "[policies]\na = 'kv'\nwork = 'work'\n[loads]\n"
	for text, says := range map[string]string{
		"":                                      "at least two policies",
		policies + "x = 3":                      "must be a list",
		policies + "x = ['g3']":                 "give either --concurrency",
		policies + "x = ['c32']":                "the first word",
		policies + "x = ['g3 c5 c6']":           "'c6' is unknown, given twice",
		policies + "x = ['g3 c5 x2']":           "'x2' is unknown",
		policies + "x = ['g3 c5 untold1']":      "'untold1' is unknown",
		policies + "x = ['g3 c5 @three']":       "'@three' is unknown",
		policies + "x = ['g3 c5 lag5']":         "give a time",
		policies + "x = ['g3 c5 w2']\n[lods]\n": "unknown: lods",
		"policies = 3":                          "must be a table",
		strings.Replace(policies, "kv", "nix", 1) + "x = ['g3 c1 n4']": "nix",
		smallGrid + "[": "grid.py",
	} {
		if out, err := grid(t, text); err == nil || !strings.Contains(out, says) || strings.Contains(out, "Traceback") {
			t.Errorf("%q: %v: %s, want %q", text, err, out, says)
		}
	}
	if out, err := grid(t, smallGrid, "--of", "kv"); err == nil || !strings.Contains(out, "no policy of that name") {
		t.Error(err, out)
	}
	for _, name := range []string{"grid", "holdout", "policies", "pulls", "tenants", "tiers"} {
		if out, err := grid(t, "testdata/grids/"+name+".toml", "--of", "nobody"); err == nil || !strings.Contains(out, "no policy of that name") {
			t.Errorf("%s: %v %s", name, err, out)
		}
	}
}
