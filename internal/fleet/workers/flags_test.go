package workers

import (
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/probe"
)

func TestFlagsNameKeysByTheirVariable(t *testing.T) {
	getenv := func(name string) string { return map[string]string{"A": "key a", "B": "key b"}[name] }
	flags := Flags{WorkerAPIKeyEnv: "A", Worker: []Attached{{Server: probe.Server{URL: "http://h:1"}, KeyEnv: "B"}, {Server: probe.Server{URL: "http://h:2"}}}}
	if err := flags.Resolve(getenv); err != nil {
		t.Fatal(err)
	}
	if flags.WorkerKey != "key a" || flags.Worker[0].Key != "key b" || flags.Worker[1].Key != "" || flags.WorkerTLS != nil {
		t.Errorf("%q %q %q", string(flags.WorkerKey), string(flags.Worker[0].Key), string(flags.Worker[1].Key))
	}
	empty := filepath.Join(t.TempDir(), "empty.pem")
	if err := os.WriteFile(empty, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flags Flags
		says  []string
	}{
		{Flags{WorkerAPIKeyEnv: "C"}, []string{"--worker-api-key-env C", "set it"}},
		{Flags{Worker: []Attached{{Server: probe.Server{URL: "http://h:1"}, KeyEnv: "C"}}}, []string{"--worker url=http://h:1,key-env=C", "set it"}},
		{Flags{WorkerCA: "/nonexistent"}, []string{"--worker-ca", "/nonexistent", "PEM"}},
		{Flags{WorkerCA: empty}, []string{"--worker-ca", "no certificate"}},
	} {
		err := test.flags.Resolve(getenv)
		for _, says := range test.says {
			if err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("%+v: %v, want %q", test.flags, err, says)
			}
		}
	}
}

func TestURLsOfWorkers(t *testing.T) {
	for _, test := range []struct{ given, want string }{
		{"http://h:8100", "http://h:8100"},
		{"https://h/", "https://h"},
		{"http://[::1]:8100/base//", "http://[::1]:8100/base"},
		{"http://h:0", ""},
		{"http://h:65536", ""},
		{"http://h?x", ""},
		{"http://h/?", ""},
		{"http://h/#", ""},
		{"http://", ""},
		{"http://h:8100/v1", ""},
		{"http://h:8100/v1/chat/completions", ""},
		{"http://h:8100/v1beta", "http://h:8100/v1beta"},
		{"ftp://h", ""},
		{"h:8100", ""},
		{"http://h/" + strings.Repeat("x", 2048), ""},
		{"http://user:sesame@h:8100", ""},
		{"http://user:sesame@h:bad port", ""},
	} {
		got, err := kv.ParseURL(test.given)
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("ParseURL(%.40q) = %q, %v", test.given, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "sesame") {
			t.Errorf("the error shows the password: %v", err)
		}
	}
	var w Attached
	if err := w.UnmarshalText([]byte("id=3,url=http://user:sesame@h:8100")); err == nil || strings.Contains(err.Error(), "sesame") || !strings.Contains(err.Error(), "key-env") {
		t.Errorf("%v", err)
	}
}

func FuzzAttached(f *testing.F) {
	for _, seed := range []string{
		"http://h:8100", "url=http://h:1,id=3,kv-events=tcp://h:5557,replay=tcp://h:5757,load=ipc:///run/l,key-env=K,role=prefill,kind=sglang,bootstrap=h:8998,p2p=h:5710",
		"url=", ",,,", "id=-1,url=http://h", "url=http://h,url=http://h", "url=http://u:p@h,id=2",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var w Attached
		if err := w.UnmarshalText([]byte(text)); err != nil {
			return
		}
		if again, err := kv.ParseURL(w.URL); err != nil || again != w.URL {
			t.Errorf("%q has the URL %q: %v", text, w.URL, err)
		}
		if w.Key != "" {
			t.Errorf("%q has a key", text)
		}
	})
}

// TestWorkerFlagAcceptsTheFormOfItsHelp parses the form in the help of --worker, with
// all optional parts.
func TestWorkerFlagAcceptsTheFormOfItsHelp(t *testing.T) {
	field, _ := reflect.TypeFor[Flags]().FieldByName("Worker")
	_, form, _ := strings.Cut(field.Tag.Get("help"), ": ")
	form, _, found := strings.Cut(form, ". Repeatable")
	form = regexp.MustCompile(`\|[a-z|]+`).ReplaceAllString(strings.NewReplacer("[", "", "]", "").Replace(form), "")
	var worker Attached
	if err := worker.UnmarshalText([]byte(form)); err != nil || !found {
		t.Errorf("%s: %v", form, err)
	}
	if got := worker.URL + " " + worker.KVEvents; got != "http://host:8100 tcp://host:5557" {
		t.Error(got)
	}
}
