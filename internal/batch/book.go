package batch

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"

	"github.com/tidwall/gjson"

	"kvrouter/internal/jsonlines"
)

// output is a line of the results or of the errors, in the form of OpenAI's batch API.
type output struct {
	ID       string    `json:"id"`
	CustomID *string   `json:"custom_id"` // nil: the line has none
	Response *response `json:"response"`
	Error    *failure  `json:"error"`
}

// response is an answer of the endpoint.
type response struct {
	Status    int             `json:"status_code"`
	RequestID string          `json:"request_id"`
	Body      json.RawMessage `json:"body"`
}

// failure says why there is no answer.
type failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Line    int    `json:"line,omitempty"` // that is no request; 0: it is one
}

// Values of failure.Code.
const (
	codeLine        = "invalid_line"
	codeUnreachable = "unreachable"
	codeBroken      = "connection_error"
	codeTimeout     = "timeout"
	codeAnswer      = "invalid_answer"
)

// book is what has been done: the files of the results and of the errors. A request whose
// line is in one of them is done.
type book struct {
	mu      sync.Mutex // guards all below
	results *os.File
	errors  *os.File
	done    map[identity]bool // the requests; true: in the errors
	bad     map[int]bool      // the numbers of the lines in the errors that are no requests
	torn    int64             // bytes of half-written lines that were cut off
	dirty   bool              // a line may not be on the disk yet
	broken  error             // a file does not take lines

	locks []*os.File
}

// errorsBeside returns the name of the file of the errors beside one of results.
func errorsBeside(results string) string {
	stem := strings.TrimSuffix(results, ".jsonl")
	return strings.TrimSuffix(stem, ".results") + ".errors.jsonl"
}

// openBook opens or makes the files, locks them against other processes, and reads what is
// done. A half-written last line, as a killed process leaves it, is cut off.
func openBook(results, errors string) (b *book, err error) {
	b = &book{done: map[identity]bool{}, bad: map[int]bool{}}
	defer func() {
		if err != nil {
			_ = b.close()
		}
	}()
	for _, name := range []string{results, errors} {
		if err := b.lock(name); err != nil {
			return b, err
		}
	}
	if b.results, err = b.open(results, false); err != nil {
		return b, err
	}
	b.errors, err = b.open(errors, true)
	return b, err
}

// lock keeps other processes from a file until close, or until this one ends.
func (b *book) lock(name string) error {
	file, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if errors.Is(err, syscall.ELOOP) {
		return fmt.Errorf("%s is a symbolic link: give the path of the file itself", name)
	}
	if err != nil {
		return err
	}
	b.locks = append(b.locks, file)
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return fmt.Errorf("%s: another process writes to it: wait for it, or give another --output", name)
	}
	return nil
}

// open opens a file to append to and notes the requests in it.
func (b *book) open(name string, failed bool) (*os.File, error) {
	file, torn, err := jsonlines.Open(name)
	if err != nil {
		return nil, err
	}
	b.torn += torn
	in, err := os.Open(name)
	if err == nil {
		err = jsonlines.Read(in, func(number int, line []byte, _ bool) error { return b.note(number, line, failed) })
		_ = in.Close()
	}
	if err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return file, nil
}

// note notes a line of the files.
func (b *book) note(number int, line []byte, failed bool) error {
	fields := gjson.GetManyBytes(line, "id", "custom_id", "error.line")
	switch id := fields[1]; {
	case !gjson.ValidBytes(line) || fields[0].Type != gjson.String:
	case failed && fields[2].Int() > 0: // the line may be mended: its custom_id is not done
		b.bad[int(fields[2].Int())] = true
		return nil
	case id.Type == gjson.String:
		b.done[identityOf(id.String())] = failed
		return nil
	}
	return fmt.Errorf("line %d is not a result of a batch: give another --output, or remove the file", number)
}

// has reports whether a request is done, and if so, whether it failed.
func (b *book) has(r *request, bad bool) (done, failed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if bad {
		return b.bad[r.number], true
	}
	failed, done = b.done[identityOf(r.id)]
	return done, failed
}

// write writes what became of a request, in one piece. Once a file has failed, no further
// line is written: the failed one may be half there.
func (b *book) write(o *output, failed bool) error {
	line := new(bytes.Buffer)
	encoder := json.NewEncoder(line) // which writes the body in one line
	encoder.SetEscapeHTML(false)
	if err := encoder.Encode(o); err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.broken != nil {
		return b.broken
	}
	file := b.results
	if failed {
		file = b.errors
	}
	b.dirty = true
	if _, b.broken = file.Write(line.Bytes()); b.broken != nil {
		return b.broken
	}
	if o.Error != nil && o.Error.Line > 0 {
		b.bad[o.Error.Line] = true
	} else {
		b.done[identityOf(*o.CustomID)] = failed
	}
	return nil
}

// sync brings what was written to the disk, so that it outlives the machine too. Files that are
// no longer where a later run looks for them are an error.
func (b *book) sync() error {
	if err := b.inPlace(); err != nil {
		return err
	}
	b.mu.Lock()
	dirty := b.dirty
	b.dirty = false
	b.mu.Unlock()
	if !dirty {
		return nil
	}
	return errors.Join(b.results.Sync(), b.errors.Sync())
}

// inPlace returns an error if a file was renamed, removed or replaced: a later run would send
// its requests again.
func (b *book) inPlace() error {
	for _, file := range []*os.File{b.results, b.errors} {
		own, err := file.Stat()
		if err != nil {
			return err
		}
		if now, err := os.Lstat(file.Name()); err != nil || !os.SameFile(own, now) {
			return fmt.Errorf("%s was renamed, removed or replaced during the run: what was written after that is not in it", file.Name())
		}
	}
	return nil
}

// close ends the use of the files. Other processes may use them then.
func (b *book) close() (err error) {
	for _, file := range []*os.File{b.results, b.errors} {
		if file != nil {
			err = errors.Join(err, file.Sync(), file.Close())
		}
	}
	for _, lock := range b.locks {
		_ = lock.Close()
	}
	return err
}
