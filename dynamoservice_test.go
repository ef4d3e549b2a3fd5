package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kvrouter/internal/testkit"

	"github.com/tidwall/gjson"
)

// parityPython names the Python that has ai-dynamo-runtime; make parity sets it.
const parityPython = "KVROUTER_DYNAMO_PYTHON"

// dynamoService starts python -m dynamo.select_service and returns its URL.
func dynamoService(t *testing.T, args ...string) string {
	t.Helper()
	python := os.Getenv(parityPython)
	if python == "" {
		t.Skip("needs Dynamo's selection service: run it with `make parity`")
	}
	port := testkit.FreePorts(t, 1)
	command := exec.Command(python, append([]string{"-m", "dynamo.select_service", "--port", fmt.Sprint(port)}, args...)...)
	log := &testkit.LogBuffer{}
	command.Stdout, command.Stderr = log, log
	command.WaitDelay = 5 * time.Second
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		command.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		command.Process.Signal(syscall.SIGTERM)
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			command.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("end of the service's log:\n%s", log.String()[max(0, len(log.String())-3000):])
		}
	})
	url := fmt.Sprintf("http://127.0.0.1:%d", port)
	testkit.Eventually(t, 60*time.Second, "Dynamo's selection service answers", func() bool {
		response, err := http.Get(url + "/health")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	return url
}

// reply is an answer of one of the two.
type reply struct {
	status int
	gjson.Result
}

func ask(t testing.TB, base, method, path string, query any) reply {
	t.Helper()
	var content io.Reader
	if query != nil {
		text, err := json.Marshal(query)
		if err != nil {
			t.Fatal(err)
		}
		content = bytes.NewReader(text)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, base+path, content)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", "application/json")
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return reply{response.StatusCode, gjson.ParseBytes(text)}
}

// normal writes a value in one form, whatever the order of its keys.
func normal(v gjson.Result) string {
	if v.IsObject() {
		members := v.Map()
		var parts []string
		for _, name := range slices.Sorted(maps.Keys(members)) {
			parts = append(parts, name+":"+normal(members[name]))
		}
		return "{" + strings.Join(parts, ",") + "}"
	}
	return v.Raw
}

func place(row gjson.Result) string {
	return fmt.Sprintf("%d/%d", row.Get("worker_id").Uint(), row.Get("dp_rank").Uint())
}

// rows sorts a list of per-rank objects and keeps the fields named.
func rows(list gjson.Result, fields ...string) []string {
	var out []string
	for _, row := range list.Array() {
		text := fmt.Sprintf("%d/%d", row.Get("worker_id").Uint(), row.Get("dp_rank").Uint())
		for _, field := range fields {
			text += fmt.Sprintf(" %s=%s", field, row.Get(field).Raw)
		}
		out = append(out, text)
	}
	slices.Sort(out)
	return out
}

// heldIn makes of a dump a sorted list of what each rank holds after what.
func heldIn(dump gjson.Result) []string {
	held := map[string]bool{}
	dump.ForEach(func(name, part gjson.Result) bool {
		for _, e := range part.Get("events").Array() {
			stored := e.Get("event.data.stored")
			parent := stored.Get("parent_hash").Raw
			for _, b := range stored.Get("blocks").Array() {
				held[fmt.Sprintf("%s bs=%s %s/%s %s>%s %s", name, part.Get("block_size").Raw, e.Get("worker_id").Raw, e.Get("event.dp_rank").Raw,
					cmp.Or(parent, "null"), b.Get("block_hash").Raw, b.Get("tokens_hash").Raw)] = true
				parent = b.Get("block_hash").Raw
			}
		}
		return true
	})
	return slices.Sorted(maps.Keys(held))
}

// missing shows what a has that b has not.
func missing(a, b []string) string {
	var only []string
	for _, line := range a {
		if _, found := slices.BinarySearch(b, line); !found {
			only = append(only, line)
		}
	}
	return fmt.Sprintf("%d blocks, %d of them alone: %.400s", len(a), len(only), strings.Join(only, "; "))
}
