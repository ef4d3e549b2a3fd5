package selection

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
	"kvrouter/internal/testkit/routertest"
)

// Worker 0 holds a prompt with the item 7 in its second block, of three.
func TestBlocksMatchOnlyWithTheSameMedia(t *testing.T) {
	rt := routertest.New(t, "kv", 1)
	prompt := testkit.Tokens(1, 3*testkit.BlockSize+1)
	local := kv.HashMediaBlocks(nil, prompt, testkit.BlockSize, "", "", [][]uint64{nil, {7}})
	blocks := make([]kv.StoredBlock, len(local))
	for i, engine := range kv.SequenceHashes(nil, local) {
		blocks[i] = kv.StoredBlock{Engine: engine, Local: local[i]}
	}
	radixtest.Store(rt.Index(), kv.WorkerKey{}, 0, false, blocks)
	_, ask := newFinder(t, rt)
	ids := strings.Join(strings.Fields(fmt.Sprint(prompt)), ",")
	object := func(hashes ...uint64) string {
		var list []string
		for _, h := range hashes {
			list = append(list, fmt.Sprintf(`{"mm_hash":%d,"offsets":[[0,3]]}`, h))
		}
		return `{"mm_objects":[` + strings.Join(list, ",") + `]}`
	}
	for name, c := range map[string]struct {
		infos string
		want  int // blocks
	}{
		"the same":         {`[null,` + object(7) + `,null]`, 3},
		"no item":          {`null`, 1},
		"empty list":       {`[]`, 1},
		"no objects":       {`[null,` + object() + `]`, 1},
		"another item":     {`[null,` + object(8) + `]`, 1},
		"the item twice":   {`[null,` + object(7, 7) + `]`, 1},
		"in another block": {`[` + object(7) + `]`, 0},
		"in a block more":  {`[null,` + object(7) + `,` + object(7) + `]`, 2},
		"beyond the end":   {`[null,` + object(7) + `,null,null,` + object(9) + `]`, 3},
	} {
		body := fmt.Sprintf(`{"method":"new","tokens":%s,"token_ids":%s,"block_mm_infos":%s}`, ids, ids, c.infos)
		for path, field := range map[string]string{
			"/overlap_scores": "workers.0.device_blocks", "/route": "overlap_blocks",
			"/select": "overlap.longest_matched", "/select_and_reserve": "overlap.longest_matched",
		} {
			want := c.want
			if field == "overlap.longest_matched" {
				want *= testkit.BlockSize
			}
			status, answer := ask(path, body)
			if status != http.StatusOK || !answer.Get(field).Exists() || answer.Get(field).Int() != int64(want) {
				t.Errorf("%s of %s: %d %s, want %d", path, name, status, answer, want)
			}
		}
	}
}

func TestBadMediaAreRefused(t *testing.T) {
	_, ask := newFinder(t, routertest.New(t, "kv", 1))
	for infos, want := range map[string]string{
		`{}`:                                     "block_mm_infos",
		`[7]`:                                    "block_mm_infos",
		`[{}]`:                                   "mm_objects",
		`[{"mm_objects":null}]`:                  "mm_objects",
		`[{"mm_objects":[{}]}]`:                  "mm_hash",
		`[null,{"mm_objects":[{"mm_hash":-1}]}]`: "mm_hash",
		`[null,{"mm_objects":[{"mm_hash":1.5}]}]`:                  "mm_hash",
		`[null,{"mm_objects":[{"mm_hash":"7"}]}]`:                  "mm_hash",
		`[null,{"mm_objects":[{"mm_hash":18446744073709551616}]}]`: "mm_hash",
	} {
		for _, path := range []string{"/route", "/select", "/select_and_reserve", "/overlap_scores"} {
			status, answer := ask(path, `{"method":"new","tokens":[1],"token_ids":[1],"block_mm_infos":`+infos+`}`)
			if status != http.StatusBadRequest && status != http.StatusUnprocessableEntity || !strings.Contains(answer.Get("error").Str, want) {
				t.Errorf("%s of %s: %d %s", path, infos, status, answer)
			}
		}
	}
}
