package tokens

import (
	"cmp"
	"slices"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// carriesMedia reports whether a request may carry something else than text.
func carriesMedia(body []byte) (carries bool) {
	for _, list := range []string{"messages", "input"} { // of chats, of /v1/responses
		gjson.GetBytes(body, list).ForEach(func(_, m gjson.Result) bool {
			m.Get("content").ForEach(func(_, part gjson.Result) bool {
				kind := part.Get("type").Str
				carries = carries || part.IsObject() && !slices.Contains(textParts, kind)
				return !carries
			})
			return !carries
		})
	}
	return carries
}

// textParts are the types of content parts that are text to vLLM.
var textParts = []string{"text", "refusal", "thinking", "tool_reference", "input_text", "output_text"}

// withoutTensors asks vLLM's render routes to leave out the processed tensors of
// the media, which can be larger than any answer that is read here.
func withoutTensors(body []byte) []byte {
	if !carriesMedia(body) {
		return body
	}
	parsed, ok := jsonbody.Parse(body)
	if !ok {
		return body
	}
	return parsed.With("mm_payload", `"none"`).Raw
}

// readFeatures reads the part of a render answer about media, for a prompt of that
// many tokens: vLLM's MultiModalFeatures, which has for each modality a list of
// identifiers (mm_hashes) and one of the tokens where they stand (mm_placeholders).
// It returns the items in their order, and up to which token all are understood.
func readFeatures(features gjson.Result, tokens int) (media []kv.Media, exact int) {
	switch {
	case features.Type == gjson.Null:
		return nil, tokens
	case !features.IsObject():
		return nil, 0
	}
	hashes, placeholders := features.Get("mm_hashes"), features.Get("mm_placeholders")
	if hasMore(hashes, maxModalities) || hasMore(placeholders, maxModalities) {
		return nil, 0
	}
	exact = tokens
	hashes.ForEach(func(modality, list gjson.Result) bool {
		if len(list.Array()) > 0 && len(member(placeholders, modality.Str).Array()) == 0 {
			exact = 0 // place unknown
		}
		return exact > 0
	})
	placeholders.ForEach(func(modality, ranges gjson.Result) bool {
		identifiers := member(hashes, modality.Str).Array()
		list := ranges.Array()
		for i, r := range list {
			start, length := whole(r.Get("offset"), tokens), whole(r.Get("length"), tokens)
			switch {
			case start < 0:
				exact = 0
			case length <= 0 || length > tokens-start || len(identifiers) != len(list) || identifiers[i].Type != gjson.String ||
				identifiers[i].Str == "":
				exact = min(exact, start)
			default:
				media = append(media, kv.Media{Hash: kv.MediaHash(identifiers[i].Str), Start: start, End: start + length})
			}
		}
		return exact > 0
	})
	slices.SortFunc(media, func(a, b kv.Media) int { return cmp.Compare(a.Start, b.Start) })
	for i := 1; i < len(media); i++ {
		if media[i].Start < media[i-1].End {
			exact = min(exact, media[i-1].Start)
		}
	}
	if end := slices.IndexFunc(media, func(m kv.Media) bool { return m.Start >= exact }); end >= 0 {
		media = media[:end]
	}
	return media, exact
}

// maxModalities is far more kinds of media than any model takes: each is looked for
// among the others.
const maxModalities = 16

// hasMore reports whether an object has more than most members.
func hasMore(object gjson.Result, most int) bool {
	n := 0
	object.ForEach(func(_, _ gjson.Result) bool {
		n++
		return n <= most
	})
	return n > most
}

// member returns the value under a key as it is: in a path some characters have a
// meaning.
func member(object gjson.Result, key string) (value gjson.Result) {
	object.ForEach(func(k, v gjson.Result) bool {
		if k.Str == key {
			value = v
		}
		return !value.Exists()
	})
	return value
}

// whole returns a number from 0 to most, else -1.
func whole(v gjson.Result, most int) int {
	if n := v.Num; v.Type == gjson.Number && n >= 0 && n <= float64(most) && n == float64(int(n)) {
		return int(n)
	}
	return -1
}
