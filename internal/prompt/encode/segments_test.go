package encode

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/native"
	"kvrouter/internal/testkit"
)

// model is a tokenizer with its cache of pieces.
type model struct {
	*Encoder
	segments *Segments
	raw      []byte // tokenizer.json
	dir      string // of the model's other files; empty: it has none
}

// open makes a model of the tokenizer.json that read returns.
func open(read func() ([]byte, error)) (*model, error) {
	read = WithoutLimits(read)
	raw, err := read()
	if err != nil {
		return nil, err
	}
	library, err := native.Open()
	if err != nil {
		return nil, err
	}
	e, err := New(library, raw, read)
	if err != nil {
		return nil, err
	}
	return &model{Encoder: e, segments: NewSegments(raw, e.Encode, DefaultCache), raw: raw}, nil
}

func openFolder(dir string) (*model, error) {
	path := filepath.Join(dir, "tokenizer.json")
	m, err := open(func() ([]byte, error) { return os.ReadFile(path) })
	if err != nil {
		return nil, err
	}
	m.dir = dir
	tokenizerJSON, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	library, err := native.Open()
	if err != nil {
		return nil, err
	}
	if square, err := Check(library, tokenizerJSON); square || err != nil {
		return nil, fmt.Errorf("%s is not bounded: square %v, %v", path, square, err)
	}
	return m, nil
}

// opened is open for the time of a test.
func opened(t testing.TB, read func() ([]byte, error)) *model {
	t.Helper()
	m, err := open(read)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	return m
}

func openedText(t testing.TB, tokenizerJSON string) *model {
	t.Helper()
	return opened(t, func() ([]byte, error) { return []byte(tokenizerJSON), nil })
}

// testModel returns the model that the workers of the end-to-end tests serve, which all
// tests share: opening it takes longer than most of them.
func testModel(t testing.TB) *model {
	t.Helper()
	m, err := sharedModel()
	if err != nil && testing.Short() {
		t.Skip("the test model is not set up: ", err)
	}
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	return m
}

