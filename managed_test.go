package main

import (
	"io"
	"net/http"
)

// call sends a request without a body, as sglang-router's clients do.
func (s *selectionSite) call(method, path string, headers ...string) (int, string) {
	s.t.Helper()
	request, err := http.NewRequestWithContext(s.t.Context(), method, s.selection+path, nil)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i+1 < len(headers); i += 2 {
		request.Header.Set(headers[i], headers[i+1])
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		s.t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return response.StatusCode, string(text)
}

func (s *selectionSite) calls(method, path string, status int, want string) {
	s.t.Helper()
	if got, text := s.call(method, path); got != status || text != want {
		s.t.Errorf("%s %s: %d %s, want %d %s", method, path, got, text, status, want)
	}
}
