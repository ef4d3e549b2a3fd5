package settings

import "testing"

func TestTwoFlagsCannotNameOneFile(t *testing.T) {
	for _, test := range []struct{ a, b, want string }{
		{"", "", ""},
		{"x", "", ""},
		{"x", "y", ""},
		{"x", "x", "--a and --b both use x: give each its own file"},
		{"/tmp/x", "/tmp/./y/../x", "--a and --b both use /tmp/./y/../x: give each its own file"},
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