var sharedModel = sync.OnceValues(func() (*model, error) {
	return openFolder(filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"))
})

// segmentModels opens SmolLM2 and whatever other model folders
// $KVROUTER_TOKENIZERS holds; `make segments` fetches those of the parity test.
func segmentModels(t *testing.T) map[string]*model {
	t.Helper()
	models := map[string]*model{"smollm2": testModel(t)}
	files, _ := filepath.Glob(filepath.Join(os.Getenv("KVROUTER_TOKENIZERS"), "*", "tokenizer.json"))
	for _, path := range files {
		m, err := openFolder(filepath.Dir(path))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(m.Close)
		models[filepath.Base(filepath.Dir(path))] = m
	}
	return models
}

// renderedChats returns the texts of the chats that the model's template renders.
func renderedChats(t *testing.T, m *model, chats []testkit.ParityChat) (texts []string) {
	t.Helper()
	files, err := chat.ReadFiles(m.dir, chat.DefaultLimits)
	if err != nil {
		t.Fatal(err)
	}
	renderer := chat.NewRenderer(files, chat.Options{})
	defer renderer.Close()
	for _, c := range chats {
		body, err := chat.ParseBody([]byte(c.Body))
		if err != nil {
			continue
		}
		kind := chat.Completion
		if c.Kind == "tokenize" {
			kind = chat.Tokenize
		}
		request, err := renderer.Parse(body, kind)
		if err != nil {
			continue
		}
		if rendered, err := renderer.Render(request); err == nil {
			texts = append(texts, strings.Clone(rendered.Text))
			rendered.Free()
		}
	}
	return texts
}

// exactTokens returns what the tokenizer library itself makes of a text: with the tokens
// around it, which are removed for the other case.
func exactTokens(t interface{ Fatalf(string, ...any) }, m *model, text string, addSpecial bool) []uint32 {
	tokens := make([][]uint32, 1)
	if !m.encodeExact(tokens, []string{text}, true, func(int) bool { return true }) {
		t.Fatalf("the library cannot encode %q", text)
	}
	if addSpecial {
		return tokens[0]
	}
	return tokens[0][len(m.segments.before) : len(tokens[0])-len(m.segments.after)]
}

// sameTokens compares a text's tokens, cut and remembered, with what the
// tokenizer library itself makes of the whole.
func sameTokens(t interface{ Fatalf(string, ...any) }, m *model, text string) {
	for _, addSpecial := range []bool{false, true} {
		want := exactTokens(t, m, text, addSpecial)
		for _, when := range []string{"first", "again"} {
			if got, ok := m.segments.Encode(text, addSpecial); !ok || !slices.Equal(got, want) {
				t.Fatalf("%s, special %v: %q\n got %v\nwant %v", when, addSpecial, text, got, want)
			}
		}
	}
}

// TestSegmentsAreExact holds the tokens of texts in pieces against the tokens of
// whole texts: rendered chats, and random texts of special tokens, pieces of
// them, and what tokenizers treat in special ways.
func TestSegmentsAreExact(t *testing.T) {
	for name, m := range segmentModels(t) {
		t.Run(name, func(t *testing.T) {
			if !m.segments.cuts() {
				t.Fatal("texts are not cut")
			}
			chats := append(testkit.ChatsForParity(), testkit.MutatedChats(rand.New(rand.NewPCG(4, 0)), 600)...)
			rendered := renderedChats(t, m, chats)
			for _, text := range rendered {
				sameTokens(t, m, text)
			}
			var names []string
			for _, pass := range m.segments.passes {
				names = append(names, slices.Sorted(maps.Keys(pass.tokens))...)
			}
			if len(names) > 60 {
				rand.New(rand.NewPCG(1, 0)).Shuffle(len(names), func(i, j int) { names[i], names[j] = names[j], names[i] })
				names = names[:60]
			}
			special := rapid.OneOf(rapid.SampledFrom(names), rapid.Custom(func(t *rapid.T) string {
				name := rapid.SampledFrom(names).Draw(t, "of")
				return name[:rapid.IntRange(0, len(name)).Draw(t, "cut")]
			}))
			piece := rapid.OneOf(special, rapid.SampledFrom(borders), rapid.String(), rapid.StringMatching(`[ \n\t]{0,4}[a-zA-Z0-9'.,!? éß]{0,12}`))
			rapid.Check(t, func(t *rapid.T) {
				text := strings.ToValidUTF8(strings.Join(rapid.SliceOfN(piece, 0, 12).Draw(t, "pieces"), ""), "\ufffd")
				sameTokens(t, m, text)
			})
			t.Logf("%d rendered chats equal; %d added tokens", len(rendered), len(names))
		})
	}
}

// wordTokenizer is a tokenizer.json that makes each word a token, with <x> as an added
// token of these properties, and rest between its normalizer and its vocabulary.
func wordTokenizer(token, rest string) string {
	return `{"version":"1.0","added_tokens":[{"id":1,"content":"<x>",` + token + `}],"normalizer":null,` + rest +
		`"model":{"type":"WordLevel","vocab":{"<unk>":0,"<x>":1,"a":2,"b":3,"▁a":4,"▁b":5,"A":6},"unk_token":"<unk>"}}`
}

const (
	cleanToken      = `"special":true,"single_word":false,"lstrip":false,"rstrip":false,"normalized":false`
	whitespaceWords = `"pre_tokenizer":{"type":"Whitespace"},"post_processor":null,"decoder":null,`
)

// TestSegmentsLeaveOddTokenizersAlone tries tokenizers where cutting would be
// wrong, or is only where a token is.
func TestSegmentsLeaveOddTokenizersAlone(t *testing.T) {
	for name, test := range map[string]struct {
		file string
		cuts bool
	}{
		"a clean token":                     {wordTokenizer(cleanToken, whitespaceWords), true},
		"no added token":                    {strings.Replace(wordTokenizer(cleanToken, whitespaceWords), `"added_tokens":[{"id":1,"content":"<x>",`+cleanToken+`}]`, `"added_tokens":[]`, 1), false},
		"takes space":                       {wordTokenizer(strings.Replace(cleanToken, `"lstrip":false`, `"lstrip":true`, 1), whitespaceWords), true},
		"minds its neighbours":              {wordTokenizer(strings.Replace(cleanToken, `"single_word":false`, `"single_word":true`, 1), whitespaceWords), true},
		"prefix at the text's start only":   {wordTokenizer(cleanToken, `"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"first","split":true},"post_processor":null,"decoder":null,`), false},
		"prefix at every piece":             {wordTokenizer(cleanToken, `"pre_tokenizer":{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true},"post_processor":null,"decoder":null,`), true},
		"normalized, behind no normalizer":  {wordTokenizer(strings.Replace(cleanToken, `"normalized":false`, `"normalized":true`, 1), whitespaceWords), true},
		"normalized, behind a normalizer":   {strings.Replace(wordTokenizer(strings.Replace(cleanToken, `"normalized":false`, `"normalized":true`, 1), whitespaceWords), `"normalizer":null`, `"normalizer":{"type":"Lowercase"}`, 1), false},
		"not normalized, with a normalizer": {strings.Replace(wordTokenizer(cleanToken, whitespaceWords), `"normalizer":null`, `"normalizer":{"type":"Lowercase"}`, 1), true},
	} {
		m := openedText(t, test.file)
		if m.segments.cuts() != test.cuts {
			t.Errorf("%s: cuts %v", name, m.segments.cuts())
		}
		for _, text := range []string{"", "a", "a b", "<x>", "a<x>b", "a <x> b", "<x><x>", " <x>", "a <x>", "b<x>a <x", "A<x>a", "<x> <x>"} {
			want := exactTokens(t, m, text, false)
			if got, ok := m.segments.Encode(text, false); !ok || !slices.Equal(got, want) {
				t.Errorf("%s: %q: %v, %v, want %v", name, text, got, ok, want)
			}
		}
	}
}

func TestSegmentCacheKeepsToItsBound(t *testing.T) {
	const limit = 1 << 14
	c := newSegmentCache(limit)
	var wait sync.WaitGroup
	for g := range 4 {
		wait.Go(func() {
			for i := range 2000 {
				key := c.key(fmt.Sprint(i % 700))
				if tokens, ok := c.get(key); ok && (len(tokens) != i%700%90 || len(tokens) > 0 && tokens[0] != uint32(i%700)) {
					t.Errorf("goroutine %d: %d has tokens %v", g, i, tokens)
				} else if !ok {
					c.put(key, slices.Repeat([]uint32{uint32(i % 700)}, i%700%90))
				}
			}
		})
	}
	wait.Wait()
	for i := range c.shards {
		shard := &c.shards[i]
		used, ring := 0, 0
		for e := shard.oldest.next; e != &shard.oldest; e = e.next {
			used += len(e.tokens) + segmentCost
			ring++
			if shard.entries[e.key] != e {
				t.Error("an entry of the ring is not in the map")
			}
		}
		if used != shard.used || used > limit/segmentShards || ring != len(shard.entries) {
			t.Errorf("shard %d: %d used, %d counted, %d of %d entries in the ring", i, used, shard.used, ring, len(shard.entries))
		}
	}
	// What was used last stays, what does not fit is not taken.
	c = newSegmentCache(8 * (2*segmentCost + 2))
	sameShard := func(n int) string {
		for i := 0; ; i++ {
			text := fmt.Sprint(n, " ", i)
			if c.key(text).Lo%segmentShards == 0 {
				return text
			}
		}
	}
	first, second, third := c.key(sameShard(1)), c.key(sameShard(2)), c.key(sameShard(3))
	c.put(first, []uint32{1})
	c.put(second, []uint32{2})
	c.get(first)
	c.put(third, []uint32{3})
	if _, ok := c.get(second); ok {
		t.Error("the piece unused longest is still there")
	}
	if _, ok := c.get(first); !ok {
		t.Error("the piece used last is gone")
	}
	c.put(c.key("large"), make([]uint32, 1000))
	if _, ok := c.get(c.key("large")); ok {
		t.Error("a piece larger than a shard is remembered")
	}
}
