package test

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"
)

// figure is a text of a section with numbers that a simulation gives within seconds. The section is one of
// docs/benchmarks.md, unless its name has another page before #.
type figure struct {
	section string
	// command is that of kvrouter; without "simulate", it is added to the first one of the section.
	command string
	seeds   int // mean over seeds 1 to this; 0: the command's own
	// text has a verb of fmt for each of the values: paths in the first report, or with an index
	// before them in another one. A path may end with a divisor.
	text, values string
}

const (
	synthetic = "simulate --trace testdata/traces/synthetic_trace.jsonl.gz"
	agents    = "simulate --synthetic agentic --agentic-workflows 1200"
	tiers     = " --concurrency 64 --seed 7 --mock num-gpu-blocks=4096 --mock host-blocks=16384 --mock host-bandwidth=25"
	fair      = "simulate --trace testdata/traces/conversation_trace.jsonl.gz --mock max-num-seqs=16 --policy work --seed 1" +
		" --router-queue-policy fair --router-queue-limit 20000 --router-queue-timeout 1h"
	alone     = fair + " --speedup 6 --tenants flood:0.84:absent,light*8:0.16"
	night     = fair + " --speedup 6 --tenants chat:0.5:class=interactive,night:0.5:class=batch"
	sheddable = fair + " --speedup 9.14 --tenants all:1:ttft=2s:sheddable"
	fullCells = "--cells 4 --workers 4 --day-load 4 --day-swing 1 --mock num-gpu-blocks=1024 --placements summary,nearest"

	means = "ttft_ms.mean end_to_end_ms.mean"
	first = "ttft_ms.mean ttft_ms.p99"
	light = "tenants.#(tenant=light).ttft_ms.p50/1000 tenants.#(tenant=light).ttft_ms.p99/1000"
	chats = "tenants.#(tenant=chat).ttft_ms.p50/1000 tenants.#(tenant=chat).ttft_ms.p99/1000"
	step  = "simulate --synthetic rollouts --concurrency 256 --workers 8 --policy "
	fault = "faults.0.first_attempts faults.0.lost faults.0.known_after_s faults.0.back_after_s"
)

// figures are those of the pages. Where one changes, correct the page.
var figures = []figure{
	{"Policies", synthetic + " --concurrency 256 --policy work", 3, "| %.3f / %.0f / %.0f |", "reuse " + means},
	{"Policies", agents + " --concurrency 256 --policy work", 3, "| %.3f / %.1f / %.0f |", "reuse " + means},
	{"Lower tiers", synthetic + tiers + " --policy work", 0, "| synthetic, 25 GB/s | %.0f / %.0f |", means},
	{"Fair queue", "", 0, "| %.2f / %.2f |", light},
	{"Fair queue", alone, 0, "| light | %.2f / %.2f |", light},
	{"Fair queue", "--router-queue-policy fcfs", 0, "| %.0f / %.0f |", light},
	{"Fair queue", night, 0, "| %.2f / %.2f |", chats},
	{"Shedding", sheddable, 0, "%.1f %%; %.0f |\n", "tenants.0.objective.kept/120.31 output_tokens_per_s"},
	{"Queue", "", 0, "mean TTFT %.0f ms, end to end %.0f ms", means},
	{"Queue", synthetic + " --concurrency 256 --policy work --seed 1", 0, "without a queue %.0f and %.0f ms", means},
	{"Ejection", "", 0, "| defaults | %.0f | %.0f | %.1f s | %.1f s |", fault},
	{"Ejection", "--eject-after 0", 0, "| `--eject-after 0` | %.0f | %.0f |", "faults.0.first_attempts faults.0.lost"},
	{"Values of K", "", 0, "%.3f with cache-threshold, %.3f with variance", "reuse 1.reuse"},
	{"Cache correction", "", 0, "| %.0f / %.3f |", "prediction_error_tokens reuse"},
	{"Cache correction", "--no-cache-correction", 0, "| 1,024 | %.0f / %.3f |", "prediction_error_tokens reuse"},
	{"Thompson", "", 0, "| 26 %% / 30 %% | %.1f |", "ttft_ms.mean"},
	{"Disaggregation", "", 0, "| 3P5D | %.0f / %.0f | %.1f / %.1f | %.0f ", first + " itl_ms.mean itl_ms.p99 end_to_end_ms.mean"},
	{"rollouts-rl.md#What it brings", step + "work", 3, "| `work` | %.0f / %.3f |", "makespan_s reuse"},
	{"rollouts-rl.md#What it brings", step + "sticky-least-loaded", 3, "began | %.0f / %.3f |", "makespan_s reuse"},
	{"A day of 16 cells", "--placements summary", 0, "| summary | %.3f | %.1f / %.0f |", "hit_rate " + first},
	{"A day of 16 cells", fullCells, 0, "%.0f / %.0f ms with `summary`, %.0f / %.0f with `nearest`", first + " 1.ttft_ms.mean 1.ttft_ms.p99"},
}

