package discovery

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/testkit"
)

func TestEntriesOfTheFile(t *testing.T) {
	list, err := parseFile([]byte(`
workers:
  - http://10.0.0.2:8100
  - url: https://10.0.0.1:8100/
    name: a
    kv-events: tcp://10.0.0.1:6000
    replay: tcp://10.0.0.1:6001
    load: tcp://10.0.0.1:6002
    role: prefill
    kind: sglang
    bootstrap: 10.0.0.1:8998
    p2p: 10.0.0.1:5710
    draining: true
`))
	if err != nil {
		t.Fatal(err)
	}
	want := kv.Worker{
		ID: idOf("https://10.0.0.1:8100"), Name: "a", URL: "https://10.0.0.1:8100", KVEvents: "tcp://10.0.0.1:6000", Replay: "tcp://10.0.0.1:6001", Load: "tcp://10.0.0.1:6002",
		Cordon: kv.CordonDraining, EventsPort: 5557, Disagg: kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "10.0.0.1", Port: 8998}, P2P: kv.Bootstrap{Host: "10.0.0.1", Port: 5710}},
	}
	bare := kv.Worker{ID: idOf("http://10.0.0.2:8100"), Name: "10.0.0.2:8100", URL: "http://10.0.0.2:8100", EventsPort: 5557}
	if len(list) != 2 || list[0] != bare || list[1] != want {
		t.Errorf("%+v", list)
	}
	if list, err = parseFile([]byte("workers: []")); err != nil || len(list) != 0 {
		t.Errorf("none: %v, %v", list, err)
	}
}

// TestMistakesInTheFileAreNamed: with the line, where YAML or an entry is wrong.
func TestMistakesInTheFileAreNamed(t *testing.T) {
	for text, want := range map[string]string{
		"":                  "list workers: is missing",
		"worker: []":        `[1:1] unknown field "worker"`,
		"workers:":          "list workers: is missing",
		"workers: 3":        "[1:10]",
		"- url: http://h:1": "begin the file with workers: on a line",
		"workers:\n- http://h:1\n- urll: http://h:2":                       `[3:3] unknown field "urll"`,
		"workers:\n- http://h:1\n- name: b":                                "line 3: worker 2 of the list: url is missing",
		"workers:\n- http://h:1\n- http://h:1/":                            "line 3: worker 2 of the list: http://h:1 is given twice",
		"workers:\n- h:1":                                                  "line 2: worker 1 of the list: url: h:1 is not a URL",
		"workers:\n- http://u:sesame@h:1":                                  "the URL must not contain a user or password",
		"workers:\n- url: http://h:1\n  role: prefil":                      "is not one of both, prefill, decode",
		"workers:\n- url: http://h:1\n  kv-events: ipc:///run/x":           "kv-events: ipc endpoints are allowed with --worker only",
		"workers:\n- url: http://h:1\n  replay: h:1":                       "replay: h:1 is not an endpoint",
		"workers:\n- url: http://h:1\n  name: " + strings.Repeat("x", 300): "name has 300 bytes",
		"workers:\n" + strings.Repeat("- http://h:1\n", maxWorkers+1):      "the maximum is 4096",
	} {
		_, err := parseFile([]byte(text))
		if err == nil || !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "sesame") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%.80q: %v", text, err)
		}
	}
}

// watchFile watches a file with that text.
func watchFile(t *testing.T, text string) (w *watched, write func(string)) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "workers.yaml")
	write = func(text string) {
		t.Helper()
		if err := errors.Join(os.WriteFile(path+".next", []byte(text), 0o600), os.Rename(path+".next", path)); err != nil {
			t.Fatal(err)
		}
	}
	write(text)
	w = &watched{t: t, path: path}
	source, err := openFile(path, w.fileRead, w.logger())
	if err != nil {
		t.Fatal(err)
	}
	source.every = 5 * time.Millisecond
	w.watch(source)
	return w, write
}

func TestTheFileIsFollowed(t *testing.T) {
	w, write := watchFile(t, "workers: [http://h:1]")
	w.wants("h:1=h:1")
	write("workers: [http://h:1, http://h:2]")
	w.wants("h:1=h:1; h:2=h:2")
	write("workers:\n- {url: http://h:2, draining: true}\n")
	w.wants("h:2=h:2 draining")
	write("workers: []")
	w.wants("")
	if w.log.String() != "" || w.count() != 4 {
		t.Errorf("%d lists: %s", w.count(), w.log.String())
	}
}

