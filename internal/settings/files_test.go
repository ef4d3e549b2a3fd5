package settings

import "testing"

func TestTwoFlagsCannotNameOneFile(t *testing.T) {
	for _, test := range []struct{ a, b, want string }{
		{"", "", ""},
		{"x", "", ""},
		{"x", "y", ""},
		{"x", "x", "--a and --b both name x: give each a file of its own"},
		{"/tmp/x", "/tmp/./y/../x", "--a and --b both name /tmp/./y/../x: give each a file of its own"},
	} {
		got := ""
		if err := CheckFiles(map[string]string{"--a": test.a, "--b": test.b}); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%q and %q: %q, want %q", test.a, test.b, got, test.want)
		}
	}
}
