package telemetry

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
)

// readRecord reads a file of records.
func readRecord(t *testing.T, file string) (lines []RecordLine) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var r RecordLine
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, r)
	}
	return lines
}
