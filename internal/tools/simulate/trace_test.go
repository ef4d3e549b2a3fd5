package simulate

import (
	"bytes"
	"strings"
	"testing"
)

func TestTheNextTurnOfARecordedChatTellsTheAnswer(t *testing.T) {
	const first = `{"timestamp":0,"input_length":130,"output_length":100,"hash_ids":[1,2],"hash_block_size":64,"duration_ms":50}` + "\n"
	for _, test := range []struct {
		name  string
		later string
		known int // tokens of the first prompt and its answer
	}{
		{"its prompt and answer go before a new message", `{"timestamp":60,"input_length":260,"output_length":9,"hash_ids":[1,2,3,4],"hash_block_size":64,"duration_ms":5}`, 230},
		{"another chat with the same beginning", `{"timestamp":60,"input_length":260,"output_length":9,"hash_ids":[1,5,6,7],"hash_block_size":64,"duration_ms":5}`, 128},
		{"sent before the answer had ended", `{"timestamp":40,"input_length":260,"output_length":9,"hash_ids":[1,2,3,4],"hash_block_size":64,"duration_ms":5}`, 128},
		{"too short to repeat the answer", `{"timestamp":60,"input_length":220,"output_length":9,"hash_ids":[1,2,3],"hash_block_size":64,"duration_ms":5}`, 128},
		{"a picture hides the rest of its prompt", `{"timestamp":60,"input_length":900,"output_length":9,"hash_ids":[1,2,3,4],"hash_block_size":64,"duration_ms":5}`, 128},
		{"no recording", `{"timestamp":60,"input_length":2000,"output_length":9,"hash_ids":[1,2,3,4]}`, 128},
	} {
		t.Run(test.name, func(t *testing.T) {
			requests, _, err := parseTrace(strings.NewReader(first + test.later))
			if err != nil {
				t.Fatal(err)
			}
			local, blocks := requests[0].Blocks(64)
			if len(local) != 2 || len(blocks) != test.known/64 {
				t.Fatalf("%d blocks of the prompt and %d with the answer, want 2 and %d", len(local), len(blocks), test.known/64)
			}
			_, later := requests[1].Blocks(64)
			for i, b := range blocks[2:] {
				if later[2+i] != b {
					t.Errorf("block %d of the answer is %v, the later prompt's %v", i, b, later[2+i])
				}
			}
		})
	}
}

func TestLargerBlocksThanTheRecordingsAreEqualToTheirLastTokens(t *testing.T) {
	requests, _, err := parseTrace(strings.NewReader(`{"timestamp":0,"input_length":130,"output_length":1,"hash_ids":[1,2],"hash_block_size":64}
{"timestamp":1,"input_length":130,"output_length":1,"hash_ids":[1,3],"hash_block_size":64}`))
	if err != nil {
		t.Fatal(err)
	}
	a, _ := requests[0].Blocks(128)
	b, _ := requests[1].Blocks(128)
	if len(a) != 1 || len(b) != 1 || a[0] == b[0] {
		t.Errorf("blocks %v and %v of prompts that part after 64 tokens", a, b)
	}
}

func TestTraceErrorsNameTheLine(t *testing.T) {
	good := `{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}`
	for text, want := range map[string]string{
		"":                      "no requests",
		good + "\n{\n":          "line 2",
		good + "\nx":            "line 2",
		good + "\n\n[1]":        "line 3",
		`{"input_length": 600}`: "timestamp",
		`{"timestamp": 0, "input_length": 0, "output_length": 2}`:                                  "input_length",
		`{"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids":[1]}`:               "hash_ids",
		`{"timestamp": 0, "input_length": 9, "output_length": 2, "hints": {"total_requests": -1}}`: "total_requests",
		`{"timestamp": 0, "input_length": 9, "output_length": 2, "hints": {"osl": "huge"}}`:        "LOW, MEDIUM or HIGH",
	} {
		if _, _, err := parseTrace(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", text, err, want)
		}
	}
}

func TestTraceBlocksAreEqualExactlyAsFarAsTheHashIDsAre(t *testing.T) {
	text := `{"timestamp": 5, "input_length": 1100, "output_length": 2, "hash_ids": [1, 2, 3]}
{"timestamp": 1, "input_length": 700, "output_length": 0, "hash_ids": [1, 4]}`
	requests, _, err := parseTrace(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	if requests[0].Prompt != 700 || requests[0].Output != 1 {
		t.Fatalf("first by arrival is %+v", requests[0])
	}
	short, _ := requests[0].Blocks(64)
	long, blocks := requests[1].Blocks(64)
	if len(short) != 10 || len(long) != 17 {
		t.Fatalf("%d and %d blocks, want 10 and 17", len(short), len(long))
	}
	seen := map[uint64]bool{}
	for i, b := range blocks {
		if seen[b.Engine] || b.Local != long[i] {
			t.Errorf("block %d: engine hash seen before %v, local %d and %d", i, seen[b.Engine], b.Local, long[i])
		}
		seen[b.Engine] = true
		if i < len(short) && (short[i] == long[i]) != (i < 8) {
			t.Errorf("block %d: equal %v", i, short[i] == long[i])
		}
	}
}

func TestTornLinesAreLeftOutAndCounted(t *testing.T) {
	const good = `{"timestamp":0,"input_length":600,"output_length":2,"hash_ids":[1,2]}`
	for _, test := range []struct {
		name, text string
		torn       int
	}{
		{"none", good + "\n" + good, 0},
		{"the last", good + "\n" + good[:30], 1},
		{"its first byte", good + "\n{", 1},
		{"with the next one glued to it", good + "\n" + good[:30] + good + "\n" + good + "\n", 1},
		{"with spaces", good + "\n" + `{"timestamp": 12, "input_len`, 1},
	} {
		requests, torn, err := parseTrace(strings.NewReader(test.text))
		if err != nil || torn != test.torn || len(requests) == 0 {
			t.Errorf("%s: %d requests, %d torn, %v", test.name, len(requests), torn, err)
		}
	}
	if _, _, err := parseTrace(strings.NewReader(good[:30])); err == nil || !strings.Contains(err.Error(), "no requests") {
		t.Errorf("only a torn line: %v", err)
	}
}

// FuzzTrace reads what may stand in a trace or a record, and makes blocks of it.
func FuzzTrace(f *testing.F) {
	f.Add([]byte(`{"timestamp": 0, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}` + "\n" + `{"timestamp": 1`))
	f.Add([]byte(`{"timestamp":0,"input_length":130,"output_length":100,"hash_ids":[1,2],"hash_block_size":64,"duration_ms":50}`))
	f.Add([]byte(`{"timestamp":1e308,"input_length":9223372036854775807,"output_length":1,"hash_ids":[1],"hash_block_size":9223372036854775807}`))
	f.Add([]byte(`{"timestamp":0,"input_length":65536,"output_length":1,"hash_ids":[1],"hash_block_size":65536,"duration_ms":-1e300}`))
	f.Add([]byte("\x1f\x8b\x08\x00"))
	f.Add([]byte("\n\n{\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		requests, _, err := parseTrace(bytes.NewReader(text))
		if err != nil {
			return
		}
		for i := range requests {
			r := &requests[i]
			if r.Arrival < 0 || r.Prompt < 1 || r.Output < 1 {
				t.Fatalf("%+v", r)
			}
			for _, size := range []int{16, 64, 100} {
				local, blocks := r.Blocks(size)
				if len(local) > r.Prompt/size || len(local) > len(blocks) {
					t.Fatalf("%d blocks of the prompt, %d in all: %+v", len(local), len(blocks), r)
				}
			}
		}
	})
}
