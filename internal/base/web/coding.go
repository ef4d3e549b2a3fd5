package web

import (
	"bytes"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
)

const (
	// takenCodings are the content codings of requests that are decoded.
	takenCodings = "gzip, deflate"
	// decoderMemory is the memory of a decoder, bytes.
	decoderMemory = 64 << 10
)

// codingOf returns the content coding of a request's body; empty: it has none. An error is a
// *BodyError, and the answer then names the codings that are taken (RFC 9110, section
// 15.5.16).
func codingOf(w http.ResponseWriter, r *http.Request) (coding string, err error) {
	for _, value := range r.Header["Content-Encoding"] {
		for name := range strings.SplitSeq(value, ",") {
			name = strings.ToLower(strings.TrimSpace(name))
			switch {
			case name == "" || name == "identity":
			case coding == "" && (name == "gzip" || name == "x-gzip" || name == "deflate"):
				coding = name
			default:
				w.Header().Set("Accept-Encoding", takenCodings)
				return "", &BodyError{http.StatusUnsupportedMediaType,
					fmt.Sprintf("Content-Encoding %.100q is not supported: send the body with one of %s, or as it is",
						strings.Join(r.Header["Content-Encoding"], ", "), takenCodings)}
			}
		}
	}
	return coding, nil
}

// content returns the body of a request without its content coding, of at most that many bytes in
// either form, and its length; negative: unknown. Reading fails as http.MaxBytesReader does.
func content(w http.ResponseWriter, r *http.Request, coding string, most int64) (body io.Reader, length int64) {
	raw := http.MaxBytesReader(w, r.Body, most)
	if coding == "" {
		return raw, r.ContentLength
	}
	return http.MaxBytesReader(w, io.NopCloser(&decoder{raw: raw, coding: coding}), most), -1
}

// decoder decodes a body as it is read.
type decoder struct {
	raw    io.Reader
	coding string
	plain  io.Reader // nil: nothing was read
	failed error     // with which reading raw ended; nil: it has not
	came   bool      // raw had a byte
}

// Read returns decoded bytes.
func (d *decoder) Read(into []byte) (n int, err error) {
	if d.plain == nil {
		d.plain, err = d.open()
	}
	if err == nil {
		n, err = d.plain.Read(into)
	}
	switch {
	case err == nil || err == io.EOF:
	case d.failed != nil && d.failed != io.EOF:
		err = d.failed
	case !d.came: // an empty body has no coding
		err = io.EOF
	default:
		err = &BodyError{http.StatusBadRequest, "the request body is not valid " + d.coding + ", or not whole"}
	}
	return n, err
}

func (d *decoder) open() (io.Reader, error) {
	if d.coding == "deflate" {
		return zlib.NewReader(rawOf{d})
	}
	return gzip.NewReader(rawOf{d})
}

// rawOf reads what a decoder decodes.
type rawOf struct{ *decoder }

// Read notes how the body ends.
func (r rawOf) Read(into []byte) (n int, err error) {
	n, err = r.raw.Read(into)
	r.came, r.failed = r.came || n > 0, err
	return n, err
}

// ReadBody reads a small body of a request, JSON of at most that many bytes, without its content
// coding and byte order mark. An error is a *BodyError.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, error) {
	coding, err := codingOf(w, r)
	if err != nil {
		return nil, err
	}
	from, _ := content(w, r, coding, most)
	body, err := io.ReadAll(from)
	var own *BodyError
	var tooLarge *http.MaxBytesError
	switch {
	case err == nil:
		return bytes.TrimPrefix(body, []byte("\xef\xbb\xbf")), nil
	case errors.As(err, &own):
		return nil, own
	case errors.As(err, &tooLarge):
		return nil, &BodyError{http.StatusRequestEntityTooLarge, fmt.Sprintf("the body is larger than %d bytes", most)}
	}
	return nil, &BodyError{http.StatusBadRequest, "the request body could not be read"}
}
