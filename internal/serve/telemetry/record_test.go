package telemetry

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/hints"
	"kvrouter/internal/serve/proxy"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/simulate"
)

func TestRecorderContinuesAFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.jsonl")
	var arrived time.Time
	for i := range 2 {
		r, err := NewRecorder(RecordSettings{File: file, Policy: "kv", BlockSize: 4}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		prompt := &router.Request{Tokens: testkit.PromptTokens(1, 3)[:10+i], NumTokens: 20}
		if i == 0 {
			arrived = time.Now()
		}
		r.Finished(&proxy.Exchange{Arrived: arrived.Add(time.Duration(i) * time.Hour), Route: "/r", Status: 200, Worker: "1", Request: prompt, Default: true}, arrived)
		r.Finished(&proxy.Exchange{Arrived: arrived}, arrived)                                                         // not routed: nothing to replay
		r.Finished(&proxy.Exchange{Arrived: arrived, Request: &router.Request{NumTokens: 20}, Default: true}, arrived) // its prompt is not known
		r.Finished(&proxy.Exchange{Arrived: arrived, Request: prompt}, arrived)                                        // of another model
		r.Close()
		r.Close()
		r.Finished(&proxy.Exchange{Request: prompt, Default: true}, arrived) // too late
	}
	lines := readRecord(t, file)
	if len(lines) != 2 {
		t.Fatalf("%d lines", len(lines))
	}
	if hour := lines[1].Timestamp - lines[0].Timestamp; math.Round(hour*1e6) != 3600e9 { // ns: as fine as times are
		t.Errorf("%v ms between two requests an hour apart", hour)
	}
	for _, line := range lines {
		if line.InputLength != 20 || len(line.HashIDs) != 2 || line.HashIDs[1] >= 1<<53 || line.HashIDs[0] == line.HashIDs[1] || line.CachedTokens != nil || line.Policy != "kv" {
			t.Errorf("%+v", line)
		}
	}
	if info, _ := os.Stat(file); info.Mode().Perm() != 0o600 {
		t.Errorf("others may read it: %v", info.Mode())
	}
}

func TestTheEpochOfARecordIsReadToTheNanosecond(t *testing.T) {
	file := filepath.Join(t.TempDir(), "r.jsonl")
	epoch := time.Unix(1000, 0).UTC()
	for _, after := range []time.Duration{0, 249, 251, time.Hour + 249} { // 249/1e6*1e6 is less than 249
		line, err := json.Marshal(RecordLine{Timestamp: milliseconds(after), Arrived: epoch.Add(after)})
		if err != nil {
			t.Fatal(err)
		}
		testkit.WriteFile(t, file, string(line)+"\n")
		if got, err := readEpoch(file); err != nil || !got.Equal(epoch) {
			t.Errorf("%v after it: %v, %v", after, got, err)
		}
	}
}

func TestRecorderLeavesOtherFilesAlone(t *testing.T) {
	file := filepath.Join(t.TempDir(), "notes.txt")
	testkit.WriteFile(t, file, "dear diary")
	if _, err := NewRecorder(RecordSettings{File: file, Policy: "kv", BlockSize: 4}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "notes.txt") {
		t.Errorf("error %v", err)
	}
}

