package manual

import "testing"

// TestTheMenuHasWholeSentences: none ends within parentheses.
func TestTheMenuHasWholeSentences(t *testing.T) {
	for help, want := range map[string]string{
		"Number of workers.": "Number of workers",
		"Number of workers, instead of --num-workers (simulate: --workers). They compute.": "Number of workers, instead of --num-workers",
		"Policy: work, kv or another.":       "Policy",
		"Port (0: any free one) of clients.": "Port",
		"Maximum (of all) of the pauses.":    "Maximum (of all) of the pauses",
	} {
		if got := sentence(help); got != want {
			t.Errorf("%q: %q, want %q", help, got, want)
		}
	}
}
