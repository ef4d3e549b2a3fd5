package jsonbody

import (
	"math"
	"strings"

	"github.com/tidwall/gjson"
)

// mostInt bounds what Int returns in both directions.
const mostInt = 1 << 53

// Int returns a whole number as pydantic's lax mode reads it, which is how engines read the
// numbers of a request: also from a string such as " 6_4 " or "64.0", from 64.0, and from true.
// Not ok: the engine refuses the value, or it is null. Larger numbers are clamped to 2^53.
func Int(v gjson.Result) (n int, ok bool) {
	switch v.Type {
	case gjson.Number:
		if v.Num != math.Trunc(v.Num) || math.IsInf(v.Num, 0) {
			return 0, false
		}
		return int(max(-mostInt, min(mostInt, v.Num))), true
	case gjson.True:
		return 1, true
	case gjson.False:
		return 0, true
	case gjson.String:
		return intOf(strings.TrimSpace(v.Str))
	}
	return 0, false
}

// intOf reads a number of digits, which single underscores may divide, with a sign before it and
// a fraction of zeros behind it.
func intOf(text string) (n int, ok bool) {
	negative := strings.HasPrefix(text, "-")
	if negative || strings.HasPrefix(text, "+") {
		text = text[1:]
	}
	whole, zeros, fraction := strings.Cut(text, ".")
	if fraction && (zeros == "" || strings.Trim(zeros, "0") != "") {
		return 0, false
	}
	for digits := range strings.SplitSeq(whole, "_") {
		if digits == "" || strings.Trim(digits, "0123456789") != "" {
			return 0, false
		}
		for _, digit := range []byte(digits) {
			n = min(mostInt, 10*n+int(digit-'0'))
		}
	}
	if negative {
		n = -n
	}
	return n, true
}
