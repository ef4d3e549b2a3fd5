package mocker

import (
	"encoding/json"
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"kvrouter/internal/prompt/native"
	"kvrouter/internal/testkit/nativetest"
)

// TestThePlainLibraryIsTheNativeOne: for texts, tokens and chats of the built-in model.
func TestThePlainLibraryIsTheNativeOne(t *testing.T) {
	tokenizer, err := BuiltinTokenizer()
	if err != nil {
		t.Fatal(err)
	}
	var exact [2]native.Exact
	var chats [2]native.Template
	for i, library := range []native.Library{nativetest.Library(t), Plain{}} {
		if exact[i], err = library.NewExact(tokenizer); err != nil {
			t.Fatal(err)
		}
		defer exact[i].Close()
		if chats[i], err = library.NewTemplate(BuiltinTemplate); err != nil {
			t.Fatal(err)
		}
		defer chats[i].Close()
	}
	text := rapid.Custom(func(t *rapid.T) string {
		parts := rapid.SliceOfN(rapid.OneOf(rapid.String(), rapid.SampledFrom(append(builtinSpecial[:], "<|im", "|>", " <b>&", "\u2028", "é\n"))), 0, 6)
		all := ""
		for _, part := range parts.Draw(t, "parts") {
			all += part
		}
		return all
	})
	rapid.Check(t, func(rt *rapid.T) {
		asked := text.Draw(rt, "text")
		want, _ := exact[0].Encode(asked, true)
		if got, result := exact[1].Encode(asked, true); result != native.Done || !slices.Equal(got, want) {
			rt.Fatalf("%q: %d, want %d", asked, got, want)
		}
		ids := rapid.SliceOf(rapid.Uint32Range(0, 257)).Draw(rt, "ids")
		wrote, err := exact[0].Decode(ids)
		if got, _ := exact[1].Decode(ids); err != nil || got != wrote {
			rt.Fatalf("%d: %q, want %q, %v", ids, got, wrote, err)
		}
		message := func() map[string]any {
			m := map[string]any{"role": rapid.SampledFrom([]string{"system", "user", "assistant"}).Draw(rt, "role")}
			if rapid.Bool().Draw(rt, "content") {
				m["content"] = text.Draw(rt, "content")
			}
			if rapid.Bool().Draw(rt, "calls") {
				m["tool_calls"] = []any{map[string]any{"name": text.Draw(rt, "name"), "arguments": map[string]any{"n": rapid.Int32().Draw(rt, "n"), "none": nil, "is": true}}}
			}
			return m
		}
		context := map[string]any{"messages": []any{message(), message()}, "add_generation_prompt": rapid.Bool().Draw(rt, "adds"), "tools": nil}
		if rapid.Bool().Draw(rt, "tools") {
			context["tools"] = []any{map[string]any{"type": "function", "function": map[string]any{"name": text.Draw(rt, "tool"), "parameters": map[string]any{}}}}
		}
		of, err := json.Marshal(context)
		if err != nil {
			rt.Fatal(err)
		}
		chat, result := chats[0].Render(of)
		if got, _ := chats[1].Render(of); result != native.Done || string(got) != string(chat) {
			rt.Fatalf("%s: %q, want %q", of, got, chat)
		}
		chats[0].Free(chat)
	})
}

// TestThePlainLibraryHasNoOtherModel: it says what is missing, as a program without a library does.
func TestThePlainLibraryHasNoOtherModel(t *testing.T) {
	if _, err := (Plain{}).NewExact([]byte("{}")); !errors.Is(err, native.ErrMissing) {
		t.Error(err)
	}
	if _, err := (Plain{}).NewTemplate("{{ messages }}"); !errors.Is(err, native.ErrMissing) {
		t.Error(err)
	}
	if _, err := (Plain{}).CheckRegex("a+"); !errors.Is(err, native.ErrMissing) {
		t.Error(err)
	}
}
