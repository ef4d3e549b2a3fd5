package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

// openRecording opens a recording of a new index.
func openRecording(t testing.TB, file string) (radix.Index, *Recording) {
	t.Helper()
	index, r, err := OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 1 << 30}, radix.NewTree(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return index, r
}

// replayFile replays a file to a new index.
func replayFile(t testing.TB, file string, c ReplayCommand) (*Replayed, *radix.Tree) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	index := radix.NewTree()
	r, err := c.Replay(bytes.NewReader(text), index)
	if err != nil {
		t.Fatal(err)
	}
	return r, index
}

// TestDynamosRecordingIsReplayed reads a file in the form of Dynamo's KvRecorder,
// with what may be wrong in one.
func TestDynamosRecordingIsReplayed(t *testing.T) {
	for name, c := range map[string]ReplayCommand{
		"dynamo_recording.txt":       {MaxErrors: 20, PromptTokens: []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}},
		"dynamo_recording_short.txt": {MaxErrors: 1, MaxCount: 7},
		"dynamo_recording_early.txt": {MaxErrors: 1, MaxTime: 10 * time.Millisecond},
	} {
		c.File = filepath.Join("testdata", "dynamo_recording.jsonl")
		var out bytes.Buffer
		c.BlockSize = 4
		if err := c.Run(&out); err != nil {
			t.Fatal(err)
		}
		golden := filepath.Join("testdata", name)
		want, err := os.ReadFile(golden)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), out.String()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", golden, diff)
		}
	}
}

// TestBlocksOfUnknownTiersAreNoneOfTheDevice in the counts of a replay.
func TestBlocksOfUnknownTiersAreNoneOfTheDevice(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	line := `{"timestamp":0,"event":{"worker_id":1,"storage_tier":"tape","event":{"event_id":0,"data":{"removed":{"block_hashes":[1,2]}},"dp_rank":0}}}` + "\n"
	if err := os.WriteFile(file, []byte(line), 0o600); err != nil {
		t.Fatal(err)
	}
	r, _ := replayFile(t, file, ReplayCommand{MaxErrors: 1})
	if rank := r.ranks[kv.WorkerKey{Worker: 1}]; rank.lower != 2 || rank.removed != 0 || r.wrong != 1 {
		t.Errorf("%d blocks of lower tiers, %d removed, %d faults: want 2, 0, 1", rank.lower, rank.removed, r.wrong)
	}
}

