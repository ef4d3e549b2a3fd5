package page

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

const vendored = "assets/vendor"

// TestVendoredFilesAreTheOnesOfTheTable holds each vendored file against its sum: a
// change by hand would be lost with the next version.
func TestVendoredFilesAreTheOnesOfTheTable(t *testing.T) {
	table, err := os.ReadFile(filepath.Join(vendored, "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	sums := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([^`]+)` .* \\| `([0-9a-f]{64})` \\|$").FindAllSubmatch(table, -1) {
		sums[string(row[1])] = string(row[2])
	}
	files, err := os.ReadDir(vendored)
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if file.Name() == "README.md" {
			continue
		}
		content, err := os.ReadFile(filepath.Join(vendored, file.Name()))
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.Sum256(content)
		if got, want := hex.EncodeToString(sum[:]), sums[file.Name()]; got != want {
			t.Errorf("%s has the sum %s, its README says %q", file.Name(), got, want)
		}
		delete(sums, file.Name())
	}
	for name := range sums {
		t.Errorf("%s is in the README and not there", name)
	}
}

// TestThePageAsksNoOtherHost reads what is served: nothing of ours names another host,
// and no script or style stands in the page itself, which its policy would refuse.
func TestThePageAsksNoOtherHost(t *testing.T) {
	files, err := filepath.Glob("assets/*.*")
	if err != nil || len(files) < 5 {
		t.Fatal(files, err)
	}
	address := regexp.MustCompile(`(?i)(https?:)?//[a-z0-9-]+\.[a-z]`)
	inline := regexp.MustCompile(`(?i)<style|<script(?:[^>]*)>[^<]|\son[a-z]+="|\sstyle="|\beval\(|new Function`)
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.ReplaceAll(string(content), "http://www.w3.org/2000/svg", "") // a name, not an address
		if found := address.FindString(text); found != "" {
			t.Errorf("%s names another host: %s", file, found)
		}
		if found := inline.FindString(text); found != "" {
			t.Errorf("%s has something inline: %s", file, found)
		}
	}
}
