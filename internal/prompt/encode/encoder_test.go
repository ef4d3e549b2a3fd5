package encode

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/testkit/nativetest"
)

// sameByBoth compares the tokens of a text by both encoders.
func sameByBoth(t interface{ Fatalf(string, ...any) }, m *model, text string) {
	for _, addSpecial := range []bool{false, true} {
		want := exactTokens(t, m, text, addSpecial)
		if got, _ := Pieces(m.Encode).whole(text, addSpecial); !slices.Equal(got, want) {
			t.Fatalf("special %v: %.300q\n got %v\nwant %v", addSpecial, text, got, want)
		}
	}
}

// TestTheFastEncoderIsExact holds fastokens against crate tokenizers: every code point
// between others that cut words, what probes are made of in random orders with added
// tokens in between, and random texts. With short tests a part of each.
func TestTheFastEncoderIsExact(t *testing.T) {
	for name, m := range segmentModels(t) {
		t.Run(name, func(t *testing.T) {
			if encoder, why := m.Library(); encoder != "fastokens" {
				t.Fatalf("%s encodes: %s", encoder, why)
			}
			step, texts := rune(1), 3000
			if testing.Short() {
				step, texts = 64, 200
			}
			around := [][2]string{{"a", "b"}, {" ", "1"}, {"1", " "}, {"\n", "\n"}, {"'s", ". "}, {"A", "Z"}, {"日", "中"}, {"e", "\u0301"}}
			for block := rune(0); block <= utf8.MaxRune; block += 64 * step {
				if block >= 0x34000 && block < 0xe0000 || block >= 0xe0200 { // assigned to nobody, or for private use
					continue
				}
				var text strings.Builder
				for c := block; c < block+64; c++ {
					if !utf8.ValidRune(c) {
						continue
					}
					for _, pair := range around {
						text.WriteString(pair[0] + string(c) + pair[1] + "x")
					}
				}
				sameByBoth(t, m, text.String())
			}
			random := rand.New(rand.NewPCG(7, 7))
			for end := time.Now().Add(20 * time.Second); texts > 0 && time.Now().Before(end); texts-- {
				sameByBoth(t, m, randomText(random, m.raw))
			}
			if texts > 0 {
				t.Logf("%d texts left when the time was up", texts)
			}
		})
	}
}

// randomText returns up to 12 pieces: of probes, of added tokens, cut ones too, and
// characters of all scripts.
func randomText(random *rand.Rand, tokenizerJSON []byte) string {
	pieces := slices.Concat(probePieces, borders)
	added := gjson.GetBytes(tokenizerJSON, "added_tokens").Array()
	scripts := []rune{' ', 'a', 'A', '0', 0x300, 0x3b1, 0x430, 0x5d0, 0x627, 0x905, 0xe01, 0x1100, 0x2000, 0x2190, 0x3040, 0x4e00, 0xac00, 0xff00, 0x1d400, 0x1f300, 0x1f900}
	var text strings.Builder
	for range 1 + random.IntN(12) {
		switch kind := random.IntN(4); {
		case kind == 0:
			text.WriteString(pieces[random.IntN(len(pieces))])
		case kind == 1 && len(added) > 0:
			token := added[random.IntN(len(added))].Get("content").Str
			text.WriteString(strings.ToValidUTF8(token[:random.IntN(len(token)+1)], ""))
			text.WriteString(added[random.IntN(len(added))].Get("content").Str)
		case kind == 2:
			text.WriteString(strings.Repeat([]string{" ", "\n", "a", "é", "中", "=", "\t "}[random.IntN(7)], random.IntN(300)))
		default:
			base := scripts[random.IntN(len(scripts))]
			for range random.IntN(20) {
				text.WriteRune(base + rune(random.IntN(90)))
				if random.IntN(4) == 0 {
					text.WriteByte(' ')
				}
			}
		}
	}
	return text.String()
}

// FuzzEncoders compares both encoders on what the fuzzer finds.
func FuzzEncoders(f *testing.F) {
	for _, text := range probePieces {
		f.Add(text, true)
	}
	f.Add("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", false)
	m := testModel(f)
	f.Fuzz(func(t *testing.T, text string, addSpecial bool) {
		if strings.IndexByte(text, 0) >= 0 || !utf8.ValidString(text) || len(text) > 1<<16 {
			return
		}
		want := exactTokens(t, m, text, addSpecial)
		for _, when := range []string{"first", "again"} {
			if got, ok := m.segments.Encode(text, addSpecial); !ok || !slices.Equal(got, want) {
				t.Fatalf("%s, special %v: %q\n got %v\nwant %v", when, addSpecial, text, got, want)
			}
		}
	})
}

