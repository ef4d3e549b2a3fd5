package probe

import (
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/vmihailenco/msgpack/v5"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/policy"
)

// loadStat is a load message as SGLang 0.5.23 sends it.
func loadStat(running, waiting, used, capacity any) string {
	text, err := msgpack.Marshal([]any{"LoadStat", running, waiting, used, capacity, 0, 0, 0, 8, 63, 2060476})
	if err != nil {
		panic(err) // of the test's own numbers
	}
	return string(text)
}

// capturedLoadStat is one that a real server sent: idle, with a cache of 20,000 tokens.
const capturedLoadStat = "9ba84c6f616453746174000000cd4e20000000083fce001f70bc"

// TestSGLangsLoadMessages: they are msgpack, and were refused as broken JSON.
func TestSGLangsLoadMessages(t *testing.T) {
	captured, err := hex.DecodeString(capturedLoadStat)
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		text string
		want *policy.Published // nil: an error
	}{
		{"captured", string(captured), &policy.Published{}},
		{"busy", loadStat(8, 5, 15000, 20000), &policy.Published{Running: 8, Waiting: 5, KVUsage: 0.75}},
		{"of the first version", "\x96\xa8LoadStat\x02\x03\x01\x04\xc0", &policy.Published{Running: 2, Waiting: 3, KVUsage: 0.25}},
		{"capacity unknown", loadStat(1, 2, 5, 0), &policy.Published{Running: 1, Waiting: 2}},
		{"more used than there is", loadStat(1, 2, 9, 5), &policy.Published{Running: 1, Waiting: 2, KVUsage: 1}},
		{"as large as can be", loadStat(uint64(math.MaxUint64), int64(math.MaxInt64), 1, 2), &policy.Published{Running: kv.MaxTokens, Waiting: kv.MaxTokens, KVUsage: 0.5}},
		{"negative", loadStat(-1, int64(math.MinInt64), -5, 10), &policy.Published{}},
		{"no numbers", loadStat(math.NaN(), math.Inf(1), math.NaN(), 1), &policy.Published{Running: kv.MaxTokens, Waiting: kv.MaxTokens, KVUsage: 1}},
		{"JSON all the same", `{"num_waiting_reqs":1,"num_running_reqs":2,"kv_cache_usage":0.5}`, &policy.Published{Running: 2, Waiting: 1, KVUsage: 0.5}},
		{"another tag", strings.Replace(loadStat(1, 2, 3, 4), "LoadStat", "LoadStap", 1), nil},
		{"text for a number", loadStat("1", 2, 3, 4), nil},
		{"nothing for a number", loadStat(nil, 2, 3, 4), nil},
		{"too short", "\x94\xa8LoadStat\x01\x02\x03", nil},
		{"cut off", loadStat(1, 2, 3, 4)[:11], nil},
		{"a tag longer than the message", "\x9b\xdb\xff\xff\xff\xffLoadStat", nil},
		{"a list in place of the tag", "\x9b\x91\x01\x01\x02\x03\x04", nil},
		{"nothing", "", nil},
	} {
		got, err := readLoad([]byte(test.text))
		got.At = time.Time{}
		if test.want == nil && err == nil || test.want != nil && (err != nil || got != *test.want) {
			t.Errorf("%s: %+v, %v, want %+v", test.name, got, err, test.want)
		}
	}
}

// sglangMetrics is the page of a server with two ranks, the first of which has two
// processes that show the same, and priorities; sglangLoadList is the same of
// GET /v1/loads.
var (
	//go:embed testdata/sglang_metrics.txt
	sglangMetrics string
	//go:embed testdata/sglang_loads.json
	sglangLoadList string
)

func TestSGLangsPagesGiveTheLoad(t *testing.T) {
	var list sglangLoads
	if err := json.Unmarshal([]byte(sglangLoadList), &list); err != nil {
		t.Fatal(err)
	}
	for rank, want := range map[string]policy.Published{
		"": {Running: 4, Waiting: 12, KVUsage: 0.5}, "0": {Running: 1, Waiting: 12, KVUsage: 0.25}, "1": {Running: 3, KVUsage: 0.5},
	} {
		page, err := loadOn(sglangMetrics, rank)
		if page.At = (time.Time{}); err != nil || page != want {
			t.Errorf("rank %q of the page: %+v, %v, want %+v", rank, page, err, want)
		}
		listed, err := list.load(rank)
		if listed.At = (time.Time{}); err != nil || listed != want {
			t.Errorf("rank %q of the list: %+v, %v, want %+v", rank, listed, err, want)
		}
	}
	if p, err := list.load("7"); err == nil {
		t.Errorf("a rank that is not listed: %+v", p)
	}
	for _, name := range []string{sglangWaiting, sglangUsage} {
		if p, err := loadOn(strings.ReplaceAll(sglangMetrics, name, "other"), ""); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %+v, %v", name, p, err)
		}
	}
	if p, err := loadOn(strings.ReplaceAll(sglangMetrics, "7.0", "NaN"), "0"); err != nil || p.Waiting != kv.MaxTokens {
		t.Errorf("no number: %+v, %v", p, err)
	}
}

func FuzzLoadStat(f *testing.F) {
	captured, err := hex.DecodeString(capturedLoadStat)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(captured)
	for _, text := range []string{
		loadStat(8, 5, 15000, 20000), loadStat(math.NaN(), math.Inf(-1), -1e308, 1e308), loadStat(uint64(math.MaxUint64), int64(math.MinInt64), 0, -1),
		"\x9b\xdb\xff\xff\xff\xffLoadStat", "\xdd\xff\xff\xff\xff\xa8LoadStat", "\x9b\xc4\x08LoadStat\x01\x02\x03\x04", "\xdc",
	} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		if p, err := readLoadStat(payload); err == nil && !(p.Running >= 0 && p.Waiting >= 0 && p.KVUsage >= 0 && p.KVUsage <= 1 && p.Running <= kv.MaxTokens && p.Waiting <= kv.MaxTokens) {
			t.Errorf("%+v", p)
		}
	})
}

func FuzzSGLangPages(f *testing.F) {
	f.Add(sglangMetrics, sglangLoadList)
	for _, page := range []string{"sglang:num_running_reqs NaN\n", "# TYPE sglang:num_running_reqs gauge\nsglang:num_running_reqs{dp_rank=\"\"} -5\n"} {
		f.Add(page, `{"loads":[{"dp_rank":-1,"num_running_reqs":1e308,"num_used_tokens":-1,"max_total_num_tokens":-1}]}`)
	}
	f.Fuzz(func(t *testing.T, page, text string) {
		var list sglangLoads
		_ = json.Unmarshal([]byte(text), &list)
		for _, rank := range []string{"", "0"} {
			onPage, first := loadOn(page, rank)
			listed, second := list.load(rank)
			for p, err := range map[policy.Published]error{onPage: first, listed: second} {
				if err == nil && !(p.Running >= 0 && p.Waiting >= 0 && p.KVUsage >= 0 && p.KVUsage <= 1) {
					t.Errorf("%+v", p)
				}
			}
		}
	})
}
