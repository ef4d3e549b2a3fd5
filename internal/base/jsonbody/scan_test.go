package jsonbody

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/testkit"
)

// jsonSeeds are texts at the borders of JSON's grammar.
var jsonSeeds = []string{``, ` `, `{}`, ` {"a":1} `, `[]`, `{"a":[1,-0.5e+10,0,true,false,null,"x"],"b":{"c":{}}}`, `{"a":1,}`, `[1,]`, `{,}`, `{"a"}`, `{"a":}`,
	`01`, `-`, `1.`, `.5`, `1e`, `-0`, `1e5`, `tru`, `nulll`, `"\u00e9\ud83d\ude00"`, `"\ud800"`, `"\udc00x"`, `"\ud800\u0041"`, `"\ud800\ud800\udc00"`, `"\u12"`, `"\x"`, "\"\n\"", "\"\x1f\"",
	`"12345678"`, `"1234567\n890"`, `"\\\\\\\"` + `"`, `{"a":"b\"c\\","a\tb":"12345678901234567890\u0000"}`, `{"a":1}{`, `[[[]]]`, "\"\xff\"", `{"a" : [ 1 , { "b" : 2 } ] , "c":3 }`, `"é日本語👩"`,
	`{"\ud83d\ude00":"\b\f\n\r\t\/"}`, `"\ud83d\\ude00"`}

// readsTheSame compares this file's reading of a text with other parsers'.
func readsTheSame(t *testing.T, text string) {
	check := checker{text: []byte(text)}
	if got, want := check.whole(), json.Valid([]byte(text)); got != want {
		t.Fatalf("%q: valid %v, want %v", text, got, want)
	} else if !got {
		return
	}
	if want := HasLoneSurrogate([]byte(text)); check.lone != want {
		t.Fatalf("%q: half a surrogate pair %v, want %v", text, check.lone, want)
	}
	sameValue(t, gjson.Parse(text), check.lone)
}

func sameValue(t *testing.T, v gjson.Result, lone bool) {
	var got, want []gjson.Result
	take := func(key, value gjson.Result) bool {
		want = append(want, key, value)
		return true
	}
	switch {
	case v.IsObject():
		eachMember(v.Raw, func(key string, value gjson.Result) bool {
			got = append(got, gjson.Result{Type: gjson.String, Str: key}, value)
			return true
		})
		v.ForEach(take)
	case v.IsArray():
		EachElement(v.Raw, func(value gjson.Result) bool {
			got = append(got, gjson.Result{}, value)
			return true
		})
		v.ForEach(take)
	default:
		return
	}
	if len(got) != len(want) {
		t.Fatalf("%s: %d members and elements, want %d", v.Raw, len(got)/2, len(want)/2)
	}
	for i := range got {
		g, w := got[i], want[i]
		if g.Type != w.Type && i%2 == 1 || !lone && g.Str != w.Str || g.Num != w.Num && i%2 == 1 || i%2 == 1 && g.Raw != w.Raw {
			t.Fatalf("%s: item %d: %+v, want %+v", v.Raw, i, g, w)
		}
		if i%2 == 1 {
			sameValue(t, g, lone)
		}
	}
}

func TestJSONReadsAsOtherParsersDo(t *testing.T) {
	for _, text := range jsonSeeds {
		readsTheSame(t, text)
	}
	for _, c := range append(testkit.ChatsForParity(), testkit.MutatedChats(rand.New(rand.NewPCG(5, 0)), 200)...) {
		readsTheSame(t, c.Body)
		for i := 0; i < len(c.Body); i += 7 { // every text is also tried broken
			readsTheSame(t, c.Body[:i])
			readsTheSame(t, c.Body[:i]+"\""+c.Body[i:])
		}
	}
}

func FuzzJSON(f *testing.F) {
	for _, text := range jsonSeeds {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		readsTheSame(t, text)
		// Even what is not JSON must be read without harm.
		if text != "" {
			eachMember(text, func(string, gjson.Result) bool { return true })
			EachElement(text, func(gjson.Result) bool { return true })
		}
		EachName(text, func(string, string) bool { return true })
	})
}

