package events

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/testkit/radixtest"
)

// dumpOf writes an index as one partition.
func dumpOf(t *testing.T, index *radix.Tree, blockSize int) string {
	t.Helper()
	var out bytes.Buffer
	if err := WriteDump(&out, index, blockSize, func(kv.WorkerKey) int { return blockSize }, []DumpPart{{"m:default", index.Workers()}}); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// randomIndex holds prompts with common beginnings, copies and holes.
func randomIndex(random *rand.Rand) *radix.Tree {
	index := radix.NewTree()
	for range 200 {
		w := kv.WorkerKey{Worker: random.Uint64N(3), Rank: random.Uint32N(2)}
		var blocks []kv.StoredBlock
		local := make([]uint64, 1+random.IntN(6))
		for i := range local {
			local[i] = random.Uint64N(3)
		}
		for _, h := range kv.SequenceHashes(nil, local) {
			blocks = append(blocks, kv.StoredBlock{Engine: h, Local: local[len(blocks)]})
		}
		if err := radixtest.Store(index, w, 0, false, blocks); err != nil {
			panic(err)
		}
		if random.IntN(3) == 0 {
			radixtest.Remove(index, w, []uint64{blocks[random.IntN(len(blocks))].Engine})
		}
	}
	return index
}

func TestDumpRestoresTheSameMatches(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 1))
	index := randomIndex(random)
	text := dumpOf(t, index, 4)
	restored := radix.NewTree()
	found, err := readDump(strings.NewReader(text), restored)
	if err != nil || found.LeftOut != 0 || found.Blocks == 0 || len(found.Partition) != 3 {
		t.Fatalf("%+v, %v", found, err)
	}
	for range 500 {
		local := make([]uint64, 1+random.IntN(7))
		for i := range local {
			local[i] = random.Uint64N(3)
		}
		if a, b := index.Match(local, len(local), kv.AllParts, nil), restored.Match(local, len(local), kv.AllParts, nil); !slices.Equal(a, b) {
			t.Fatalf("%v: %v, restored %v", local, a, b)
		}
	}
	again, err := readDump(strings.NewReader(dumpOf(t, restored, 4)), radix.NewTree())
	if err != nil || again.Blocks != found.Blocks || again.LeftOut != 0 {
		t.Errorf("the dump of the restored index: %+v, %v; the first: %+v", again, err, found)
	}
}

// event is a store event as text.
func dumpText(size int, events ...string) string {
	return fmt.Sprintf(`{"m:default":{"block_size":%d,"events":[%s]}}`, size, strings.Join(events, ","))
}

func dumpEventText(tier, parent, position string, block int) string {
	return fmt.Sprintf(`{"worker_id":1,"storage_tier":%q,"event":{"event_id":0,"data":{"stored":{"parent_hash":%s,"start_position":%s,"blocks":[{"block_hash":%d,"tokens_hash":%d}]}},"dp_rank":0}}`,
		tier, parent, position, block, block)
}

func TestDumpLeavesOutWhatHasNoPlace(t *testing.T) {
	for _, c := range []struct {
		name            string
		text            string
		blocks, leftOut int
	}{
		{"a prompt's first block", dumpText(4, dumpEventText("device", "null", "null", 7)), 1, 0},
		{"two in a row", dumpText(4, dumpEventText("device", "null", "0", 7), dumpEventText("device", "7", "1", 8)), 2, 0},
		{"an unknown parent", dumpText(4, dumpEventText("device", "6", "null", 7)), 0, 1},
		{"its own parent", dumpText(4, dumpEventText("device", "7", "null", 7)), 0, 1},
		{"a place without a parent", dumpText(4, dumpEventText("device", "null", "3", 7)), 0, 1},
		{"another tier", dumpText(4, dumpEventText("tape", "null", "null", 7)), 0, 1},
		{"another block size", dumpText(8, dumpEventText("device", "null", "null", 7)), 1, 0},
		{"other events", dumpText(4, `{"worker_id":1,"event":{"event_id":0,"data":"cleared","dp_rank":0}}`, `{"worker_id":1,"event":{"data":{"removed":{"block_hashes":[1]}}}}`), 0, 0},
		{"unknown members", `{"a:b:c":{"since":{"x":[1]},"block_size":4,"events":[]}}`, 0, 0},
		{"nothing", `{}`, 0, 0},
	} {
		index := radix.NewTree()
		found, err := readDump(strings.NewReader(c.text), index)
		held := index.Blocks(kv.WorkerKey{Worker: 1})
		if err != nil || found.Blocks != c.blocks || found.LeftOut != c.leftOut || held != c.blocks {
			t.Errorf("%s: %d stored, %d left out, %d held, %v; want %d and %d", c.name, found.Blocks, found.LeftOut, held, err, c.blocks, c.leftOut)
		}
	}
}

