package testkit

import (
	"io"
	"net/http"
	"testing"
)

func Get(t testing.TB, url string) (status int, answer []byte) {
	t.Helper()
	response, err := http.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if answer, err = io.ReadAll(response.Body); err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, answer
}
