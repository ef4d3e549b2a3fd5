package settings

import "strings"

// Pairs splits text at its commas into pairs KEY=VALUE. A part that does not begin
// with a letter and have a = belongs to the value before it, which may be a list.
func Pairs(text string) (pairs []string) {
	for part := range strings.SplitSeq(text, ",") {
		key, _, given := strings.Cut(part, "=")
		key = strings.TrimSpace(key)
		begins := given && key != "" && (key[0]|0x20 >= 'a' && key[0]|0x20 <= 'z')
		if len(pairs) > 0 && !begins {
			pairs[len(pairs)-1] += "," + part
		} else {
			pairs = append(pairs, part)
		}
	}
	return pairs
}
