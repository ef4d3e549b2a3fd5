package proxy

import (
	"bufio"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"net/http"
	"strings"
)

// errPacked means that a worker answered with a content encoding that the router cannot read a
// request to which the router had added what its answer must not show: it must be sent again
// without.
var errPacked = errors.New("the worker answers with an unknown content encoding")

// unpacking is a transport to workers that asks for answers without a content encoding, and
// decodes those that have one all the same, as far as they can be decoded: what the router has
// asked for is taken out of them.
type unpacking struct{ http.RoundTripper }

// RoundTrip implements http.RoundTripper.
func (t unpacking) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := t.RoundTripper.RoundTrip(r)
	if err == nil {
		unpack(response)
	}
	return response, err
}

// CloseIdleConnections closes those of the transport.
func (t unpacking) CloseIdleConnections() {
	(&http.Client{Transport: t.RoundTripper}).CloseIdleConnections()
}

// encoding returns the content encoding of an answer; empty: it has none.
func encoding(header http.Header) string {
	e := strings.ToLower(strings.TrimSpace(strings.Join(header.Values("Content-Encoding"), ",")))
	if e == "identity" {
		return ""
	}
	return e
}

// unpack decodes an answer, if its content encoding is known.
func unpack(response *http.Response) {
	var open func(*bufio.Reader) (io.Reader, error)
	switch encoding(response.Header) {
	case "gzip", "x-gzip":
		open = func(from *bufio.Reader) (io.Reader, error) { return gzip.NewReader(from) }
	case "deflate":
		open = inflate
	default:
		return
	}
	response.Header.Del("Content-Encoding")
	response.Header.Del("Content-Length")
	response.ContentLength = -1
	response.Body = &unpackedBody{Closer: response.Body, from: bufio.NewReader(response.Body), open: open}
}

// inflate reads deflate with the header that the standard asks for, or without, as many servers
// send it.
func inflate(from *bufio.Reader) (io.Reader, error) {
	if head, err := from.Peek(2); err == nil && head[0]&0x0f == 8 && (uint(head[0])<<8|uint(head[1]))%31 == 0 {
		return zlib.NewReader(from)
	}
	return flate.NewReader(from), nil
}

// unpackedBody is the decoded body of an answer, which may be empty.
type unpackedBody struct {
	io.Closer
	from *bufio.Reader
	open func(*bufio.Reader) (io.Reader, error)
	body io.Reader // nil: nothing has been read
}

// Read reads what has come so far.
func (b *unpackedBody) Read(into []byte) (n int, err error) {
	if b.body == nil {
		if _, err := b.from.Peek(1); err != nil {
			return 0, err
		}
		if b.body, err = b.open(b.from); err != nil {
			return 0, err
		}
	}
	return b.body.Read(into)
}

// asked reports whether the router has added what the answer to u must not show.
func (u *sending) asked() bool { return u.edits.usage || u.Migration != nil && u.Migration.added }

// maySendAgain reports whether u can be sent again as its client wrote it: not through a gateway,
// nor as one of two legs, nor the rest of an answer.
func (u *sending) maySendAgain(x *Exchange) bool {
	return u.Gateway == nil && x.Shared == nil && !u.Migration.open() && u.Body != nil
}
