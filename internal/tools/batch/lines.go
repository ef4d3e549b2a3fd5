package batch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"
)

// Bounds of a file of requests.
const (
	maxLine     = 64 << 20   // bytes of a line, as --max-body-bytes of the router
	maxRequests = 10_000_000 // lines: each costs about 100 bytes of memory
	maxID       = 512        // bytes of a custom_id
)

// paths are the allowed routes: they compute, and change nothing.
var paths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings",
	"/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify",
}

// request is a line of the file.
type request struct {
	number int // of its line, from 1
	id     string
	path   string
	body   json.RawMessage
}

// identity is a custom_id in 16 bytes. Two of ten million are equal with a probability of
// about 10^-25.
type identity = xxh3.Uint128

func identityOf(id string) identity { return xxh3.HashString128(id) }

// parse reads a line. An error names the valid form; its request has a custom_id if the
// line has one.
func parse(number int, line []byte) (request, error) {
	var wire struct {
		CustomID string          `json:"custom_id"`
		Method   string          `json:"method"`
		URL      string          `json:"url"`
		Body     json.RawMessage `json:"body"`
	}
	if number == 1 {
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf")) // byte order mark, by tools on Windows
	}
	if !utf8.Valid(line) {
		return request{}, errors.New("it is not UTF-8")
	}
	if err := json.Unmarshal(line, &wire); err != nil {
		return request{}, fmt.Errorf("it is not a JSON object with custom_id, method, url and body: %w", err)
	}
	switch {
	case wire.CustomID == "":
		return request{}, errors.New("it has no custom_id: give each request a text of its own")
	case len(wire.CustomID) > maxID:
		return request{}, fmt.Errorf("custom_id has %d bytes: give at most %d", len(wire.CustomID), maxID)
	}
	r := request{number, wire.CustomID, wire.URL, wire.Body}
	switch {
	case wire.Method != http.MethodPost:
		return r, fmt.Errorf("method %.20q: give POST", wire.Method)
	case !slices.Contains(paths, wire.URL):
		return r, fmt.Errorf("url %.100q: give one of %s", wire.URL, strings.Join(paths, ", "))
	case !gjson.ParseBytes(wire.Body).IsObject():
		return r, errors.New("body is not a JSON object")
	case gjson.GetBytes(wire.Body, "stream").Bool():
		return r, errors.New("body.stream is true: a result is one answer; remove it")
	}
	return r, nil
}

// errLong is the error of a line that was skipped.
var errLong = fmt.Errorf("it is longer than %d bytes", maxLine)

// readLines calls yield with the number and the text of each line that is not blank, until
// yield returns an error, which readLines returns. A line longer than most bytes, its end
// included, is passed as nil. The text is valid until yield returns.
func readLines(from io.Reader, most int, yield func(number int, line []byte) error) error {
	lines := bufio.NewReaderSize(from, 64<<10)
	var long []byte
	for number := 1; ; number++ {
		long = long[:0]
		skipped := false
		var part []byte
		var err error
		for {
			part, err = lines.ReadSlice('\n')
			if skipped = skipped || len(long)+len(part) > most; skipped {
				long = long[:0]
			} else if len(long) > 0 || errors.Is(err, bufio.ErrBufferFull) {
				long = append(long, part...)
			}
			if !errors.Is(err, bufio.ErrBufferFull) {
				break
			}
		}
		if err != nil && err != io.EOF {
			return fmt.Errorf("after line %d: %w", number-1, err)
		}
		line := part
		if len(long) > 0 {
			line = long
		}
		if number == 1 {
			line = bytes.TrimPrefix(line, []byte("\ufeff"))
		}
		line = bytes.TrimSpace(line)
		switch {
		case skipped:
			line = nil
			fallthrough
		case len(line) > 0:
			if failed := yield(number, line); failed != nil {
				return failed
			}
		}
		if err == io.EOF {
			return nil
		}
		if cap(long) > 4<<20 {
			long = nil // memory of an unusually long line
		}
	}
}

// requests calls yield with the requests of the file, in their order, and with the lines
// that are none.
func requests(from io.Reader, yield func(r request, bad error) error) error {
	count := 0
	return readLines(from, maxLine, func(number int, line []byte) error {
		if count++; count > maxRequests {
			return fmt.Errorf("line %d: a file may have %d requests: split it", number, maxRequests)
		}
		if line == nil {
			return yield(request{number: number}, errLong)
		}
		r, err := parse(number, line)
		r.number = number
		return yield(r, err)
	})
}
