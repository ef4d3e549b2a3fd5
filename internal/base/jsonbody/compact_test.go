package jsonbody

import (
	"encoding/json"
	"reflect"
	"testing"
)

func TestCompactTextsKeepTheirValue(t *testing.T) {
	for text, want := range map[string]string{
		`{"a":1}`:                        `{"a":1}`,
		" {\t\"a\" : [ 1 , \"b c\" ]\n}": `{"a":[1,"b c"]}`,
		`{"\u0061b":"\u0061 : \" , "}`:   `{"ab":"\u0061 : \" , "}`,
		`{ }`:                            `{}`,
		`{"a": -Infinity}`:               `{"a":-Infinity}`,
		`{"a":1 2}`:                      "", `[1]`: "", `{"a`: "", `"a"`: "", "": "", `{"a":"}`: "",
	} {
		got, ok := Compact([]byte("x"), []byte(text))
		if ok != (want != "") || string(got) != "x"+want {
			t.Errorf("%q became %q, %v, want %q", text, got, ok, want)
		}
		if ok && !IsCompact(got[1:]) {
			t.Errorf("%q is not compact", got)
		}
	}
	for _, text := range []string{`{"a": 1}`, `{"a" :1}`, `{"a":1 }`, `{"\u0061":1}`, "{\n}", `{"a":[1, 2]}`} {
		if IsCompact([]byte(text)) {
			t.Errorf("%q is compact", text)
		}
	}
	for text, want := range map[string]bool{`{"a":"\n\t\"\u00e9\\u0061"}`: false, `{"\u0061":1}`: true, `{"a":"\u0041"}`: true, `\u00`: false, `\`: false, ``: false, `\\\u0070`: true} {
		if EscapesNames([]byte(text)) != want {
			t.Errorf("%q: %v", text, !want)
		}
	}
}

// FuzzCompact holds that no text breaks Compact, and that it keeps the value of JSON.
func FuzzCompact(f *testing.F) {
	for _, text := range []string{` { "a" : [ 1 , "x\\\" y" ] } `, `{"\u0061" :null}`, `{"a":1 2}`, `{"a":"`, `{"\ud800":"\ud800"}`} {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		IsCompact(text)
		EscapesNames(text)
		got, ok := Compact(nil, text)
		var before, after map[string]any
		if json.Unmarshal(text, &before) != nil || before == nil {
			return
		}
		if !ok || json.Unmarshal(got, &after) != nil || !reflect.DeepEqual(before, after) {
			t.Fatalf("%q became %q, %v", text, got, ok)
		}
	})
}
