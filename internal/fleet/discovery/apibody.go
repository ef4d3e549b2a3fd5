package discovery

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"mime"
	"net/http"
)

// Bounds of the API server's answers, bytes. client-go reads a list, and each object of a
// watch, into memory before it looks at it. The API server refuses to store objects of
// more than 3 MiB.
const (
	maxObject = 8 << 20
	maxList   = 512 << 20
)

// boundedAPI is a connection to an API server whose answers are bounded.
type boundedAPI struct {
	http.RoundTripper
	log *slog.Logger
}

// RoundTrip sends a request.
func (b boundedAPI) RoundTrip(r *http.Request) (*http.Response, error) {
	response, err := b.RoundTripper.RoundTrip(r)
	if err != nil {
		return response, err
	}
	body := &apiBody{ReadCloser: response.Body, most: maxList, left: maxList}
	if r.URL.Query().Has("watch") && response.StatusCode == http.StatusOK {
		kind, _, _ := mime.ParseMediaType(response.Header.Get("Content-Type"))
		if kind != "application/json" { // client-go refuses it, and leaves its connection open
			_ = response.Body.Close()
			return nil, fmt.Errorf("the content type of a watch is %.40q, want application/json", kind)
		}
		body.watch, body.most, body.left = true, maxObject, maxObject
	}
	body.over = func(err error) { b.log.Warn("Kubernetes API: "+err.Error(), "path", r.URL.Path) }
	response.Body = body
	return response, nil
}

// apiBody is an answer of the API server. It fails beyond its bound.
type apiBody struct {
	io.ReadCloser
	watch bool // the bound is that of a line
	most  int  // bytes
	left  int  // of most
	over  func(error)
}

// Read reads the next part of the answer.
func (b *apiBody) Read(to []byte) (n int, err error) {
	n, err = b.ReadCloser.Read(to)
	b.left -= n
	if b.watch {
		if at := bytes.LastIndexByte(to[:n], '\n'); at >= 0 {
			b.left = b.most - (n - at - 1)
		}
	}
	if b.left >= 0 {
		return n, err
	}
	what := "a list"
	if b.watch {
		what = "an object"
	}
	err = fmt.Errorf("%s has more than %d MiB, which is the maximum", what, b.most>>20)
	b.over(err)
	return 0, err
}
