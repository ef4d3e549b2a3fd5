package jsonbody

import (
	"encoding/json"
	"strings"
	"testing"
)

func TestMemberIsAddedOnce(t *testing.T) {
	for _, test := range []struct{ body, want string }{
		{`{}`, `{"salt":"S"}`},
		{` { } `, ` {"salt":"S" } `},
		{`{"b": 1,  "a":[ 2 ]}`, `{"salt":"S","b": 1,  "a":[ 2 ]}`},
		{`{"salt":"mine","b": 1}`, `{"salt":"S","b":1}`},
		{`{"b":1, "salt":"mine"}`, `{"salt":"S","b":1}`},
		{`{"salt":1,"b":1,"salt":null}`, `{"salt":"S","b":1}`},
		{`{"s\u0061lt":"mine","b":{"salt": 1}}`, `{"salt":"S","b":{"salt": 1}}`},
		{`{"salt":"mine"}`, `{"salt":"S"}`},
	} {
		body, ok := Parse([]byte(test.body))
		if !ok {
			t.Fatal(test.body)
		}
		got := body.With("salt", `"S"`)
		if string(got.Raw) != test.want || got.Get("salt").Str != "S" || string(body.Raw) != test.body {
			t.Errorf("%s: %s, salt %s", test.body, got.Raw, got.Get("salt"))
		}
	}
}

func FuzzWith(f *testing.F) {
	for _, seed := range []string{`{}`, `{"salt":1}`, `{"a":1,"salt":"x","salt":2}`, `{"\u0073alt":1}`, ` {"a":{"salt":1}}`, `{"":1}`, `{"\ud800":1,"salt":0}`, "{\"a\":\"\xff\"}"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		body, ok := Parse([]byte(text))
		if !ok {
			return
		}
		got := body.With("salt", `"S"`)
		again, ok := Parse(got.Raw)
		if !ok {
			t.Fatalf("%q: %q is no object", text, got.Raw)
		}
		seen := 0
		decoder := json.NewDecoder(strings.NewReader(string(got.Raw)))
		for depth := 0; ; { // every top member whose name reads salt
			token, err := decoder.Token()
			if err != nil {
				break
			}
			switch token {
			case json.Delim('{'), json.Delim('['):
				depth++
				continue
			case json.Delim('}'), json.Delim(']'):
				depth--
				continue
			}
			if depth == 1 {
				if token == "salt" {
					seen++
				}
				var skipped json.RawMessage
				if decoder.Decode(&skipped) != nil {
					break
				}
			}
		}
		if seen != 1 || again.Get("salt").Str != "S" || len(again.Top) != len(got.Top) {
			t.Errorf("%q: %q has %d salts", text, got.Raw, seen)
		}
		for _, m := range body.Top {
			if m.Key != "salt" && again.Get(m.Key).Raw != m.Value.Raw && !strings.ContainsRune(m.Key, '�') {
				t.Errorf("%q: %q is %s in %q", text, m.Key, again.Get(m.Key).Raw, got.Raw)
			}
		}
	})
}

func TestMembersAreRemovedInEverySpelling(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                                 `{}`,
		`{"a":1}`:                            `{}`,
		`{"b":{"a": 1},"a":null,"\u0061":2}`: `{"b":{"a": 1}}`,
		`{"c":"\ud83d\ude00", "b" : [ 1 ]}`:  `{"c":"\ud83d\ude00","b":[ 1 ]}`,
	} {
		body, _ := Parse([]byte(text))
		if got := body.Without("a", "x"); string(got.Raw) != want || got.Get("a").Exists() || string(body.Raw) != text {
			t.Errorf("%s: %s", text, got.Raw)
		}
	}
}