// byteTokenizer is a byte-level BPE with these added tokens. It has no token for the
// byte 4, as SmolLM2's has none.
func byteTokenizer(added string) string {
	var vocab strings.Builder
	unprintable := rune(256) // GPT-2 names bytes that cannot be printed from here on
	for b := range rune(256) {
		name := b
		if b < '!' || b > '~' && b < 0xa1 || b == 0xad {
			name = unprintable
			unprintable++
		}
		switch {
		case b < 4:
			fmt.Fprintf(&vocab, "%s:%d,", jsonbody.AppendString(nil, string(name)), b)
		case b > 4:
			fmt.Fprintf(&vocab, "%s:%d,", jsonbody.AppendString(nil, string(name)), b-1)
		}
	}
	vocab.WriteString(`"ab":255,"Ġab":256,"<x>":257,"<Y>":258`)
	return `{"version":"1.0","added_tokens":[` + added + `],"normalizer":null,"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},` +
		`"post_processor":{"type":"TemplateProcessing","single":[{"SpecialToken":{"id":"<Y>","type_id":0}},{"Sequence":{"id":"A","type_id":0}}],"pair":[{"Sequence":{"id":"A","type_id":0}},{"Sequence":{"id":"B","type_id":1}}],"special_tokens":{"<Y>":{"id":"<Y>","ids":[258],"tokens":["<Y>"]}}},"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true},` +
		`"model":{"type":"BPE","vocab":{` + vocab.String() + `},"merges":["a b","Ġ ab"]}}`
}

// TestAddedTokensOfEveryKindAreEncodedExactly tries the flags of added tokens, with and
// without a normalizer, and what special tokens are put around a text.
func TestAddedTokensOfEveryKindAreEncodedExactly(t *testing.T) {
	flags := []string{"lstrip", "rstrip", "single_word", "normalized", "special"}
	added := `{"id":258,"content":"<Y>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}`
	var names []string
	for bits := range 1 << len(flags) {
		names = append(names, fmt.Sprintf("<x%d>", bits))
		added += fmt.Sprintf(`,{"id":%d,"content":"%s"`, 259+bits, names[bits])
		for i, flag := range flags {
			added += fmt.Sprintf(`,"%s":%v`, flag, bits>>i&1 == 1)
		}
		added += "}"
	}
	texts := []string{"", "<x>", "ab<x>ab", "ab <x> ab", " <x>", "<x> ", "<x><x>", "<x>\n\n<x>", "a<X>b", "<Y>", "<x><Y> ab", "ab<x", "x><x>>", "ab <x>ab <Y>", "\x04<x>é"}
	file := byteTokenizer(added)
	for _, normalizer := range []string{"null", `{"type":"Lowercase"}`, `{"type":"NFC"}`, `{"type":"Replace","pattern":{"String":" "},"content":"_"}`} {
		file := strings.Replace(file, `"normalizer":null`, `"normalizer":`+normalizer, 1)
		m := openedText(t, file)
		name, why := m.Library()
		t.Logf("normalizer %s: encoded by %s %s", normalizer, name, why)
		for i, name := range names {
			spelled := strings.NewReplacer("<x>", name, "<X>", strings.ToUpper(name), "<Y>", names[(i+7)%len(names)])
			for _, text := range texts {
				sameByBoth(t, m, spelled.Replace(text))
				sameTokens(t, m, spelled.Replace(text))
			}
		}
	}
}

func TestWhatFastokensDoesNotTakeIsEncodedByTokenizers(t *testing.T) {
	words := openedText(t, wordTokenizer(cleanToken, whitespaceWords))
	if name, why := words.Library(); name != "tokenizers" || !strings.Contains(why, "unsupported") {
		t.Errorf("a model of words is encoded by %s: %s", name, why)
	}
	m := openedText(t, byteTokenizer(""))
	if name, why := m.Library(); name != "fastokens" {
		t.Fatalf("encoded by %s: %s", name, why)
	}
	if m.exact != nil {
		t.Error("both encoders are kept in memory")
	}
	sameByBoth(t, m, "ab\x04ab é") // bytes that the vocabulary lacks: fastokens refuses the text
	if m.exact == nil {
		t.Error("no text was left to crate tokenizers")
	}
	// A piece that is no part of the text is read beyond its end, which panics.
	if got, ok := m.Encode("ab", []string{"ab", strings.Clone("ab ab")}, false); !ok || !slices.Equal(slices.Concat(got...), []uint32{255, 255, 256}) {
		t.Errorf("after a panic: %v, %v", got, ok)
	}
	sameByBoth(t, m, "ab ab")
}

