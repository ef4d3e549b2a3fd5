package simulate

import (
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
			requests, err := parseTrace(strings.NewReader(first + test.later))
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
	requests, err := parseTrace(strings.NewReader(`{"timestamp":0,"input_length":130,"output_length":1,"hash_ids":[1,2],"hash_block_size":64}
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
		good + "\n{":            "line 2",
		good + "\n\n[1]":        "line 3",
		`{"input_length": 600}`: "timestamp",
		`{"timestamp": 0, "input_length": 0, "output_length": 2}`:                                  "input_length",
		`{"timestamp": 0, "input_length": 1024, "output_length": 2, "hash_ids":[1]}`:               "hash_ids",
		`{"timestamp": 0, "input_length": 9, "output_length": 2, "hints": {"total_requests": -1}}`: "total_requests",
		`{"timestamp": 0, "input_length": 9, "output_length": 2, "hints": {"osl": "huge"}}`:        "LOW, MEDIUM or HIGH",
	} {
		if _, err := parseTrace(strings.NewReader(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want one with %q", text, err, want)
		}
	}
}

func TestTraceBlocksAreEqualExactlyAsFarAsTheHashIDsAre(t *testing.T) {
	text := `{"timestamp": 5, "input_length": 1100, "output_length": 2, "hash_ids": [1, 2, 3]}
{"timestamp": 1, "input_length": 700, "output_length": 0, "hash_ids": [1, 4]}`
	requests, err := parseTrace(strings.NewReader(text))
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
