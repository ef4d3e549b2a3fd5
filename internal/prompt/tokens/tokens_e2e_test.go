package tokens

import (
	"os"
	"path/filepath"
	"sync"
	"testing"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/encode"
)

// testModel returns the model that the workers of the end-to-end tests serve, which all
// tests share, with an empty cache: opening it takes longer than most of them.
func testModel(t testing.TB) *Model {
	t.Helper()
	m, err := sharedModel()
	if err != nil && testing.Short() {
		t.Skip("the test model is not set up: ", err)
	}
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	m.CacheTokens(encode.DefaultCache)
	return m
}

var sharedModel = sync.OnceValues(func() (*Model, error) {
	return openModel(filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"), chat.Options{}, chat.DefaultLimits)
})