// TestAByteOrderMarkIsNoPartOfABody: engines read such bodies; those of other encodings are named.
func TestAByteOrderMarkIsNoPartOfABody(t *testing.T) {
	body, ok := Parse([]byte("\xef\xbb\xbf {\"a\":1}"))
	if !ok || string(body.Raw) != ` {"a":1}` || body.Get("a").Int() != 1 || string(body.With("b", "2").Raw) != ` {"b":2,"a":1}` {
		t.Errorf("%v, %v", body, ok)
	}
	for text, want := range map[string]string{
		"": "JSON object", "\xef\xbb\xbf": "JSON object", "\xef\xbb\xbf\xef\xbb\xbf{}": "JSON object", "[]": "JSON object",
		"\xff\xfe{\x00}\x00": "UTF-16", "\xfe\xff\x00{\x00}": "UTF-16", "{\x00}\x00": "UTF-16", "\x00\x00\x00{": "UTF-32", "{\x00\x00\x00}\x00\x00\x00": "UTF-32",
	} {
		if _, ok := Parse([]byte(text)); ok || !strings.Contains(Refusal([]byte(text)), want) {
			t.Errorf("%q: %v, %s; want %s", text, ok, Refusal([]byte(text)), want)
		}
	}
}

func TestDeepNestingIsRefused(t *testing.T) {
	for _, open := range []string{"[", `{"a":`} {
		if _, ok := Parse([]byte(`{"a":` + strings.Repeat(open, 8<<20))); ok {
			t.Errorf("%d levels of %s were taken", 8<<20, open)
		}
	}
	nested := `{"a":` + strings.Repeat("[", 9000) + strings.Repeat("]", 9000) + `}`
	if _, ok := Parse([]byte(nested)); !ok {
		t.Error("9000 levels were refused")
	}
}

// TestAmountsAreBounded tries bodies whose parts would take many times the
// memory that their text takes.
func TestAmountsAreBounded(t *testing.T) {
	members := func(n int) []byte { return []byte("{" + strings.Repeat(`"a":1,`, n-1) + `"a":1}`) }
	if _, ok := Parse(members(maxMembers)); !ok {
		t.Error("the most members allowed were refused")
	}
	if _, ok := Parse(members(maxMembers + 1)); ok {
		t.Error("more members were taken")
	}
	body, ok := Parse([]byte(`{"messages":[` + strings.Repeat("1,", 10*MaxMessages) + `1]}`))
	if !ok || len(body.Messages()) != MaxMessages+1 {
		t.Errorf("%d messages were taken apart", len(body.Messages()))
	}
	list := gjson.Parse(`[1,"a",{"b":2}]`)
	if some, ok := Elements(list, 3); !ok || len(some) != 3 || some[2].Raw != `{"b":2}` {
		t.Errorf("%v", some)
	}
	if _, ok := Elements(list, 2); ok {
		t.Error("more elements than asked for")
	}
	if some, ok := Elements(gjson.Parse(`{"a":1}`), 3); !ok || some != nil {
		t.Errorf("%v are elements of an object", some)
	}
}

func TestPlaceFindsAValue(t *testing.T) {
	raw := []byte(` {"a":1, "b" : {"c":2},"a":[3]}`)
	body, _ := Parse(raw)
	for _, key := range []string{"a", "b"} {
		v := body.Get(key)
		if at := body.Place(v); string(raw[at:at+len(v.Raw)]) != v.Raw || key == "a" && v.Raw != "[3]" {
			t.Errorf("%s is %q at %d", key, v.Raw, at)
		}
	}
}

func TestNamesAreFoundInOnePass(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                                   "",
		`{"a":1, "b" : null,"c":"d"}`:          "a b? c",
		`{"a":{"\u0062":[{"c" :null}]},"a":2}`: "a b c? a",
		`{"a":"\"x\":1"}`:                      "a",
		`[["a"],{"b\\":"c\\"}]`:                `b\`,
		`{"a":NaN,"b":`:                        "a b",
		`"`:                                    "",
		`"a`:                                   "",
		`"a":`:                                 "a",
	} {
		var got []string
		EachName(text, func(name, rest string) bool {
			if strings.HasPrefix(rest, "null") {
				name += "?"
			}
			got = append(got, name)
			return true
		})
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
	if n := testing.AllocsPerRun(10, func() { EachName(`{"a":{"b":[1,{"c":null}]}}`, func(string, string) bool { return true }) }); n > 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestEachMemberIsSeenEvenIfRepeated(t *testing.T) {
	for text, want := range map[string]string{`{}`: "", ` {"a":1,"b":2}`: "a1 b2", ` {"a":1,"b":2,"\u0061":null}`: "a1 b2 anull"} {
		for _, add := range []bool{false, true} {
			body, _ := Parse([]byte(text))
			want := want
			if add {
				body, want = body.With("z", "0"), strings.TrimSpace("z0 "+want)
			}
			var got []string
			body.Each(func(m Member) bool {
				got = append(got, m.Key+m.Value.Raw)
				return true
			})
			if strings.Join(got, " ") != want {
				t.Errorf("%s: %q, want %q", body.Raw, got, want)
			}
		}
	}
}
