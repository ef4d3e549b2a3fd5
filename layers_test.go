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

// layers lists the packages of internal/ from the bottom up, each with those that
// it may import. A package may import from layers before its own only: what is
// not in the table is a shortcut, even where the compiler would take it.
var layers = []map[string]string{
	{ // mechanisms that others use
		"cuckoo": "", "metrics": "", "native": "", "table": "", "quota": "", "textfile": "",
	},
	{ // words and mechanisms
		"kv": "", "guard": "metrics", "sets": "table",
		"blockpool": "", "zmq": "", "jsonbody": "",
		"jsonlines": "", "web": "quota", "settings": "textfile",
		"logs": "", "manual": "", "fair": "",
		"summary": "cuckoo table", "native/library": "native",
	},
	{ // knowing
		"directives": "jsonbody web", "hints": "fair jsonbody kv", "radix": "blockpool kv sets summary table", "engine": "blockpool kv",
		"keys": "fair textfile web", "reload": "textfile", "native/link": "native native/library",
	},
	{ // text
		"chat": "guard jsonbody native native/link", "encode": "guard native native/link",
	},
	{ // prompts, judging, hearing
		"tokens": "chat encode jsonbody kv native", "policy": "fair hints kv", "events": "guard jsonlines kv radix web zmq", "health": "kv",
	},
	{ // learning
		"thompson": "hints jsonlines kv policy settings textfile",
	},
	{ // all policies
		"policies": "policy thompson",
	},
	{ // deciding, starting
		"router": "fair health hints kv policy radix sets summary table", "process": "events kv",
		"probe": "events guard kv policy web zmq", "cells": "fair kv metrics policy summary web",
	},
	{ // following
		"tracing": "kv policy router", "models": "chat fair health kv metrics policies policy radix router summary tokens",
	},
	{ // carrying
		"replica": "events fair guard kv router zmq", "relay": "cuckoo kv metrics radix", "proxy": "directives health jsonbody kv policy quota router tracing web", "workers": "cells events fair guard health kv metrics policy probe process radix summary web",
		"mocker": "chat engine events jsonbody kv process settings tokens web zmq", "simulate": "cells engine fair health hints jsonlines kv policies policy radix router summary textfile",
		"vllm": "kv process textfile", "sglang": "kv process", "discovery": "kv textfile",
	},
	{ // showing, offering
		"telemetry": "fair hints jsonbody jsonlines kv metrics policy proxy router thompson", "selection": "events health hints kv models policy quota replica router thompson web workers",
		"openai": "cells directives fair health hints jsonbody keys kv models proxy quota router settings tokens tracing web", "extproc": "guard proxy web", "doctor": "cells events kv mocker native probe process settings summary tokens web zmq", "demo": "keys",
		"page": "fair health jsonbody keys kv metrics models policy proxy router tokens web workers",
	},
	{ // looking from elsewhere
		"top": "page", "batch": "fair hints jsonlines",
	},
}

// inTests lists what the tests of a package import beside what it may import itself, and packages
// for tests. What is not here is a test of another package: its place is there.
var inTests = map[string]string{
	"doctor": "vllm", "encode": "chat jsonbody settings", "engine": "radix", "events": "tokens", "extproc": "kv", "jsonbody": "chat",
	"mocker": "settings", "models": "encode jsonbody settings", "openai": "mocker telemetry", "page": "probe radix", "policies": "hints kv",
	"policy": "health policies radix router simulate", "proxy": "policies", "radix": "policy router simulate", "reload": "keys telemetry web",
	"replica": "health", "router": "events policies probe", "selection": "guard probe", "simulate": "mocker",
	"telemetry": "events guard logs models simulate web workers", "thompson": "radix router", "tokens": "settings", "workers": "vllm zmq",
	"zmq": "settings",
}

// TestPackagesImportOnlyWhatLiesBelowThem holds what go list says against layers and inTests.
func TestPackagesImportOnlyWhatLiesBelowThem(t *testing.T) {
	const prefix = "kvrouter/internal/"
	out, err := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports,TestImports,XTestImports", "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	may, seen := map[string][]string{}, []string{}
	for _, layer := range layers {
		for name, imports := range layer {
			may[name] = strings.Fields(imports)
			for _, below := range may[name] {
				if !slices.Contains(seen, below) {
					t.Errorf("layers: %s lies in no layer below %s", below, name)
				}
			}
		}
		for name := range layer {
			seen = append(seen, name)
		}
	}
	found := 0
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; found++ {
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
		if !internal || strings.HasPrefix(name, "testkit") {
			for _, imported := range p.Imports {
				if !internal && strings.HasPrefix(imported, prefix+"testkit") && !strings.HasPrefix(p.ImportPath, "kvrouter/test") {
					t.Errorf("%s imports %s, which is for tests", p.ImportPath, imported)
				}
			}
			continue
		}
		allowed, known := may[name]
		if !known {
			t.Errorf("package %s is in no layer: give it a place in layers", name)
		}
		for _, imported := range p.Imports {
			if below, ours := strings.CutPrefix(imported, prefix); ours && !slices.Contains(allowed, below) {
				t.Errorf("package %s may not import %s", name, below)
			}
		}
		allowed = slices.Concat(allowed, strings.Fields(inTests[name]), []string{name})
		for _, imported := range slices.Concat(p.TestImports, p.XTestImports) {
			below, ours := strings.CutPrefix(imported, prefix)
			if ours && !strings.HasPrefix(below, "testkit") && !slices.Contains(allowed, below) {
				t.Errorf("tests of package %s may not import %s", name, below)
			}
		}
	}
	if found < len(may) {
		t.Errorf("%d packages found, %d are in layers", found, len(may))
	}
}