// TestARecordingHasDynamosForm: names and order of its fields are those that Dynamo
// writes and reads.
func TestARecordingHasDynamosForm(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	index, r := openRecording(t, file)
	w := kv.WorkerKey{Worker: 3, Rank: 1}
	if err := radixtest.Store(index, w, 0, false, []kv.StoredBlock{{Engine: 1 << 63, Local: 7}}); err != nil {
		t.Fatal(err)
	}
	if err := radixtest.Store(index, w, 5, true, []kv.StoredBlock{{Engine: 6, Local: 8}}); err == nil {
		t.Fatal("an unknown parent is known")
	}
	if err := radixtest.Store(index, w, 1<<63, true, []kv.StoredBlock{{Engine: 6, Local: 8}}); err != nil {
		t.Fatal(err)
	}
	radixtest.Remove(index, w, []uint64{6})
	radixtest.Clear(index, w)
	r.Close()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(text)) {
		if _, rest, found := strings.Cut(line, `,"event":`); found && strings.HasPrefix(line, `{"timestamp":`) {
			got = append(got, rest)
		}
	}
	const head = `{"worker_id":3,"storage_tier":"device","event":{"event_id":`
	if diff := cmp.Diff([]string{
		head + `0,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":9223372036854775808,"tokens_hash":7}]}},"dp_rank":1}}}` + "\n",
		head + `1,"data":{"stored":{"parent_hash":9223372036854775808,"start_position":null,"blocks":[{"block_hash":6,"tokens_hash":8}]}},"dp_rank":1}}}` + "\n",
		head + `2,"data":{"removed":{"block_hashes":[6]}},"dp_rank":1}}}` + "\n",
		head + `3,"data":"cleared","dp_rank":1}}}` + "\n",
	}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// TestARecordingReplaysToTheSameIndex: whatever was changed, in however many runs of
// the router.
func TestARecordingReplaysToTheSameIndex(t *testing.T) {
	dir, n := t.TempDir(), 0
	rapid.Check(t, func(t *rapid.T) {
		n++
		file := filepath.Join(dir, fmt.Sprint(n))
		var index radix.Index
		for range rapid.IntRange(1, 2).Draw(t, "runs") {
			var r *Recording
			var err error
			if index, r, err = OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 1 << 30}, radix.NewTree(), slog.New(slog.DiscardHandler)); err != nil {
				t.Fatal(err)
			}
			for w := range uint64(3) {
				radixtest.Clear(index, kv.WorkerKey{Worker: w}) // as streams begin
				radixtest.Clear(index, kv.WorkerKey{Worker: w, Rank: 1})
			}
			for range rapid.IntRange(0, 30).Draw(t, "steps") {
				w := kv.WorkerKey{Worker: rapid.Uint64Range(0, 2).Draw(t, "worker"), Rank: rapid.Uint32Range(0, 1).Draw(t, "rank")}
				hash := rapid.Uint64Range(1, 12)
				switch rapid.IntRange(0, 29).Draw(t, "what") {
				case 0:
					radixtest.Clear(index, w)
				case 1:
					radixtest.Forget(index, w.Worker)
				case 2, 3, 5, 6, 7, 8, 9:
					radixtest.Remove(index, w, rapid.SliceOfN(hash, 0, 4).Draw(t, "removed"))
				case 4: // longer than a line may be
					blocks := make([]kv.StoredBlock, 2*dumpedTogether+1)
					for i := range blocks {
						blocks[i] = kv.StoredBlock{Engine: uint64(100 + i), Local: uint64(i)}
					}
					_ = radixtest.Store(index, w, 0, false, blocks)
					clear(blocks) // its memory is used again
				default:
					var blocks []kv.StoredBlock
					for range rapid.IntRange(0, 3).Draw(t, "blocks") {
						engine := hash.Draw(t, "block")
						blocks = append(blocks, kv.StoredBlock{Engine: engine, Local: engine % 5})
					}
					_ = radixtest.Store(index, w, hash.Draw(t, "parent"), rapid.Bool().Draw(t, "follows"), blocks)
				}
			}
			r.Close()
			if r.Lost() != 0 {
				t.Fatal("lines were lost")
			}
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range bytes.Lines(text) {
			if len(line) > 100*dumpedTogether {
				t.Fatalf("a line of %d bytes", len(line))
			}
		}
		again := radix.NewTree()
		replayed, err := new(ReplayCommand).Replay(bytes.NewReader(text), again)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(radixtest.Contents(index), radixtest.Contents(again)); diff != "" {
			t.Fatalf("(-recorded +replayed):\n%s", diff)
		}
		for key, rank := range replayed.ranks {
			if rank.missing != 0 || rank.orphans != 0 || rank.held != index.Blocks(key) {
				t.Fatalf("%v: %+v, %d blocks are held", key, rank, index.Blocks(key))
			}
		}
	})
}

func TestTheSecondRecordingInAFileBeginsWithAnEmptyIndex(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	line := func(ms int, worker, id, hash uint64) string {
		return fmt.Sprintf(`{"timestamp":%d,"event":{"worker_id":%d,"storage_tier":"device","event":{"event_id":%d,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":%d,"tokens_hash":1}]}},"dp_rank":0}}}`+"\n", ms, worker, id, hash)
	}
	testkit.WriteFile(t, file, line(50, 1, 0, 1)+line(60, 2, 0, 1)+line(5, 2, 0, 7))
	r, index := replayFile(t, file, ReplayCommand{})
	if r.recordings != 2 || index.Blocks(kv.WorkerKey{Worker: 1}) != 0 || index.Blocks(kv.WorkerKey{Worker: 2}) != 1 {
		t.Errorf("%+v, %v", r, radixtest.Contents(index))
	}
	_, more := openRecording(t, file) // a recording may be gone on with
	more.Close()
}

