package jsonbody

import (
	"testing"

	"github.com/tidwall/gjson"
)

// TestIntReadsWhatEnginesRead has what pydantic 2.14 makes of each value for a field of type
// int | None.
func TestIntReadsWhatEnginesRead(t *testing.T) {
	const refused = -1 << 62 // or null
	for _, test := range []struct {
		raw  string
		want int
	}{
		{`64`, 64},
		{`64.0`, 64},
		{`6.4e1`, 64},
		{`64.5`, refused},
		{`" 64 "`, 64},
		{`"64"`, 64},
		{`"6_4"`, 64},
		{`"6__4"`, refused},
		{`"_64"`, refused},
		{`"64_"`, refused},
		{`"+64"`, 64},
		{`"-64"`, -64},
		{`"- 64"`, refused},
		{`"064"`, 64},
		{`"0x40"`, refused},
		{`"64.0"`, 64},
		{`"64.00"`, 64},
		{`"64."`, refused},
		{`"6.4e1"`, refused},
		{`"1e3"`, refused},
		{`true`, 1},
		{`false`, 0},
		{`"true"`, refused},
		{`null`, refused},
		{`""`, refused},
		{`" "`, refused},
		{`"\n64\t"`, 64},
		{`"６４"`, refused},
		{`1e400`, refused},
		{`"64.5"`, refused},
		{`-0`, 0},
		{`-0.0`, 0},
		{`9223372036854775808`, 9007199254740992},
		{`"9223372036854775808"`, 9007199254740992},
		{`"1_000.0"`, 1000},
		{`"0_1"`, 1},
		{`"00"`, 0},
		{`"+_1"`, refused},
		{`"\u00a064"`, 64},
		{`"64\u2003"`, 64},
		{`"1_0.0_0"`, refused},
		{`".0"`, refused},
		{`"0.0"`, 0},
		{`"-0.0"`, 0},
		{`"+64.0"`, 64},
		{`"6 4"`, refused},
		{`[64]`, refused},
		{`{"a":1}`, refused},
		{`"\u000b64"`, 64},
		{`"\u001c64"`, refused},
		{`"64.0_0"`, refused},
		{`"64.0 "`, 64},
		{`"64\u0000"`, refused},
		{`1.0e-1`, refused},
		{`10e-1`, 1},
		{`"١"`, refused},
		{`"+ 64"`, refused},
		{`"0_0"`, 0},
		{`"_"`, refused},
		{`"-_1"`, refused},
		{`"-6_4"`, -64},
	} {
		got, ok := Int(gjson.Parse(test.raw))
		if !ok {
			got = refused
		}
		if got != test.want {
			t.Errorf("%s: %d, want %d", test.raw, got, test.want)
		}
	}
}
