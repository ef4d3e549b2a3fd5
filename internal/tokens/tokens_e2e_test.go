package tokens

import (
	"os"
	"path/filepath"
	"testing"

	"kvrouter/internal/settings"
)

// testModel opens the model that the workers of the end-to-end tests serve.
func testModel(t testing.TB) *Model {
	t.Helper()
	m, err := OpenModel(filepath.Join(settings.CacheDir(os.Getenv), "smollm2-135m-instruct"))
	if err != nil && testing.Short() {
		t.Skip("the test model is not set up: ", err)
	}
	if err != nil {
		t.Fatal("run make setup: ", err)
	}
	t.Cleanup(m.Close)
	return m
}
