package web

import (
	"io"
	"net/http"
	"testing"
)

// TestHeadHasTheHeadersOfGet on every route, over both versions of HTTP; a stream ends with
// its headers.
func TestHeadHasTheHeadersOfGet(t *testing.T) {
	mux := http.NewServeMux()
	for path, size := range map[string]int{"GET /none": 0, "GET /short": 10, "GET /long": 10_000} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "text/x")
			w.Write(make([]byte, size))
		})
	}
	mux.HandleFunc("GET /stream", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/x")
		http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	p := serveListened(t, mux.ServeHTTP, nil, 4, Stall)
	for name, client := range map[string]*http.Client{"HTTP/1": http.DefaultClient, "HTTP/2": onlyH2(t)} {
		for path, length := range map[string]int64{"/none": 0, "/short": 10, "/long": 10_000, "/stream": -1} {
			response, err := client.Head(p.URL() + path)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(response.Body)
			response.Body.Close()
			if length < 0 {
				length = response.ContentLength
			}
			if err != nil || response.StatusCode != http.StatusOK || len(body) > 0 || response.ContentLength != length || response.Header.Get("Content-Type") != "text/x" {
				t.Errorf("%s %s: %v %v, %d bytes, %v", name, path, response.Status, response.Header, len(body), err)
			}
		}
		response, err := client.Head(p.URL() + "/unknown")
		if err != nil || response.StatusCode != http.StatusNotFound {
			t.Errorf("%s: %v, %v", name, response, err)
		}
	}
}