func TestARecordingLeavesOtherFilesAlone(t *testing.T) {
	for _, before := range []string{"dear diary", `{"timestamp":1,"input_length":5}` + "\n", `{"a":1}`, `{"event":{"name":"login"}}` + "\n"} {
		file := filepath.Join(t.TempDir(), "notes.txt")
		testkit.WriteFile(t, file, before)
		if _, _, err := OpenRecording(Settings{RecordEvents: file}, radix.NewTree(), slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "notes.txt: the file contains other data") {
			t.Errorf("%q: error %v", before, err)
		}
		if text, _ := os.ReadFile(file); string(text) != before {
			t.Errorf("%q became %q", before, text)
		}
	}
}

// TestAFullRecordingChangesNothingElse: its beginning stays whole, and the index goes
// on.
func TestAFullRecordingChangesNothingElse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "events.jsonl")
	index, r, err := OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 5000}, radix.NewTree(), slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := kv.WorkerKey{}
	for i := range uint64(100) {
		if err := radixtest.Store(index, w, 0, false, []kv.StoredBlock{{Engine: i, Local: i}}); err != nil {
			t.Fatal(err)
		}
	}
	r.Close()
	info, err := os.Stat(file)
	if err != nil || info.Size() > 5000 || info.Size() < 4500 || index.Blocks(w) != 100 {
		t.Errorf("%v, %v, %d blocks", info.Size(), err, index.Blocks(w))
	}
	replayed, again := replayFile(t, file, ReplayCommand{})
	if replayed.wrong != 0 || uint64(again.Blocks(w))+r.Lost() != 100 {
		t.Errorf("%d blocks replayed, %d lost", again.Blocks(w), r.Lost())
	}
}

func TestWithoutAFileTheIndexIsItself(t *testing.T) {
	tree := radix.NewTree()
	index, r, err := OpenRecording(Settings{}, tree, slog.New(slog.DiscardHandler))
	if err != nil || index != radix.Index(tree) || r.Lost() != 0 {
		t.Errorf("%v, %v", r, err)
	}
	r.Close()
}

