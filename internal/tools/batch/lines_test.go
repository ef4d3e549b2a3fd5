package batch

import (
	"bytes"
	"strings"
	"testing"
)

func TestBadLinesSayWhatWouldBeRight(t *testing.T) {
	good := `{"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":"x"}}`
	if r, err := parse(3, []byte(good)); err != nil || r.number != 3 || r.id != "a" || r.path != "/v1/completions" || string(r.body) != `{"prompt":"x"}` {
		t.Errorf("%+v, %v", r, err)
	}
	for name, test := range map[string]struct{ line, id, want string }{
		"no JSON":         {"nothing", "", "it is not a JSON object"},
		"a list":          {"[]", "", "it is not a JSON object"},
		"cut off":         {good[:20], "", "it is not a JSON object"},
		"two values":      {good + good, "", "it is not a JSON object"},
		"no UTF-8":        {strings.Replace(good, "x", "\xff", 1), "", "it is not UTF-8"},
		"no id":           {strings.Replace(good, `"custom_id":"a",`, "", 1), "", "it has no custom_id"},
		"an empty id":     {strings.Replace(good, `"a"`, `""`, 1), "", "it has no custom_id"},
		"a number as id":  {strings.Replace(good, `"a"`, `1`, 1), "", "it is not a JSON object"},
		"a long id":       {strings.Replace(good, `"a"`, `"`+strings.Repeat("a", 513)+`"`, 1), "", "custom_id has 513 bytes"},
		"no method":       {strings.Replace(good, `"method":"POST",`, "", 1), "a", `method ""`},
		"another method":  {strings.Replace(good, "POST", "DELETE", 1), "a", `method "DELETE": give POST`},
		"a whole address": {strings.Replace(good, "/v1/completions", "http://other/v1/completions", 1), "a", `url "http://other`},
		"an admin route":  {strings.Replace(good, "/v1/completions", "/reset_prefix_cache", 1), "a", `url "/reset_prefix_cache"`},
		"no body":         {`{"custom_id":"a","method":"POST","url":"/v1/completions"}`, "a", "body is not a JSON object"},
		"a text as body":  {strings.Replace(good, `{"prompt":"x"}`, `"x"`, 1), "a", "body is not a JSON object"},
		"a stream":        {strings.Replace(good, `"x"`, `"x","stream":true`, 1), "a", "body.stream is true"},
	} {
		r, err := parse(1, []byte(test.line))
		if err == nil || !strings.HasPrefix(err.Error(), test.want) || r.id != test.id {
			t.Errorf("%s: custom_id %q, %v", name, r.id, err)
		}
	}
}

func TestALongLineIsSkipped(t *testing.T) {
	long := strings.Repeat("x", 200_000)
	var got []string
	err := readLines(strings.NewReader("\ufeff a \r\n"+long+"\n\n  \nb\n"+long[:99]+"\n"+long[:101]), 100, func(number int, line []byte) error {
		got = append(got, string(rune('0'+number))+" "+string(line[:min(len(line), 3)]))
		return nil
	})
	if want := "1 a,2 ,5 b,6 xxx,7 "; err != nil || strings.Join(got, ",") != want {
		t.Errorf("%q, %v", got, err)
	}
}

// FuzzReadLines compares the lines of any input with those of a naive reader, and lets
// every parser see them.
func FuzzReadLines(f *testing.F) {
	f.Add([]byte("a\nbb\r\n\nccc"), 2)
	f.Add([]byte("\ufeff{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/completions\",\"body\":{}}\n"), 1000)
	f.Add(bytes.Repeat([]byte("x"), 70_000), 66_000)
	f.Add([]byte(`{"id":"batch_req_1","custom_id":null,"response":null,"error":{"code":"","message":"","line":3}}`), 500)
	f.Fuzz(func(t *testing.T, input []byte, most int) {
		if most < 1 || most > 1<<20 {
			return
		}
		type line struct {
			number int
			text   string
		}
		var got, want []line
		if err := readLines(bytes.NewReader(input), most, func(number int, text []byte) error {
			got = append(got, line{number, string(text)})
			if r, err := parse(number, text); err == nil && (r.id == "" || len(r.body) == 0) {
				t.Errorf("%q is a request without its parts", text)
			}
			b := book{done: map[identity]bool{}, bad: map[int]bool{}}
			if b.note(number, text, true) == nil && len(b.done)+len(b.bad) != 1 {
				t.Errorf("%q is noted for %d requests", text, len(b.done)+len(b.bad))
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		for i, text := range bytes.SplitAfter(input, []byte("\n")) {
			long := len(text) > most
			if i == 0 {
				text = bytes.TrimPrefix(text, []byte("\ufeff"))
			}
			switch text = bytes.TrimSpace(text); {
			case long:
				want = append(want, line{i + 1, ""})
			case len(text) > 0:
				want = append(want, line{i + 1, string(text)})
			}
		}
		if len(got) != len(want) {
			t.Fatalf("%d lines, want %d", len(got), len(want))
		}
		for i := range got {
			if got[i] != want[i] {
				t.Errorf("line %+v, want %+v", got[i], want[i])
			}
		}
	})
}