func TestAnEncoderThatDiffersIsNotUsed(t *testing.T) {
	make := func(file string) *Encoder {
		e, err := New(nativetest.Library(t), []byte(file), func() ([]byte, error) { return []byte(file), nil })
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Close)
		return e
	}
	one := make(byteTokenizer(""))
	other := make(strings.Replace(byteTokenizer(""), `"a b",`, "", 1))
	if text, differs := one.differs(probeTexts(nil)); differs {
		t.Errorf("differs from itself for %q", text)
	}
	if text, differs := (&Encoder{fast: other.fast, exact: one.exact, read: one.read, sum: one.sum}).differs([]string{"a", "ab"}); !differs || text != "ab" {
		t.Errorf("%q, %v", text, differs)
	}
}

func TestDecodeReturnsTheWholeTextOrAnError(t *testing.T) {
	grow := `{"type":"Replace","pattern":{"String":"a"},"content":"` + strings.Repeat("a", 50) + `"}`
	bytes := `{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}`
	plain := byteTokenizer("")
	grows := strings.Replace(plain, `"decoder":`+bytes, `"decoder":{"type":"Sequence","decoders":[`+bytes+strings.Repeat(","+grow, 8)+`]}`, 1)
	for _, c := range []struct {
		file   string
		tokens []uint32
		text   string // where there is no error
		reason string // of the error
	}{
		{file: plain, tokens: nil, text: ""},
		{file: plain, tokens: []uint32{255, 256}, text: "ab ab"},
		{file: plain, tokens: []uint32{0, 255, 0, 0, 256, 0}, text: "\x00ab\x00\x00 ab\x00"},
		{file: plain, tokens: []uint32{'a' - 1, 0xff - 1, 0xc0 - 1, 0x80 - 1}, text: "a\ufffd\ufffd\ufffd"},
		{file: plain, tokens: []uint32{1 << 31}, text: ""}, // the model has no such token
		{file: grows, tokens: []uint32{'b' - 1}, text: "b"},
		{file: grows, tokens: []uint32{'a' - 1}, reason: "the limit of memory"},
	} {
		e, err := New(nativetest.Library(t), []byte(c.file), func() ([]byte, error) { return []byte(c.file), nil })
		if err != nil {
			t.Fatal(err)
		}
		text, err := e.Decode(c.tokens)
		if text != c.text || (err == nil) != (c.reason == "") || err != nil && !strings.Contains(err.Error(), c.reason) {
			t.Errorf("%v: %.100q, %v; want %q, error %q", c.tokens, text, err, c.text, c.reason)
		}
		if text, err := e.Decode([]uint32{'b' - 1}); text != "b" || err != nil {
			t.Errorf("after %v: %.100q, %v", c.tokens, text, err)
		}
		e.Close()
	}
}

func TestATokenizerFileThatChangedIsNotRead(t *testing.T) {
	file, missing := byteTokenizer(""), error(nil)
	m := opened(t, func() ([]byte, error) { return []byte(file), missing })
	file = strings.Replace(file, `"a b",`, "", 1)
	if got, ok := m.segments.Encode("\x04", false); ok || len(got) != 0 {
		t.Errorf("read all the same: %v", got)
	}
	if text, err := m.Decode([]uint32{1}); err == nil || text != "" {
		t.Errorf("read all the same: %q", text)
	}
	missing = errors.New("gone")
	if _, err := m.loadExact(); err != missing {
		t.Error(err)
	}
}

// TestManyEncodeAtOnce has goroutines encode the same texts and others.
func TestManyEncodeAtOnce(t *testing.T) {
	m := testModel(t)
	var wait sync.WaitGroup
	for g := range 32 {
		wait.Go(func() {
			random := rand.New(rand.NewPCG(uint64(g%4), 3))
			for range 30 {
				text := randomText(random, m.raw)
				want := exactTokens(t, m, text, false)
				if got, ok := m.segments.Encode(text, false); !ok || !slices.Equal(got, want) {
					t.Errorf("%.200q\n got %v\nwant %v", text, got, want)
				}
			}
		})
	}
	wait.Wait()
}
