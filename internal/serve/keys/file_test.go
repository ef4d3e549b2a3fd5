package keys

import (
	"crypto/sha256"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kvrouter/internal/base/fair"
)

// secret is a key that no error may show.
const secret = "sk-top-secret"

// sumText is a key's SHA-256 as a file has it.
func sumText(key string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(key))) }

func TestFileOfKeys(t *testing.T) {
	yes, no := true, false
	entries, err := parse([]byte(`
- name: team-a
  key: "` + secret + `"
  limits: {requests-per-second: 0.5, concurrent-requests: 8, prompt-tokens-per-minute: 100000}
- name: team.b_2
  key-sha256: "` + strings.ToUpper(sumText("b")) + `"
  limits:
    requests-per-second: 10
    burst: 20
  salt: true
  trust-hints: true
- {name: c, key: cc, limits: {}, salt: false, trust-hints: false}
- {name: d, key: dd, weight: 0.5, class: batch, ttft-ms: 1500, tpot-ms: 40.5, sheddable: true}
- {name: e, key: ee, weight: 4, class: interactive, sheddable: false}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []entry{
		{name: "team-a", sum: sha256.Sum256([]byte(secret)), limits: limits{requests: .5, burst: 1, concurrent: 8, promptTokens: 100000}},
		{name: "team.b_2", sum: sha256.Sum256([]byte("b")), limits: limits{requests: 10, burst: 20}, salt: true, trust: &yes},
		{name: "c", sum: sha256.Sum256([]byte("cc")), trust: &no},
		{name: "d", sum: sha256.Sum256([]byte("dd")), terms: Terms{Weight: .5, Class: fair.Batch, TTFT: 1500 * time.Millisecond, TPOT: 40500 * time.Microsecond, Sheddable: true}},
		{name: "e", sum: sha256.Sum256([]byte("ee")), terms: Terms{Weight: 4, Class: fair.Interactive}},
	}
	if diff := cmp.Diff(want, entries, cmp.AllowUnexported(entry{}, limits{})); diff != "" {
		t.Error(diff)
	}
	if entries, err := parse(nil); err != nil || len(entries) != 0 {
		t.Errorf("an empty file: %v, %v", entries, err)
	}
}

func TestFileOfKeysThatIsWrong(t *testing.T) {
	one := "- name: a\n  key: " + secret + "\n"
	for name, test := range map[string]struct{ text, want string }{
		"no list":              {"name: a\nkey: " + secret, "not a YAML list"},
		"a list of keys":       {"- " + secret, "not a YAML list"},
		"no YAML":              {"- name: [" + secret, "not a YAML list"},
		"a key twice":          {one + "- name: b\n  key-sha256: " + `"` + sumText(secret) + `"`, "entry 2 (b): entry 1 has the same key"},
		"a name twice":         {one + "- name: a\n  key: other", "entry 2: entry 1 has the same name a"},
		"no name":              {"- key: " + secret, "entry 1: name: must be"},
		"a name with a space":  {"- name: a b\n  key: " + secret, "name: must be"},
		"a name of a flag's":   {"- name: api-key-1\n  key: " + secret, "name: must be"},
		"a name that is long":  {"- name: " + strings.Repeat("a", 65) + "\n  key: " + secret, "name: must be"},
		"no key":               {"- name: a", "key or key-sha256 is required"},
		"an empty key":         {"- name: a\n  key: ''", "key: must be a quoted string"},
		"a number as key":      {"- name: a\n  key: 123", "key: must be a quoted string"},
		"a key with a space":   {"- name: a\n  key: '" + secret + " '", "key: must be a quoted string"},
		"a short hash":         {"- name: a\n  key-sha256: 'abcd'", "key-sha256: must be"},
		"a key and a hash":     {one + "  key-sha256: '" + sumText("x") + "'", "key-sha256: must be"},
		"unknown field":        {one + "  " + secret + ": 1", "unknown field"},
		"salt is a text":       {one + "  salt: 'yes'", "salt: must be true or false"},
		"trust is a number":    {one + "  trust-hints: 1", "trust-hints: must be true or false"},
		"limits are a list":    {one + "  limits: [1]", "limits: must be a map"},
		"an unknown limit":     {one + "  limits: {requests: 1}", "limits: unknown limit"},
		"a limit of nothing":   {one + "  limits: {concurrent-requests: 0}", "concurrent-requests: must be a number above 0"},
		"a limit below":        {one + "  limits: {requests-per-second: -1}", "requests-per-second: must be"},
		"a limit beyond":       {one + "  limits: {prompt-tokens-per-minute: 1e30}", "prompt-tokens-per-minute: must be"},
		"a limit that is none": {one + "  limits: {requests-per-second: .nan}", "requests-per-second: must be"},
		"half a request":       {one + "  limits: {concurrent-requests: 1.5}", "concurrent-requests: must be"},
		"a weight of nothing":  {one + "  weight: 0", "weight: must be a number from 0.001 to 1000"},
		"a weight beyond":      {one + "  weight: 1001", "weight: must be a number from 0.001 to 1000"},
		"an unknown class":     {one + "  class: urgent", "class: must be interactive, standard or batch"},
		"a class that is none": {one + "  class: 1", "class: must be interactive, standard or batch"},
		"an objective below":   {one + "  ttft-ms: -1", "ttft-ms: must be a whole number"},
		"an objective beyond":  {one + "  ttft-ms: 86400001", "ttft-ms: must be a whole number"},
		"half a millisecond":   {one + "  ttft-ms: 0.5", "ttft-ms: must be a whole number"},
		"a token's below":      {one + "  tpot-ms: 0", "tpot-ms: must be a number"},
		"a token's beyond":     {one + "  tpot-ms: 86400001", "tpot-ms: must be a number"},
		"a token's is a text":  {one + "  tpot-ms: fast", "tpot-ms: must be a number"},
		"sheddable is a text":  {one + "  sheddable: 'yes'", "sheddable: must be true or false"},
		"a burst alone":        {one + "  limits: {burst: 2}", "burst: requires"},
	} {
		entries, err := parse([]byte(test.text))
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, %v; want %q", name, entries, err, test.want)
		} else if strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error shows the key: %v", name, err)
		}
	}
}

func FuzzFileOfKeys(f *testing.F) {
	for _, seed := range []string{
		"", "- name: a\n  key: b\n", "- name: a\n  key-sha256: '" + sumText("b") + "'\n  limits: {requests-per-second: 1.5, burst: 3, concurrent-requests: 2, prompt-tokens-per-minute: 9}\n  salt: true\n  trust-hints: false\n",
		"- [a]", "{a: b}", "- {name: a, key: *x}", "- &x {name: a, key: b}\n- *x", "- !!binary a", "- name: a\n  key: |\n    b\n", "- {name: a, key: b, weight: 2, class: batch, ttft-ms: 5, tpot-ms: 0.5, sheddable: true}", "\t", "- name: 'a", "- <<: {name: a}\n  key: b",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		entries, err := parse(text)
		if err != nil && len(entries) > 0 {
			t.Errorf("%d entries beside %v", len(entries), err)
		}
		for _, e := range entries {
			l := e.limits
			if !nameForm.MatchString(e.name) || e.sum == ([sha256.Size]byte{}) || l.requests < 0 || l.burst < 0 || l.concurrent < 0 || l.promptTokens < 0 || (l.requests > 0) != (l.burst > 0) || !(e.terms.Weight >= 0 && e.terms.Weight <= fair.MostWeight) || e.terms.TTFT < 0 || e.terms.TTFT > mostObjective || e.terms.TPOT < 0 || e.terms.TPOT > mostObjective {
				t.Errorf("%+v", e)
			}
		}
	})
}
