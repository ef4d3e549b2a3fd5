package jsonlines

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"
)

// written returns the lines of a file, and fails if one is not JSON.
func written(t *testing.T, file string) (lines []string) {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := Read(bytes.NewReader(text), func(number int, line []byte, whole bool) error {
		if !json.Valid(line) || !whole {
			t.Errorf("line %d is torn: %.100s", number, line)
		}
		lines = append(lines, string(line))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return lines
}

func TestATornLastLineIsMended(t *testing.T) {
	const good = `{"a":1}` + "\n"
	for _, test := range []struct {
		name, before, after string
		torn                int64
	}{
		{"no file", "", "", 0},
		{"whole", good, good, 0},
		{"torn", good + `{"a":2,"b`, good, 9},
		{"only a torn line", `{"a":2,"b`, "", 9},
		{"whole but for its end", good + `{"a":2}`, good + `{"a":2}` + "\n", 0},
		{"longer than a buffer", good + `{"a":"` + strings.Repeat("x", 200_000), good, 200_006},
	} {
		t.Run(test.name, func(t *testing.T) {
			name := filepath.Join(t.TempDir(), "lines")
			if test.before != "" {
				testkit.WriteFile(t, name, test.before)
			}
			file, torn, err := Open(name)
			if err != nil || torn != test.torn {
				t.Fatalf("%d bytes torn, %v", torn, err)
			}
			l := New(file, 10, "the lines", slog.New(slog.DiscardHandler))
			l.Write(map[string]int{"z": 9}, 9)
			l.Close()
			text, _ := os.ReadFile(name)
			if want := test.after + `{"z":9}` + "\n"; string(text) != want {
				t.Errorf("%.200s", text)
			}
		})
	}
}

func TestOnlyAPlainFileIsTaken(t *testing.T) {
	dir := t.TempDir()
	file, link, pipe := filepath.Join(dir, "file"), filepath.Join(dir, "link"), filepath.Join(dir, "pipe")
	testkit.WriteFile(t, file, "mine\n")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{link: "symbolic link", pipe: "not a regular file", "/dev/null": "not a regular file", dir: "directory"} {
		if f, _, err := Open(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, %v", name, f, err)
		}
	}
}

// TestAFullDiskIsWaitedFor writes to a file whose size is limited, as a full disk
// would be.
func TestAFullDiskIsWaitedFor(t *testing.T) {
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before); err != nil {
		t.Fatal(err)
	}
	signal.Ignore(syscall.SIGXFSZ) // a file that grows beyond the limit gets it
	defer signal.Reset(syscall.SIGXFSZ)
	limit := func(bytes uint64) {
		if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: bytes, Max: before.Max}); err != nil {
			t.Skip("sizes of files cannot be limited here: ", err)
		}
	}
	name := filepath.Join(t.TempDir(), "lines")
	file, _, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	log := &testkit.LogBuffer{}
	l := &Writer{File: file, what: "the lines", log: slog.New(slog.NewTextHandler(log, nil))}
	b := buffer{writer: l}
	line := map[string]string{"a": strings.Repeat("x", 1000)}
	for range 10 {
		b.add(line)
	}
	limit(4500)
	defer limit(before.Cur)
	b.flush()
	for range 5 {
		b.flush() // nothing changes, and the log says it once
	}
	if b.failing == nil || strings.Count(log.String(), "cannot write the lines") != 1 {
		t.Fatalf("%v, log %s", b.failing, log)
	}
	for range 2000 {
		b.add(line)
	}
	if n := len(b.bytes); n > maxBuffer+2000 {
		t.Errorf("%d bytes wait for the disk", n)
	}
	lost := l.Lost()
	if lost < 900 || lost > 1000 {
		t.Errorf("%d lines are lost", lost)
	}
	limit(before.Cur)
	b.flush()
	if b.failing != nil || !strings.Contains(log.String(), fmt.Sprintf("resumed writing the lines\" lost=%d", lost)) {
		t.Errorf("%v, log %s", b.failing, log)
	}
	_ = file.Close()
	if lines := written(t, name); len(lines) != 2010-int(lost) {
		t.Errorf("%d lines, %d lost", len(lines), lost)
	}
}

func TestLinesThatNeverReachedTheDiskAreCounted(t *testing.T) {
	file, _, err := Open(filepath.Join(t.TempDir(), "lines"))
	if err != nil {
		t.Fatal(err)
	}
	log := &testkit.LogBuffer{}
	l := New(file, 100, "the lines", slog.New(slog.NewTextHandler(log, nil)))
	_ = file.Close() // as good as a full disk
	for i := range 7 {
		l.Write(i, 8)
	}
	l.Write(make(chan int), 8) // no JSON
	l.Close()
	l.Close()
	if l.Lost() != 8 || !strings.Contains(log.String(), "lost=8") {
		t.Errorf("%d lines lost, log %s", l.Lost(), log)
	}
	var none *Writer
	none.Write(1, 8)
	none.Close()
	if none.Lost() != 0 {
		t.Error("a writer of nothing has lost lines")
	}
}

