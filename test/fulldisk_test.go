package test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// TestAFullDiskCostsNoRequest: the files of a router are on a small file system, which
// then is full. The router answers on, logs each failure once and counts it, and leaves
// the files as they were.
func TestAFullDiskCostsNoRequest(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := syscall.Mount("kvrouter-test", dir, "tmpfs", 0, "size=256k"); err != nil {
		t.Skipf("needs the right to mount: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	record, state, index := filepath.Join(dir, "record"), filepath.Join(dir, "state"), filepath.Join(dir, "index")
	s := StartMocks(t, 2, "--policy=thompson", "--record="+record, "--thompson-state="+state, "--index-snapshot="+index, "--index-snapshot-interval=1s", "--log-level=info")
	var last time.Time
	chat := func(text string) { // a few a second: many would fill the disk themselves
		t.Helper()
		if time.Since(last) < 300*time.Millisecond {
			return
		}
		last = time.Now()
		if _, err := s.Chat(t.Context(), Say(strings.Repeat(text, 40)), false, 1); err != nil {
			t.Error(err)
		}
	}
	chat("first ")
	read := func(name string) []byte {
		text, err := os.ReadFile(name)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
		return text
	}
	testkit.Eventually(t, 60*time.Second, "all files are written", func() bool {
		return len(read(record)) > 0 && len(read(state)) > 0 && len(read(index)) > 0
	})
	filler, err := os.Create(filepath.Join(dir, "filler"))
	if err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = filler.Write(make([]byte, 4096))
	}
	if !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	filler.Close()
	files := map[string][]byte{state: read(state), index: read(index)}
	recorded := read(record)
	failures := func(file string) float64 {
		return s.Metrics()[`kvrouter_file_write_failures_total{file="`+file+`"}`]
	}
	testkit.Eventually(t, 90*time.Second, "every file fails twice", func() bool {
		chat("then " + time.Now().String())
		return failures("index_snapshot") >= 2 && failures("thompson_state") >= 2
	})
	for name, before := range files {
		if !bytes.Equal(read(name), before) {
			t.Errorf("%s has changed", filepath.Base(name))
		}
	}
	if now := read(record); !bytes.HasPrefix(now, recorded) {
		t.Error("the record is not what it was")
	}
	for _, line := range []string{"cannot write --index-snapshot", "failed to save the state of policy thompson"} {
		if n := strings.Count(s.Router.Log.String(), line); n != 1 {
			t.Errorf("%q stands %d times in the log", line, n)
		}
	}
	if err := os.Remove(filepath.Join(dir, "filler")); err != nil {
		t.Fatal(err)
	}
	testkit.Eventually(t, 60*time.Second, "all is written again", func() bool {
		chat("last ")
		return strings.Contains(s.Router.Log.String(), "can be written again") && strings.Contains(s.Router.Log.String(), "is saved again") && len(read(record)) > len(recorded)
	})
	s.Stop()
	for line := range bytes.Lines(read(record)) {
		if !bytes.HasSuffix(line, []byte("}\n")) || !bytes.HasPrefix(line, []byte(`{"timestamp":`)) {
			t.Errorf("the record has the line %.80q", line)
		}
	}
}
