package reload

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/telemetry"
	"kvrouter/internal/testkit"
)

// reloading is a reloader of a file of keys and one of settings.
type reloading struct {
	*Reloader
	t       *testing.T
	dir     string
	log     testkit.LogBuffer
	keys    *keys.Ring
	results *telemetry.Reloads
	reads   chan (func() error) // answers the next readings of the settings; empty: they are good
	signal  chan os.Signal
}

func newReloading(t *testing.T) *reloading {
	t.Helper()
	r := &reloading{t: t, dir: t.TempDir(), results: telemetry.NewReloads("config", "api_keys"), reads: make(chan func() error, 100), signal: make(chan os.Signal, 1)}
	r.write("keys", "- {name: a, key: first-key}\n- {name: b, key: other-key}")
	r.write("config", "")
	r.keys = keys.New(keys.Settings{APIKeysFile: r.path("keys")}, nil)
	use, err := r.keys.Read()
	if err != nil {
		t.Fatal(err)
	}
	use()
	config := Source{File: telemetry.FileConfig, Flags: "--config", Paths: []string{r.path("config"), ""}, Read: func() (func() []any, error) {
		select {
		case read := <-r.reads:
			return func() []any { return nil }, read()
		default:
			return func() []any { return nil }, nil
		}
	}}
	ring := Source{File: telemetry.FileKeys, Read: func() (func() []any, error) {
		use, err := r.keys.Read()
		return func() []any { return []any{"api_keys", use()} }, err
	}}
	r.Reloader = New(r.results.Note, slog.New(slog.NewTextHandler(&r.log, nil)), config, ring)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan bool)
	go func() {
		r.Run(ctx, r.signal)
		close(ended)
	}()
	t.Cleanup(func() {
		stop()
		<-ended
	})
	return r
}

func (r *reloading) path(name string) string { return filepath.Join(r.dir, name) }

// write replaces a file.
func (r *reloading) write(name, text string) {
	r.t.Helper()
	testkit.WriteFile(r.t, r.path("next"), text)
	if err := os.Rename(r.path("next"), r.path(name)); err != nil {
		r.t.Fatal(err)
	}
}

// hangUp sends the signal and waits for the next log line, which must contain want.
func (r *reloading) hangUp(want string) {
	r.t.Helper()
	before := strings.Count(r.log.String(), "\n")
	r.signal <- syscall.SIGHUP
	r.says(before, want)
}

func (r *reloading) says(before int, want string) {
	r.t.Helper()
	testkit.Eventually(r.t, 20*time.Second, "the reload is logged", func() bool { return strings.Count(r.log.String(), "\n") > before })
	if line := strings.Split(r.log.String(), "\n")[before]; !strings.Contains(line, want) {
		r.t.Errorf("%s; want %q", line, want)
	}
}

// accepts reports whether a key is accepted.
func (r *reloading) accepts(key string) bool {
	engine := gin.New()
	engine.Use(r.keys.Guard(web.Fail))
	engine.GET("/", func(*gin.Context) {})
	request := httptest.NewRequest(http.MethodGet, "/", nil)
	request.Header.Set("Authorization", "Bearer "+key)
	w := httptest.NewRecorder()
	engine.ServeHTTP(w, request)
	return w.Code == http.StatusOK
}

// failed checks the metric.
func (r *reloading) failed(config, keys float64) {
	r.t.Helper()
	lines := testkit.Scrape(r.t, r.results.Collectors()...)
	for file, want := range map[string]float64{"config": config, "api_keys": keys} {
		if got, has := lines[fmt.Sprintf("kvrouter_config_reload_failed{file=%q}", file)]; !has || got != want {
			r.t.Errorf("%s is %v (%v), want %v", file, got, has, want)
		}
	}
	if len(lines) != 2 {
		r.t.Errorf("%v", lines)
	}
}