// TestTheQueueIsBoundedInBytes: few lines may be large ones.
func TestTheQueueIsBoundedInBytes(t *testing.T) {
	file, _, err := Open(filepath.Join(t.TempDir(), "lines"))
	if err != nil {
		t.Fatal(err)
	}
	l := &Writer{File: file, what: "the lines", log: slog.New(slog.DiscardHandler), queue: make(chan queuedLine, 1000), done: make(chan struct{})}
	const size = maxQueued / 10
	for range 25 {
		l.Write("large", size)
	}
	l.Write("small", maxQueued-10*size)
	l.Write("too much", 1)
	if n := len(l.queue); n != 11 || l.Lost() != 16 {
		t.Errorf("%d lines wait and %d are lost, want 11 and 16", n, l.Lost())
	}
	go l.write()
	testkit.Eventually(t, 10*time.Second, "the queue has room again", func() bool { return l.queued.Load() == 0 })
	l.Write("large", size)
	l.Close()
	if lines := written(t, file.Name()); len(lines) != 12 {
		t.Errorf("%d lines were written, want 12", len(lines))
	}
}

func TestAFileWithALimitEndsThere(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lines")
	testkit.WriteFile(t, name, "1\n2\n")
	file, _, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	log := &testkit.LogBuffer{}
	l := New(file, 100, "the lines", slog.New(slog.NewTextHandler(log, nil)))
	l.Limit(10)
	for _, line := range []any{3, 4, "too long", 5, 6} { // 5 would have had room
		l.Write(line, 8)
	}
	l.Close()
	if lines := written(t, name); fmt.Sprint(lines) != "[1 2 3 4]" || l.Lost() != 3 || strings.Count(log.String(), "writing has stopped") != 1 {
		t.Errorf("lines %v, %d lost, log %s", lines, l.Lost(), log)
	}
}

func TestLinesReachTheDiskSoon(t *testing.T) {
	name := filepath.Join(t.TempDir(), "lines")
	file, _, err := Open(name)
	if err != nil {
		t.Fatal(err)
	}
	l := New(file, 100, "the lines", slog.New(slog.DiscardHandler))
	defer l.Close()
	l.Write(1, 8)
	testkit.Eventually(t, 10*time.Second, "the line is on the disk", func() bool {
		text, _ := os.ReadFile(name)
		return string(text) == "1\n"
	})
}

func TestLinesOfAnyLengthAreRead(t *testing.T) {
	long := strings.Repeat("y", 300_000)
	var got []string
	err := Read(strings.NewReader("a\n\n  \n"+long+"\r\nlast"), func(number int, line []byte, whole bool) error {
		got = append(got, fmt.Sprint(number, len(line), whole))
		return nil
	})
	if want := "[1 1 true 4 300000 true 5 4 false]"; err != nil || fmt.Sprint(got) != want {
		t.Errorf("%v, %v, want %s", got, err, want)
	}
}

func TestBegins(t *testing.T) {
	const start = `{"timestamp":`
	for line, want := range map[string]bool{`{"timestamp":1}`: true, `{"timestamp": 12, "inp`: true, `{ "timest`: true, `{`: true, ``: false, `dear diary`: false, `{"a":1}`: false, `[`: false} {
		if Begins([]byte(line), start) != want {
			t.Errorf("%s: %v", line, !want)
		}
	}
}

// FuzzMend opens a file with any content: what is left are whole lines, and what was
// a whole line is left.
func FuzzMend(f *testing.F) {
	f.Add([]byte(`{"a":1}` + "\n" + `{"b`))
	f.Add([]byte(`{"a":1}`))
	f.Add([]byte("\n"))
	f.Add([]byte("x"))
	dir := f.TempDir()
	f.Fuzz(func(t *testing.T, before []byte) {
		name := filepath.Join(dir, "lines")
		if err := os.WriteFile(name, before, 0o600); err != nil {
			t.Fatal(err)
		}
		file, torn, err := Open(name)
		if err != nil {
			t.Fatal(err)
		}
		_ = file.Close()
		after, _ := os.ReadFile(name)
		whole := before[:bytes.LastIndexByte(before, '\n')+1]
		if !bytes.HasPrefix(after, whole) || len(after) > 0 && after[len(after)-1] != '\n' || int64(len(before))-torn > int64(len(after)) {
			t.Fatalf("%q became %q, %d bytes torn", before, after, torn)
		}
	})
}