// TestFiguresInThePages runs the simulations whose results the pages have.
func TestFiguresInThePages(t *testing.T) {
	if testing.Short() {
		t.Skip("simulates for a minute")
	}
	program, err := PlainProgram()
	if err != nil {
		t.Fatal(err)
	}
	written := regexp.MustCompile("(?:kvrouter|go run \\.) (simulate (?:\\\\\\n|[^`\\n])+)")
	thousands := regexp.MustCompile(`(\d),(\d{3})\b`)
	for _, f := range figures {
		t.Run(f.section, func(t *testing.T) {
			file, name, other := strings.Cut(f.section, "#")
			if !other {
				file, name = "benchmarks.md", f.section
			}
			page, err := os.ReadFile("docs/" + file)
			if err != nil {
				t.Fatal(err)
			}
			_, section, found := strings.Cut(string(page), "\n## "+name+"\n")
			section, _, _ = strings.Cut(section, "\n## ")
			command := f.command
			if match := written.FindStringSubmatch(section); !strings.HasPrefix(command, "simulate") && match != nil {
				command = match[1] + " " + command
			}
			if !found || !strings.HasPrefix(command, "simulate") {
				t.Fatal("there is no such section with a simulation")
			}
			var runs []gjson.Result
			for seed := range max(1, f.seeds) {
				line := program + " " + command + " --json"
				if f.seeds > 0 {
					line += fmt.Sprint(" --seed ", seed+1)
				}
				reports, err := exec.Command("sh", "-c", line).Output()
				if err != nil {
					t.Fatalf("%s: %v", line, err)
				}
				runs = append(runs, gjson.Parse("["+strings.ReplaceAll(strings.TrimSpace(string(reports)), "\n", ",")+"]"))
			}
			var values []any
			for _, path := range strings.Fields(f.values) {
				values = append(values, meanOf(t, runs, path))
			}
			want := fmt.Sprintf(f.text, values...)
			if plain := thousands.ReplaceAllString(section, "$1$2"); !strings.Contains(plain, thousands.ReplaceAllString(want, "$1$2")) {
				t.Errorf("docs/benchmarks.md has no %q there, as of kvrouter %s", want, command)
			}
		})
	}
}

// meanOf is the mean over runs of a value of their reports.
func meanOf(t *testing.T, runs []gjson.Result, path string) float64 {
	t.Helper()
	path, divisor, divided := strings.Cut(path, "/")
	if path[0] > '9' {
		path = "0." + path
	}
	sum := 0.0
	for _, reports := range runs {
		value := reports.Get(path)
		if value.Type != gjson.Number {
			t.Fatalf("no report has %s", path)
		}
		sum += value.Num
	}
	if divided {
		by, err := strconv.ParseFloat(divisor, 64)
		if err != nil {
			t.Fatal(err)
		}
		sum /= by
	}
	return sum / float64(len(runs))
}
