package settings

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/alecthomas/kong"
)

// testFlags are the flags that a file may set.
func testFlags() []*kong.Flag {
	var flags []*kong.Flag
	for _, name := range []string{"http-port", "worker", "policy", "config"} {
		flags = append(flags, &kong.Flag{Value: &kong.Value{Name: name}})
	}
	return flags
}

func TestConfigFilesThatMakeNoSense(t *testing.T) {
	for text, want := range map[string]string{
		"http_port: 1\nhttp-port: 2":            "set twice",
		"htp-port: 1":                           `did you mean "http-port"`,
		"- a":                                   "not a YAML map",
		"worker: [[a]]":                         "list of lists",
		"http-port:":                            "has no value",
		"vllm-args: x":                          "must be a list",
		"config: x":                             "unknown key",
		"a: &a [x, x]\nb: [*a, *a]":             "aliases are not supported",
		strings.Repeat("[", 101):                "nested more than",
		"# " + strings.Repeat("x", configLimit): "exceeds",
	} {
		name := filepath.Join(t.TempDir(), "c.yaml")
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadConfigFile(name, testFlags()); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// FuzzConfigFile reads any file as one of settings: an error is one line that names
// the file.
func FuzzConfigFile(f *testing.F) {
	for _, text := range []string{"http-port: 8080\npolicy: work\nvllm-args: [--max-model-len, \"4096\"]", "worker: [{url: http://a, id: 3}, url=http://b]", "a: &a [*a]", "? {}\n: 1",
		"http-port: {a: [1, {b: c}]}", "vllm-args: [1, null]", "vllm-args: [[x]]", "vllm-args: [{a: b}]", "- 1", "\x00", "policy: !!binary aGk=", "policy: 2001-01-01", "<<: {policy: work}", "policy: .nan"} {
		f.Add([]byte(text))
	}
	name := filepath.Join(f.TempDir(), "c.yaml")
	f.Fuzz(func(t *testing.T, text []byte) {
		if err := os.WriteFile(name, text, 0o600); err != nil {
			t.Fatal(err)
		}
		file, err := ReadConfigFile(name, testFlags())
		if err != nil {
			if !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), "\n") && !strings.Contains(string(text), "\n") {
				t.Fatalf("%q", err)
			}
			return
		}
		for key, value := range file.values {
			switch list := value.(type) {
			case string:
			case []any:
				for _, item := range list {
					if _, ok := item.(string); !ok {
						t.Fatalf("%s has a %T", key, item)
					}
				}
			default:
				t.Fatalf("%s is a %T", key, value)
			}
		}
	})
}