func TestABadFileLeavesTheWorkersAsTheyWere(t *testing.T) {
	w, write := watchFile(t, "workers: [http://h:1]")
	w.wants("h:1=h:1")
	write("workers: [http://h:1, http://h:0]")
	w.says("line 1: worker 2 of the list: url: http://h:0 is not a URL such as http://host:8100; the workers are kept")
	write("") // as an editor leaves it for a moment, or for ever
	w.says("list workers: is missing")
	write("workers: [http://h:1]")
	w.says("recovered")
	write("workers: [http://h:2]")
	w.wants("h:2=h:2")
	if n := strings.Count(w.log.String(), "WARN"); n != 2 || w.count() != 2 {
		t.Errorf("%d lists, %d warnings: %s", w.count(), n, w.log.String())
	}
}

func TestAFileThatGoesLeavesTheWorkersAsTheyWere(t *testing.T) {
	w := &watched{t: t}
	path := filepath.Join(t.TempDir(), "workers.yaml")
	if _, err := openFile(path, w.fileRead, w.logger()); err == nil || !strings.Contains(err.Error(), "--discovery file:"+path+": cannot read it: no such file") {
		t.Errorf("at the start: %v", err)
	}
	if err := os.WriteFile(path, []byte("workers: [http://h:1]"), 0o600); err != nil {
		t.Fatal(err)
	}
	source, err := openFile(path, w.fileRead, w.logger())
	if err != nil {
		t.Fatal(err)
	}
	source.every = 5 * time.Millisecond
	w.watch(source)
	w.wants("h:1=h:1")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	w.says("no such file or directory; the workers are kept")
	// As a ConfigMap is mounted: a link to a folder that is replaced as a whole.
	real := filepath.Join(t.TempDir(), "v2")
	if err := os.WriteFile(real, []byte("workers: [http://h:3]"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(real, path); err != nil {
		t.Fatal(err)
	}
	w.wants("h:3=h:3")
	if err := os.WriteFile(real, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	w.says("exceeds 1048576 bytes")
	testkit.Eventually(t, time.Second, "nothing changed", func() bool { return w.count() == 2 })
}

func TestTextThatCostsTheDecoderTooMuchIsRefused(t *testing.T) {
	for text, want := range map[string]string{
		"workers: [" + strings.Repeat("[", maxFile-16):                            "line 1: lists and mappings are nested more than 100 deep",
		"workers:\n- url: *a\n":                                                   "line 2: aliases are not supported",
		"workers: " + strings.Repeat("[", 15):                                     "sequence end token",
		"workers:\n- url: http://h:1 # [[{ &a\n":                                  "",
		"workers: [{url: \"http://[::1]:8\", name: 'it''s [&a'}, \"http://h:1\"]": "",
	} {
		_, err := parseFile([]byte(text))
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%.80q: %v; want %q", text, err, want)
		}
	}
}

func TestANamedPipeIsNoFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	w := &watched{t: t}
	if _, err := openFile(path, w.fileRead, w.logger()); err == nil || !strings.Contains(err.Error(), "it is not a regular file") {
		t.Errorf("at the start: %v", err)
	}
	if _, err := openFile(filepath.Dir(path), w.fileRead, w.logger()); err == nil || !strings.Contains(err.Error(), "it is not a regular file") {
		t.Errorf("a folder: %v", err)
	}
	w, _ = watchFile(t, "workers: [http://h:1]")
	w.wants("h:1=h:1")
	if err := os.Rename(path, w.path); err != nil {
		t.Fatal(err)
	}
	w.says("it is not a regular file; the workers are kept")
	testkit.Eventually(t, 5*time.Second, "the failure is noted", w.failed.Load)
	if err := errors.Join(os.WriteFile(w.path+".next", []byte("workers: [http://h:2]"), 0o600), os.Rename(w.path+".next", w.path)); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 5*time.Second, "its end is noted", func() bool { return !w.failed.Load() })
}

func FuzzFile(f *testing.F) {
	for _, seed := range []string{
		"workers: [http://h:1]", "workers:\n- url: http://h:1\n  role: decode\n  bootstrap: h:1", "a: &a [*a]", "workers: &x\n- *x", "workers: {}", "- - -", "workers: [[]]", "workers: [null, 3, {}]", "[[[[{a: {a: ", "a:\n b:\n  - - c", "a: |\n\n", "a: '[' # [",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 4096 {
			return
		}
		list, err := parseFile(data)
		if err != nil && strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: an error of several lines: %v", data, err)
		}
		ids := map[uint64]bool{}
		for _, w := range list {
			if again, err := kv.ParseURL(w.URL); err != nil || again != w.URL || ids[w.ID] || w.Name == "" || w.Name != plainName(w.Name) {
				t.Errorf("%q has %+v: %v", data, w, err)
			}
			ids[w.ID] = true
		}
	})
}
