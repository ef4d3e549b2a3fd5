package main

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// groups are the folders of internal/ from the bottom up, with their packages in order. A
// package may import those of lower groups, and of its own group those that are listed
// before it.
var groups = []struct{ name, packages string }{
	{"base", "blockpool cuckoo fair jsonbody jsonlines kv logs manual metrics quota table textfile zmq guard reload sets settings web directives"},
	{"prompt", "hints native native/library native/link chat encode tokens"},
	{"cache", "summary radix events"},
	{"decide", "health policy router thompson policies models"},
	{"peers", "cells relay replica cluster dynamo"},
	{"fleet", "control discovery probe process sglang vllm workers"},
	{"serve", "keys selection tracing proxy extproc openai page telemetry"},
	{"tools", "batch demo engine top mocker simulate doctor"},
}

// testImports are the packages of higher groups that the tests of a package may import,
// besides testkit.
var testImports = map[string]string{
	"base/jsonbody":   "prompt/chat",                                // real requests
	"base/reload":     "serve/keys serve/telemetry",                 // a real source, and what it reports
	"cache/radix":     "decide/policy decide/router tools/simulate", // whole runs on an index
	"decide/policy":   "tools/simulate",
	"decide/router":   "fleet/probe", // captures of engines
	"serve/openai":    "tools/mocker",
	"serve/telemetry": "tools/simulate",
}

// TestPackagesImportOnlyWhatLiesBelowThem compares what go list says with groups.
func TestPackagesImportOnlyWhatLiesBelowThem(t *testing.T) {
	const prefix = "kvrouter/internal/"
	out, err := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	order, groupOf := map[string]int{}, map[string]int{} // from the bottom up
	for i, group := range groups {
		for name := range strings.FieldsSeq(group.packages) {
			name = group.name + "/" + name
			order[name], groupOf[name] = len(order), i
		}
	}
	found := 0
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			ImportPath                         string
			Imports, TestImports, XTestImports []string
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name, internal := strings.CutPrefix(p.ImportPath, prefix)
		forTests := strings.HasPrefix(name, "testkit") || strings.HasPrefix(p.ImportPath, "kvrouter/test")
		for _, imported := range p.Imports {
			if strings.HasPrefix(imported, prefix+"testkit") && !forTests {
				t.Errorf("%s imports %s, which is for tests", p.ImportPath, imported)
			}
		}
		if !internal || forTests {
			continue
		}
		found++
		at, known := order[name]
		if !known {
			t.Errorf("package %s is in no group: add it to groups", name)
		}
		for _, imported := range p.Imports {
			if below, ours := strings.CutPrefix(imported, prefix); ours && order[below] >= at {
				t.Errorf("package %s may not import %s", name, below)
			}
		}
		for _, imported := range slices.Concat(p.TestImports, p.XTestImports) {
			above, ours := strings.CutPrefix(imported, prefix)
			if ours && groupOf[above] > groupOf[name] && !slices.Contains(strings.Fields(testImports[name]), above) {
				t.Errorf("tests of package %s may not import %s", name, above)
			}
		}
	}
	if found != len(order) {
		t.Errorf("%d packages found, %d are in groups", found, len(order))
	}
}