// Dynamo's dumps have lower tiers among the others, and in no order.
func TestDumpOfDynamoHasLowerTiers(t *testing.T) {
	index := radix.NewTree()
	text := dumpText(4, dumpEventText("Host_Pinned", "7", "null", 8), dumpEventText("disk", "8", "null", 9), dumpEventText("device", "null", "0", 7))
	if found, err := readDump(strings.NewReader(text), index); err != nil || found.LeftOut > 0 {
		t.Fatalf("%+v: %v", found, err)
	}
	got := index.LowerOf(kv.WorkerKey{Worker: 1})
	if want := (radix.LowerState{Own: kv.LowerBlocks{Host: 1, Disk: 1}}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if err := index.Check(); err != nil {
		t.Error(err)
	}
}

func TestBrokenDumpsAreErrors(t *testing.T) {
	good := dumpText(4, dumpEventText("device", "null", "null", 7), dumpEventText("device", "7", "null", 8))
	for _, text := range []string{
		``, `x`, `[]`, `{"m":{}}`, `{"m:g":[]}`, `{"m:g":{"events":[],"block_size":4}}`, `{"m:g":{"block_size":4,"events":{}}}`,
		`{"m:g":{"block_size":4,"events":[{"worker_id":-1}]}}`, `{"m:g":{"block_size":4,"events":[{"event":{"data":{"stored":{"blocks":[{"block_hash":"x"}]}}}}]}}`,
		good[:len(good)-1], good[:len(good)-5], good[:len(good)/2],
	} {
		if found, err := readDump(strings.NewReader(text), radix.NewTree()); err == nil {
			t.Errorf("%.80q: no error, but %+v", text, found)
		}
	}
}

// TestDumpsOfManyBlocksAreReadInParts: the blocks of a rank's groups were one value.
func TestDumpsOfManyBlocksAreReadInParts(t *testing.T) {
	index, key := radix.NewTree(), kv.WorkerKey{Worker: 1}
	layout, err := kv.ParseLayout("0:full_attention/4 1:sliding_window=8/4")
	if err != nil {
		t.Fatal(err)
	}
	radixtest.SetLayout(index, key, layout, 4)
	const many = 200_000
	engines := make([]uint64, many)
	for i := range engines {
		engines[i] = uint64(i) << 40
	}
	_, _ = index.Apply(key, &radix.Change{Kind: radix.Held, Group: 1, Hashes: engines})
	text := dumpOf(t, index, 4)
	largest := 0
	for _, value := range strings.SplitAfter(text, "}") {
		largest = max(largest, len(value))
	}
	if largest > 64<<10 {
		t.Errorf("a value of %d bytes", largest)
	}
	restored := radix.NewTree()
	if _, err := readDump(strings.NewReader(text), restored); err != nil || restored.AllBlocks(key) != many || restored.LayoutOf(key).String() != layout.String() {
		t.Errorf("%d blocks of %s: %v", restored.AllBlocks(key), restored.LayoutOf(key), err)
	}
}

// endless is a text that repeats its second part.
type endless struct{ first, again string }

func (e *endless) Read(to []byte) (n int, err error) {
	for n < len(to) {
		if e.first == "" {
			e.first = e.again
		}
		more := copy(to[n:], e.first)
		e.first = e.first[more:]
		n += more
	}
	return n, nil
}

func TestDumpsWithoutEndAreErrors(t *testing.T) {
	for name, text := range map[string]endless{
		"blocks of a group": {`{"m:g":{"block_size":4,"cache_groups":[{"worker_id":1,"layout":"0:full_attention/4 1:mamba/4","held":[{"group":1,"blocks":[1`, `,1`},
		"an event":          {`{"m:g":{"block_size":4,"events":[{"event":{"data":{"stored":{"blocks":[{"block_hash":1}`, `,{"block_hash":1}`},
		"an unknown member": {`{"m:g":{"block_size":4,"other":["`, `x`},
		"a name":            {`{"m`, `:`},
		"white space":       {`{"m:g":`, ` `},
	} {
		if _, err := readDump(&text, radix.NewTree()); err == nil || !strings.Contains(err.Error(), "a value is larger than 16777216 bytes") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzDump(f *testing.F) {
	f.Add(dumpText(4, dumpEventText("device", "null", "null", 7), dumpEventText("device", "7", "null", 8)))
	f.Add(dumpText(4, dumpEventText("host_pinned", "7", "null", 8), dumpEventText("tape", "null", "null", 7)))
	f.Add(`{"m:g":{"block_size":4,"events":[],"lower_tiers":[{"worker_id":1,"dp_rank":0,"change":{"stores":["s"]}},{"worker_id":1,"change":{"tier":"disk","shared":true,"store":"s","stored":{"parent_hash":7,"blocks":[{"block_hash":8,"tokens_hash":8}]}}},{"worker_id":1,"change":{"tier":"host","held":[7]}},{"worker_id":1,"change":{"chunk":4,"doubtful":true}}]}}`)
	f.Fuzz(func(t *testing.T, text string) {
		index := radix.NewTree()
		found, err := readDump(strings.NewReader(text), index)
		if err == nil && found.Blocks > len(text) {
			t.Errorf("%d blocks out of %d bytes", found.Blocks, len(text))
		}
	})
}

// peer answers GET /dump.
func peer(t *testing.T, status int, text string) string {
	t.Helper()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(status)
		fmt.Fprint(w, text)
	}))
	t.Cleanup(server.Close)
	return server.URL
}

func TestRecoveryTakesTheFirstPeerThatHasAnIndex(t *testing.T) {
	good := dumpText(4, dumpEventText("device", "null", "null", 7), dumpEventText("device", "7", "null", 8))
	down := peer(t, 503, ``)
	broken := peer(t, 200, good[:len(good)-3])
	index := radix.NewTree()
	log := slog.New(slog.DiscardHandler)
	found, err := RecoverIndex(t.Context(), index, "", []string{down, broken, peer(t, 200, good), down}, log)
	if err != nil || found.Blocks != 2 || index.Blocks(kv.WorkerKey{Worker: 1}) != 2 {
		t.Errorf("%+v, %v", found, err)
	}
	index = radix.NewTree()
	_, err = RecoverIndex(t.Context(), index, "", []string{down, broken}, log)
	if err == nil || !strings.Contains(err.Error(), down) || !strings.Contains(err.Error(), broken) || len(index.Workers()) != 0 {
		t.Errorf("%v; the index knows %v", err, index.Workers())
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := RecoverIndex(ctx, index, "", []string{down}, log); err == nil {
		t.Error("recovered after the end")
	}
}