func TestAFileWithoutEventsIsAnError(t *testing.T) {
	for _, text := range []string{"", "\n\n", "dear diary\n", `{"timestamp":1}` + "\n"} {
		file := filepath.Join(t.TempDir(), "x")
		testkit.WriteFile(t, file, text)
		if err := (&ReplayCommand{File: file}).Run(new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), "contains no KV events") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// FuzzReplay replays any file: the index stays whole, and nothing is held that no
// line has stored.
func FuzzReplay(f *testing.F) {
	text, err := os.ReadFile(filepath.Join("testdata", "dynamo_recording.jsonl"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	for line := range bytes.Lines(text) {
		f.Add(line)
	}
	f.Add([]byte(`{"timestamp":18446744073709551615,"event":{"worker_id":1,"event":{"event_id":18446744073709551615,"data":{"removed":{"block_hashes":null}}}}}`))
	f.Add([]byte(`{"timestamp":1,"event":{"worker_id":1,"event":{"event_id":1}}}`))
	f.Add([]byte(`{"timestamp":1,"event":{"worker_id":1,"storage_tier":"disk","event":{"event_id":1,"data":{"removed":{"block_hashes":[1]}}}}}
{"timestamp":1,"event":{"worker_id":1,"event":{"event_id":2,"data":{"lower":{"tier":"host","stored":{"parent_hash":1,"blocks":[{"block_hash":1,"tokens_hash":2}]}}}}}}
{"timestamp":1,"event":{"worker_id":1,"event":{"event_id":3,"data":{"device_cleared":"lower"}}}}`))
	f.Add([]byte(`{"timestamp":1,"event":{"event":{"data":{"stored":{"parent_hash":1,"blocks":[{"block_hash":1}]}}}}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		index := radix.NewTree()
		c := ReplayCommand{MaxErrors: 3}
		r, err := c.Replay(bytes.NewReader(text), index)
		if err != nil {
			t.Skip(err)
		}
		if err := index.Check(); err != nil {
			t.Fatal(err)
		}
		stored, held := 0, 0
		for key, rank := range r.ranks {
			stored, held = stored+rank.stored, held+index.Blocks(key)
		}
		if held > stored || held != r.held || r.events+r.wrong > 2*len(text) || len(r.errors) > c.MaxErrors {
			t.Fatalf("%d blocks stored, %d held, counted %d; %d errors", stored, held, r.held, len(r.errors))
		}
		var out bytes.Buffer
		r.print(&out, "x", index)
		if out.Len() > 1000+300*(len(r.ranks)+len(r.errors)) {
			t.Fatalf("%d bytes are printed", out.Len())
		}
	})
}

// TestRecordedCapturesReplayToTheSameIndex: of models with windows, states and drafters too.
func TestRecordedCapturesReplayToTheSameIndex(t *testing.T) {
	const block = 32
	files, err := filepath.Glob(filepath.Join("testdata/zoo", "*.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	recorded := map[string]int{"tail": 0, "lookahead": 0, "layout": 0, "held": 0, "dropped": 0}
	for _, name := range files {
		file, tree := filepath.Join(t.TempDir(), "events.jsonl"), radix.NewTree()
		index, r, err := OpenRecording(Settings{RecordEvents: file, RecordEventsMaxBytes: 1 << 30}, tree, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		captured := replayCaptureInto(t, name, block, capturedTraits[form(name)], tree, index)
		r.Close()
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for kind := range recorded {
			recorded[kind] += bytes.Count(text, []byte(`"data":{"`+kind+`":`))
		}
		_, again := replayFile(t, file, ReplayCommand{})
		testkit.WantEqual(t, form(name)+": contents", radixtest.Contents(again), radixtest.Contents(tree))
		found := 0
		for _, prompt := range captured.prompts {
			lookups := [][]uint64{kv.HashBlocks(nil, prompt, block, "", "")}
			for _, l := range tree.Lookaheads() {
				lookups = append(lookups, kv.HashLookaheadBlocks(nil, prompt, block, l.Tokens, "", "", nil))
			}
			for _, local := range lookups {
				got, want := again.Match(local, len(local), kv.AllParts, nil), tree.Match(local, len(local), kv.AllParts, nil)
				if !slices.Equal(got, want) {
					t.Errorf("%s: a prompt of %d blocks matches %+v, want %+v", form(name), len(local), got, want)
				}
				found += len(want)
			}
		}
		if found == 0 {
			t.Errorf("%s: no prompt matches anything", form(name))
		}
	}
	for kind, lines := range recorded {
		if lines == 0 {
			t.Errorf("no capture has a change that is recorded as %q", kind)
		}
	}
}

// BenchmarkRecording is what the recording adds to a change of the index.
func BenchmarkRecording(b *testing.B) {
	blocks := make([]kv.StoredBlock, 16)
	for i := range blocks {
		blocks[i] = kv.StoredBlock{Engine: uint64(i + 1), Local: uint64(i)}
	}
	engine := make([]uint64, len(blocks))
	for i := range engine {
		engine[i] = blocks[i].Engine
	}
	for _, recorded := range []bool{false, true} {
		b.Run(fmt.Sprintf("recorded=%v", recorded), func(b *testing.B) {
			index := radix.Index(radix.NewTree())
			if recorded {
				var r *Recording
				index, r = openRecording(b, filepath.Join(b.TempDir(), "events.jsonl"))
				defer r.Close()
			}
			for b.Loop() {
				_ = radixtest.Store(index, kv.WorkerKey{}, 0, false, blocks)
				radixtest.Remove(index, kv.WorkerKey{}, engine)
			}
		})
	}
}

// TestDataIsOneOfItsForms pins what is refused.
func TestDataIsOneOfItsForms(t *testing.T) {
	for text, want := range map[string]bool{
		`"cleared"`: true, `{"stored":{"parent_hash":null,"blocks":[]}}`: true, `{"removed":{"block_hashes":[1]}}`: true,
		`{"tail":{"parent_hash":1,"blocks":[{"block_hash":2,"tokens_hash":3}],"skipped":[4]}}`: true, `{"lookahead":{"tokens":1,"cut":1}}`: true,
		`{}`: false, `"stored"`: false, `7`: false, `null`: false, `[]`: false, `{"stored":{},"removed":{}}`: false, `{"stored":null}`: false, `{"removed":{"block_hashes":[-1]}}`: false,
	} {
		var data changeText
		err := json.Unmarshal([]byte(text), &data)
		if (err == nil) != want {
			t.Errorf("%s: %v", text, err)
		}
		if want {
			again, _ := json.Marshal(data)
			var twice changeText
			if err := json.Unmarshal(again, &twice); err != nil || !cmp.Equal(data, twice) {
				t.Errorf("%s became %s: %v", text, again, err)
			}
		}
	}
}