func TestRecorderGoesOnAfterATornLine(t *testing.T) {
	for _, before := range []string{`{"timestamp": 12, "inp`, `{"timestamp":12,"input_len{"timestamp":13}` + "\n", `{`} {
		file := filepath.Join(t.TempDir(), "r.jsonl")
		testkit.WriteFile(t, file, before)
		r, err := NewRecorder(RecordSettings{File: file, Policy: "kv", BlockSize: 4}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		r.Finished(&proxy.Exchange{Arrived: time.Now(), Request: &router.Request{Tokens: testkit.PromptTokens(1, 3)}, Default: true}, time.Now())
		r.Close()
		if requests, err := simulate.ReadTrace(file); err != nil || len(requests) != 1 {
			t.Errorf("after %q: %d requests, %v", before, len(requests), err)
		}
	}
}

func TestRecorderCountsWhatItLoses(t *testing.T) {
	log := &testkit.LogBuffer{}
	r, err := NewRecorder(RecordSettings{File: filepath.Join(t.TempDir(), "r.jsonl"), Policy: "kv", BlockSize: 4}, slog.New(slog.NewTextHandler(log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	_ = r.File.Close() // as good as a full disk
	for range 5 {
		r.Finished(&proxy.Exchange{Request: &router.Request{NumTokens: 1, Local: make([]uint64, 100_000)}, Default: true}, time.Now())
	}
	r.Close()
	if !strings.Contains(log.String(), "cannot write the record") {
		t.Errorf("log %s", log)
	}
	var none *Recorder
	none.Finished(&proxy.Exchange{Request: &router.Request{Tokens: []uint32{1}}, Default: true}, time.Now())
	none.Close()
}

func TestARecordedLineIsReadAsATrace(t *testing.T) {
	request, err := simulate.ParseTraceLine([]byte(`{"timestamp":3,"input_length":200,"output_length":0,"hash_ids":[11,12,13],"hash_block_size":64,"status":200}`))
	if err != nil {
		t.Fatal(err)
	}
	if request.Prompt != 200 || request.Output != 1 || request.Part != 64 || len(request.Hashes) != 3 {
		t.Errorf("%+v", request)
	}
}

func TestRecordedHintsAreReplayed(t *testing.T) {
	budget := 3
	for _, test := range []struct {
		name  string
		hints hints.Prefix
		want  string // in the line; empty: no hints
	}{
		{"none", hints.Prefix{}, ""},
		{"a series", hints.Prefix{ID: "alice", Total: 5, OSL: hints.LevelHigh, IAT: hints.LevelLow}, `"total_requests":5,"osl":"HIGH","iat":"LOW"`},
		{"a budget without an id", hints.Prefix{Budget: &budget}, `{"prefix_id":"","reuse_budget":3,"osl":"MEDIUM","iat":"MEDIUM"}`},
	} {
		t.Run(test.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "r.jsonl")
			r, err := NewRecorder(RecordSettings{File: file, Policy: "kv", BlockSize: 4}, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			now := time.Now()
			for range 2 {
				prompt := &router.Request{Tokens: testkit.PromptTokens(1, 3)[:10], Prefix: test.hints}
				r.Finished(&proxy.Exchange{Arrived: now, Status: 200, Request: prompt, Default: true}, now)
			}
			r.Close()
			text, err := os.ReadFile(file)
			if err != nil || !strings.Contains(string(text), test.want) || strings.Contains(string(text), "alice") || test.want == "" && strings.Contains(string(text), "hints") {
				t.Fatal(string(text), err)
			}
			requests, err := simulate.ReadTrace(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, request := range requests {
				got, want := request.Hints, test.hints
				if (got.ID == "") != (want.ID == "") || got.ID != requests[0].Hints.ID {
					t.Errorf("id %q, want one for %q", got.ID, want.ID)
				}
				if got.ID, want.ID = "", ""; !reflect.DeepEqual(got, want) {
					t.Errorf("%+v, want %+v", got, want)
				}
			}
		})
	}
}

func TestARecordHasReceiptsOnlyWhereTheyAreAskedFor(t *testing.T) {
	worker := uint64(3)
	receipts := []*router.Receipt{{Tokens: 10, Worker: &worker, RequestID: "alice-1", Series: "alice"}}
	for _, asked := range []bool{false, true} {
		file := filepath.Join(t.TempDir(), "r.jsonl")
		r, err := NewRecorder(RecordSettings{File: file, Policy: "kv", BlockSize: 4, Decisions: asked}, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		r.Finished(&proxy.Exchange{Receipts: receipts, Request: &router.Request{Tokens: testkit.PromptTokens(1, 3)[:10]}, Default: true}, time.Now())
		r.Close()
		lines := readRecord(t, file)
		if len(lines) != 1 || (len(lines[0].Decisions) == 1) != asked {
			t.Fatalf("asked %v: %+v", asked, lines)
		}
		if asked && *lines[0].Decisions[0].Worker != worker {
			t.Errorf("another receipt was recorded: %+v", lines[0].Decisions[0])
		}
		if text, err := os.ReadFile(file); err != nil || strings.Contains(string(text), "alice") {
			t.Errorf("the record has the client's names, %v: %s", err, text)
		}
	}
}

// TestTheMemoryOfLinesIsKnown: it bounds how many wait for the disk.
func TestTheMemoryOfLinesIsKnown(t *testing.T) {
	small := RecordLine{}
	long := RecordLine{HashIDs: make([]uint64, 100_000)}
	explained := RecordLine{Decisions: []*router.Receipt{{Candidates: make([]router.ReceiptCandidate, 1000)}, {}}}
	for _, test := range []struct {
		line        *RecordLine
		least, most int
	}{{&small, 500, 2000}, {&long, 800_000, 900_000}, {&explained, 200_000, 1_000_000}} {
		if n := test.line.memory(); n < test.least || n > test.most {
			t.Errorf("%d bytes, want %d to %d", n, test.least, test.most)
		}
	}
}

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
