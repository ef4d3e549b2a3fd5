package jsonbody_test

import (
	"slices"
	"testing"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/prompt/chat"
)

func TestTheLastOfEqualMembersCounts(t *testing.T) {
	b, ok := jsonbody.Parse([]byte(" {\"model\":\"a\",\"stream\":false,\"messages\":[1,{\"role\":\"x\"}],\"model\":\"b\"} "))
	if !ok || b.Get("model").Str != "b" || b.Get("missing").Exists() {
		t.Errorf("%+v", b)
	}
	if views := b.Messages(); len(views) != 2 || views[0].Fields != nil || jsonbody.FieldOf(views[1].Fields, "role").Str != "x" {
		t.Errorf("%+v", views)
	}
	if keys := chat.Features(b); !slices.Equal(keys, []string{"chat"}) {
		t.Error(keys)
	}
	for _, text := range []string{`[]`, `"x"`, ``, `{`, `{}x`} {
		if _, ok := jsonbody.Parse([]byte(text)); ok {
			t.Errorf("%s is a body", text)
		}
	}
}
