package peers

import (
	"fmt"
	"strings"
	"testing"
	"text/tabwriter"
)

// tierRequest is a request of a capture of an engine with lower tiers: how much of a
// prompt it has, and how many tokens the engine found on the device and below.
type tierRequest struct {
	Prompt        string
	Tokens        int
	Device, Lower int
}

// tierBlock is the block size of all captures of tiers, tokens.
const tierBlock = 64

// readTiers reads a capture whose requests stand among the batches and name prompts.
func readTiers(t *testing.T, name string) (requests []capturedRequest) {
	t.Helper()
	prompts := map[string][]uint32{}
	var before [][]byte
	for _, line := range readLines(t, "tiers/"+name) {
		switch line.Kind {
		case "prompt":
			prompts[line.Prompt] = line.IDs
		case "request":
			requests = append(requests, capturedRequest{before: before, prompt: prompts[line.Prompt][:line.Tokens], cached: line.Device + line.Lower})
			before = nil
		case "event":
			before = append(before, line.Payload)
		}
	}
	return requests
}

// TestPeersTiers is TestPeersPredictions for engines with host memory and files below
// their cache. vllm-router only says what its tiers are worth: here a token in any.
func TestPeersTiers(t *testing.T) {
	python, program := peers(t)
	var table strings.Builder
	out := tabwriter.NewWriter(&table, 0, 0, 1, ' ', tabwriter.Debug)
	for i, c := range []struct {
		name        string
		unpublished int // requests of which no event names all that the engine has
	}{
		{"vllm-0.32.0-cpu", 0}, // events with the hash only, vLLM's default
		{"vllm-0.32.0-cpu-fs", 0},
		{"sglang-0.5.23-host", 0},
		{"sglang-0.5.23-host-file", 3},
	} {
		t.Run(c.name, func(t *testing.T) {
			requests := readTiers(t, c.name)
			followers := compare(t, requests, tierBlock, python, program)
			if i == 0 {
				fmt.Fprint(out, "capture\trequests\tfound\t")
				for _, f := range followers {
					fmt.Fprintf(out, "%s\t", f.name)
				}
				fmt.Fprintln(out)
			}
			found := 0
			for _, r := range requests {
				found += r.cached
			}
			fmt.Fprintf(out, "%s\t%d\t%d\t", c.name, len(requests), found)
			for _, f := range followers {
				fmt.Fprintf(out, "%d: %d, +%d\t", f.sum, f.exact, f.most)
			}
			fmt.Fprintln(out)
			if ours := followers[0]; ours.exact != len(requests)-c.unpublished || ours.most > 0 {
				t.Errorf("%d of %d predictions of kvrouter were exact, and up to %d tokens too many", ours.exact, len(requests), ours.most)
			}
		})
	}
	out.Flush()
	t.Logf("tokens taken to be cached in all tiers, of them exact predictions, and the most tokens promised too much:\n%s", table.String())
}