// TestFileThatCannotBeUsedChangesNothing: with any error in a file, the previous keys stay
// in use, the reason is logged, the metric shows it, and the next valid file takes effect.
func TestFileThatCannotBeUsedChangesNothing(t *testing.T) {
	r := newReloading(t)
	r.failed(0, 0)
	pipe := func() {
		if err := syscall.Mkfifo(r.path("pipe"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, test := range []struct {
		name         string
		change       func()
		want         string
		config, keys float64
	}{
		{"empty", func() { r.write("keys", "") }, "it has no keys: a reload must leave at least one", 0, 1},
		{"only a comment", func() { r.write("keys", "# keys\n") }, "it has no keys", 0, 1},
		{"null", func() { r.write("keys", "null") }, "it has no keys", 0, 1},
		{"cut off", func() { r.write("keys", "- {name: a, key: first-key}\n- {name: b") }, "line 2", 0, 1},
		{"nested", func() { r.write("keys", strings.Repeat("[", 100_000)) }, "nested more than 100 deep", 0, 1},
		{"large", func() { r.write("keys", strings.Repeat("#\n", 3<<20)) }, "it exceeds 4194304 bytes", 0, 1},
		{"comments", func() { r.write("keys", strings.Repeat("#\n", 1<<20)) }, "it has no keys", 0, 1},
		{"gone", func() { os.Remove(r.path("keys")) }, "no such file or directory", 0, 1},
		{"a pipe", func() { pipe(); os.Rename(r.path("pipe"), r.path("keys")) }, "it is not a regular file", 0, 1},
		{"settings are a pipe", func() {
			r.write("keys", "- {name: a, key: second-key}")
			pipe()
			os.Rename(r.path("pipe"), r.path("config"))
		}, "--config " + r.path("config") + ": it is not a regular file", 1, 0},
		{"both", func() { r.write("keys", "") }, "it is not a regular file; --api-keys-file " + r.path("keys") + ": it has no keys", 1, 1},
	} {
		test.change()
		r.hangUp(test.want)
		r.failed(test.config, test.keys)
		if !r.accepts("first-key") || !r.accepts("other-key") || r.accepts("second-key") {
			t.Errorf("%s: the keys have changed", test.name)
		}
	}
	r.write("config", "")
	r.write("keys", "- {name: a, key: second-key}")
	r.hangUp("api_keys=1")
	r.failed(0, 0)
	if r.accepts("first-key") || r.accepts("other-key") || !r.accepts("second-key") {
		t.Error("the good file does not count")
	}
	if strings.Contains(r.log.String(), "-key\"") || strings.Contains(r.log.String(), "first-key") {
		t.Error("a key is in the log")
	}
}

// TestReloadThatHangsIsLeftBehind: such as on a file system that does not answer. A signal
// during it is neither lost nor blocked.
func TestReloadThatHangsIsLeftBehind(t *testing.T) {
	r := newReloading(t)
	r.limit = 100 * time.Millisecond
	back := make(chan bool)
	hang := func() error {
		<-back
		return nil
	}
	r.reads <- hang
	r.write("keys", "- {name: a, key: second-key}")
	r.signal <- syscall.SIGHUP // hangs
	testkit.Eventually(t, 10*time.Second, "it reads", func() bool { return len(r.reads) == 0 })
	r.signal <- syscall.SIGHUP // meanwhile
	r.says(0, "its files were not read within 100ms")
	r.says(1, "api_keys=1")
	r.failed(0, 0)
	if r.accepts("first-key") || !r.accepts("second-key") {
		t.Error("the signal during the reload is lost")
	}
	for range maxHung - 1 {
		r.reads <- hang
		r.hangUp("its files were not read within 100ms")
		r.failed(1, 0)
	}
	r.hangUp("8 earlier reloads still wait for their files")
	close(back)
	testkit.Eventually(t, 10*time.Second, "they have come back", func() bool { return len(r.reading) == 0 })
	r.hangUp("api_keys=1")
	r.failed(0, 0)
}
