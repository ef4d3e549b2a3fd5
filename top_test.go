package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/testkit"
	"kvrouter/internal/top"
)

// TestTopShowsTheFleet: one frame has the workers and requests of a router, as its
// metrics count them, and wants the router port's key.
func TestTopShowsTheFleet(t *testing.T) {
	s := startMockSite(t, 3, "--router-api-key=secret")
	look := func(keys ...string) (string, error) {
		t.Helper()
		file := filepath.Join(t.TempDir(), "out")
		out, err := os.Create(file)
		if err != nil {
			t.Fatal(err)
		}
		defer out.Close()
		err = top.Command{RouterURL: s.selection, Once: true}.Run(t.Context(), keys, out)
		text, _ := os.ReadFile(file)
		return string(text), err
	}
	if _, err := look(); err == nil || !strings.Contains(err.Error(), "--router-api-key") {
		t.Errorf("without a key: %v", err)
	}
	for i := range 4 {
		if a, err := s.chat(t.Context(), longPrompt(i%2), true, 8); err != nil || !a.finished {
			t.Fatalf("%+v, %v", a, err)
		}
	}
	s.settle()
	var text string
	testkit.Eventually(t, 20*time.Second, "the four requests are shown", func() bool {
		var err error
		if text, err = look("secret"); err != nil {
			t.Fatal(err)
		}
		return strings.Contains(text, " 4 requests ")
	})
	if !strings.Contains(text, "3 of 3 workers") || strings.Contains(text, "\x1b") {
		t.Errorf("%q", text)
	}
	for i := range 3 {
		if !regexp.MustCompile(fmt.Sprintf(`(?m)^%d +ready +0 .*%s$`, i, regexp.QuoteMeta(s.workerURL(i)))).MatchString(text) {
			t.Errorf("worker %d is not shown as ready:\n%s", i, text)
		}
	}
}
