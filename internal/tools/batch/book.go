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

	"kvrouter/internal/base/jsonlines"
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

// failure is the reason why there is no answer.
type failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
	Line    int    `json:"line,omitempty"` // of an invalid request; 0: it is valid
}

// Values of failure.Code.
const (
	codeLine        = "invalid_line"
	codeUnreachable = "unreachable"
	codeBroken      = "connection_error"
	codeTimeout     = "timeout"
	codeAnswer      = "invalid_answer"
)

// book has the completed requests: the files of the results and of the errors. A request
// with a line in one of them is done.
type book struct {
	mu      sync.Mutex // guards all below
	results *os.File
	errors  *os.File
	done    map[identity]bool // the requests; true: in the errors
	bad     map[int]bool      // numbers of the lines in the errors that are no requests
	torn    int64             // bytes of half-written lines that were cut off
	dirty   bool              // a line may not be on the disk yet
	broken  error             // a file cannot be written

	locks []*os.File
}

// errorsBeside returns the name of the file of the errors beside one of results.
func errorsBeside(results string) string {
	stem := strings.TrimSuffix(results, ".jsonl")
	return strings.TrimSuffix(stem, ".results") + ".errors.jsonl"
}

// openBook opens or makes the files, locks them against other processes, and reads what is
// done. A half-written last line of a killed process is cut off.
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

// lock locks a file against other processes until close, or until this one ends.
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

// open opens a file to append to and records its requests.
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

// note records a line of the files.
func (b *book) note(number int, line []byte, failed bool) error {
	fields := gjson.GetManyBytes(line, "id", "custom_id", "error.line")
	switch id := fields[1]; {
	case !gjson.ValidBytes(line) || fields[0].Type != gjson.String:
	case failed && fields[2].Int() > 0: // the line may be corrected: its custom_id is not done
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

// write writes the result of a request in one piece. After a failure, no further line is
// written: the failed one may be incomplete.
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

// sync writes the files to the disk, so that they survive the machine, too. It is an error if
// a later run would not find them.
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

// close closes and unlocks the files.
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
