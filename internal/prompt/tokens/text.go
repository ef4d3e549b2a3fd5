package tokens

import (
	"encoding/binary"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/jsonbody"
)

// textMembers are the members of a request's body that make up its prompt, in the order in which chat
// templates put them: what later turns of a conversation add comes last.
var textMembers = [...]string{"tools", "functions", "system", "instructions", "messages", "prompt", "text", "input"}

// Bounds of the text of a prompt that is taken, bytes. A short one is computed at once anywhere.
const minText, maxText = 1 << 10, 4 << 20

// Text returns the text of a request's prompt as a list of words of four bytes, about as many as its
// tokens: equal beginnings of prompts are equal beginnings of lists. Words are no tokens of any
// vocabulary, because those are below 2^21. It is nil for a short text, and for a request that continues
// a stored response, whose beginning is not in it.
func Text(body *jsonbody.Body) []uint32 {
	if body.Get("previous_response_id").Type == gjson.String {
		return nil
	}
	var members [len(textMembers)]string
	total := 0
	for i, member := range textMembers {
		raw := body.Get(member).Raw
		if n := len(raw); n > 1 && (raw[0] == '[' || raw[0] == '"') { // the next turn's list or string is longer
			raw = raw[:n-1]
		}
		members[i] = raw[:min(len(raw), maxText-total)]
		total += len(members[i])
	}
	if total < minText {
		return nil
	}
	text := make([]byte, 0, total)
	for _, raw := range members {
		text = append(text, raw...)
	}
	words := make([]uint32, 0, len(text)/4)
	for ; len(text) >= 4; text = text[4:] {
		words = append(words, binary.LittleEndian.Uint32(text))
	}
	return words
}
