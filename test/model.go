package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/tokenstest"
)

// ModelFolder returns the folder of the model that real engines serve in tests.
func ModelFolder() string {
	return filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct")
}

// OpenModel opens the model of ModelFolder. The test fails if `make setup` has not
// prepared it.
func OpenModel(t testing.TB) *tokens.Model {
	t.Helper()
	m, err := tokenstest.Open(t.Context(), ModelFolder())
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	t.Cleanup(m.Close)
	return m
}

// ParityChats are bodies for /tokenize: a router and an engine must answer each with
// the same tokens.
func ParityChats() (bodies [][]byte) {
	for _, c := range testkit.ChatsForParity() {
		bodies = append(bodies, []byte(c.Body))
	}
	paragraph := strings.Repeat("The quick brown fox jumps over the lazy dog, 12345 times. Größe! ", 60)
	return append(bodies, []byte(`{"messages":[{"role":"system","content":"`+paragraph+`"},{"role":"user","content":"`+paragraph+`"}]}`))
}
