package batch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/tidwall/gjson"
	"pgregory.net/rapid"

	"kvrouter/internal/testkit"
)

// lineOf is a good line of a file.
func lineOf(id string) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":"/v1/chat/completions","body":{"model":"m","user":%q,"messages":[]}}`, id, id)
}

// fileOf writes a file of requests.
func fileOf(t *testing.T, lines ...string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "requests")
	testkit.WriteFile(t, path, strings.Join(lines, "\n")+"\n")
	return path
}

// written returns the lines of both files by custom_id, bad lines by their number.
func written(t *testing.T, file string) (results, failed map[string][]gjson.Result) {
	t.Helper()
	read := func(name string) map[string][]gjson.Result {
		all := map[string][]gjson.Result{}
		text, err := os.ReadFile(name)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !strings.HasSuffix(line, "\n") || !gjson.Valid(line) {
				continue // half-written
			}
			at := gjson.Get(line, "custom_id").String()
			if number := gjson.Get(line, "error.line"); number.Exists() {
				at = "line " + number.String()
			}
			all[at] = append(all[at], gjson.Parse(line))
		}
		return all
	}
	return read(file + ".results.jsonl"), read(file + ".errors.jsonl")
}

// endpoint is an OpenAI endpoint in this process, in virtual time.
type endpoint struct {
	mu      sync.Mutex // guards all below
	served  map[string]int
	flying  int
	most    int // of flying
	latency time.Duration
	// answer returns the status of the n-th attempt at an id, from 0; 0: the connection
	// breaks, -1: there is none.
	answer func(id string, n int) int
	header http.Header
	came   func(id string) // is called with each
}

// RoundTrip implements http.RoundTripper.
func (e *endpoint) RoundTrip(in *http.Request) (*http.Response, error) {
	body, _ := io.ReadAll(in.Body)
	id := gjson.GetBytes(body, "user").String()
	e.mu.Lock()
	n := e.served[id]
	if e.served == nil {
		e.served = map[string]int{}
	}
	status := http.StatusOK
	if e.answer != nil {
		status = e.answer(id, n)
	}
	e.served[id]++
	if e.came != nil {
		e.came(id)
	}
	e.flying++
	e.most = max(e.most, e.flying)
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		e.flying--
		e.mu.Unlock()
	}()
	if status < 0 {
		return nil, errors.New("connection refused")
	}
	httptrace.ContextClientTrace(in.Context()).GotConn(httptrace.GotConnInfo{})
	select {
	case <-time.After(e.latency):
	case <-in.Context().Done():
		return nil, in.Context().Err()
	}
	if status == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	header := e.header.Clone()
	if header == nil {
		header = http.Header{}
	}
	return &http.Response{
		StatusCode: status, Header: header,
		Body: io.NopCloser(strings.NewReader(fmt.Sprintf(`{"of":%q,"usage":{"prompt_tokens":10,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}`, id))),
	}, nil
}

// run runs a command on the endpoint.
func (e *endpoint) run(ctx context.Context, t *testing.T, c Command) (summary string, err error) {
	t.Helper()
	if err := c.Validate(); err != nil {
		t.Fatal(err)
	}
	sender, err := newSender("http://endpoint", "", c.AnswerTimeout, 1)
	if err != nil {
		t.Fatal(err)
	}
	sender.client.Transport = e
	out := new(bytes.Buffer)
	err = c.run(ctx, sender, 5*time.Second, out, io.Discard)
	return out.String(), err
}

func TestEachLineGetsAResultOrAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		file := fileOf(t, lineOf("a"), "", "not JSON", lineOf("bad"), `{"custom_id":"get","method":"GET","url":"/v1/completions","body":{}}`, lineOf("broken"), lineOf("b"))
		e := &endpoint{latency: time.Second, header: http.Header{"X-Request-Id": {"req-1"}}, answer: func(id string, _ int) int {
			return map[string]int{"a": 200, "b": 200, "bad": 400, "broken": 0}[id]
		}}
		summary, err := e.run(t.Context(), t, command(file, ""))
		if err == nil || err.Error() != "4 of 6 requests have errors: see "+file+".errors.jsonl" {
			t.Error(err)
		}
		results, failed := written(t, file)
		if len(results) != 2 || len(failed) != 4 {
			t.Errorf("%d results, %d errors", len(results), len(failed))
		}
		a := results["a"][0]
		if !strings.HasPrefix(a.Get("id").String(), "batch_req_") || a.Get("response.status_code").Int() != 200 || a.Get("response.request_id").String() != "req-1" || a.Get("response.body.of").String() != "a" || a.Get("error").Type != gjson.Null {
			t.Error(a.Raw)
		}
		for id, want := range map[string]string{
			"bad": `400`, "broken": `"connection_error" unexpected EOF`, "line 3": `"invalid_line" line 3: it is not a JSON object`, "line 5": `"invalid_line" line 5: method "GET": give POST`,
		} {
			line := failed[id][0]
			got := line.Get("response.status_code").Raw
			if got == "" {
				got = line.Get("error.code").Raw + " " + line.Get("error.message").String()
			}
			if !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s", id, line.Raw)
			}
		}
		if e.served["broken"] != 3 || e.served["bad"] != 1 {
			t.Errorf("attempts: %v", e.served)
		}
		for _, want := range []string{"6 of 6 done, 0 of them before", "20, 8 of them cached", "answer tokens      4"} {
			if !strings.Contains(summary, want) {
				t.Errorf("no %q in\n%s", want, summary)
			}
		}

		before := len(e.served)
		if summary, err = e.run(t.Context(), t, command(file, "")); err == nil || !strings.Contains(summary, "6 of 6 done, 6 of them before") || len(e.served) != before {
			t.Errorf("again: %v\n%s", err, summary)
		}
		if results, failed := written(t, file); len(results["a"]) != 1 || len(failed["line 3"]) != 1 {
			t.Error("a line was written again")
		}
	})
}

func TestAMendedLineAndRemovedErrorsAreSent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		status := 400
		e := &endpoint{answer: func(id string, _ int) int {
			if id == "refused" {
				return status
			}
			return 200
		}}
		file := fileOf(t, lineOf("a"), strings.Replace(lineOf("b"), "POST", "GET", 1), lineOf("refused"))
		if _, err := e.run(t.Context(), t, command(file, "")); err == nil {
			t.Error("no error")
		}
		testkit.WriteFile(t, file, strings.Join([]string{lineOf("a"), lineOf("b"), lineOf("refused"), lineOf("new")}, "\n"))
		if _, err := e.run(t.Context(), t, command(file, "")); err == nil || e.served["b"] != 1 || e.served["new"] != 1 || e.served["refused"] != 1 {
			t.Error(err, e.served)
		}
		status = 200
		if err := os.Remove(file + ".errors.jsonl"); err != nil {
			t.Fatal(err)
		}
		if _, err := e.run(t.Context(), t, command(file, "")); err != nil || e.served["refused"] != 2 || e.served["a"] != 1 {
			t.Error(err, e.served)
		}
	})
}

func TestRefusedRequestsAreSentAgain(t *testing.T) {
	for name, test := range map[string]struct {
		status int
		after  string
		least  time.Duration // until all is done
	}{
		"429 with a time":    {429, "7", 7 * time.Second},
		"503 with a time":    {503, "3", 3 * time.Second},
		"429 without a time": {429, "", firstPause},
		"too long a time":    {429, "86400", longestAsked},
		"no connection":      {-1, "", firstPause},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var lines []string
				for i := range 40 {
					lines = append(lines, lineOf(fmt.Sprint(i)))
				}
				file, began := fileOf(t, lines...), time.Now()
				e := &endpoint{latency: 100 * time.Millisecond, header: http.Header{"Retry-After": {test.after}}, answer: func(_ string, n int) int {
					if n == 0 {
						return test.status
					}
					return 200
				}}
				c := command(file, "")
				c.GiveUpAfter = 100 * time.Hour
				if _, err := e.run(t.Context(), t, c); err != nil {
					t.Error(err)
				}
				if took := time.Since(began); took < test.least {
					t.Errorf("all done after %s", took)
				}
				if results, failed := written(t, file); len(results) != 40 || len(failed) != 0 {
					t.Errorf("%d results, %d errors", len(results), len(failed))
				}
			})
		})
	}
}

func TestARunEndsIfNothingIsAnswered(t *testing.T) {
	for name, status := range map[string]int{"refused": 503, "not there": -1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				file, began := fileOf(t, lineOf("a"), lineOf("b")), time.Now()
				e := &endpoint{answer: func(string, int) int { return status }}
				_, err := e.run(t.Context(), t, command(file, ""))
				if err == nil || !strings.Contains(err.Error(), "no answer for 10m0s") || !strings.Contains(err.Error(), "2 of 2 requests remain") {
					t.Error(err)
				}
				if took := time.Since(began); took < 10*time.Minute || took > 11*time.Minute {
					t.Errorf("ended after %s", took)
				}
				if results, failed := written(t, file); len(results)+len(failed) != 0 {
					t.Error("requests count as done")
				}
			})
		})
	}
}

func TestARequestThatIsAlwaysRefusedBecomesAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lines := []string{lineOf("none")}
		for i := range 3000 {
			lines = append(lines, lineOf(fmt.Sprint(i)))
		}
		file := fileOf(t, lines...)
		e := &endpoint{latency: time.Second, answer: func(id string, _ int) int {
			if id == "none" {
				return 503
			}
			return 200
		}}
		c := command(file, "")
		c.GiveUpAfter = time.Minute
		if _, err := e.run(t.Context(), t, c); err == nil || !strings.Contains(err.Error(), "1 of 3001 requests have errors") {
			t.Error(err)
		}
		if _, failed := written(t, file); len(failed["none"]) != 1 || failed["none"][0].Get("response.status_code").Int() != 503 {
			t.Error(failed)
		}
	})
}

func TestAnswersAboutAllRequestsEndTheRun(t *testing.T) {
	for status, want := range map[int]string{401: "--api-key", 307: "--url"} {
		synctest.Test(t, func(t *testing.T) {
			file := fileOf(t, lineOf("a"), lineOf("b"))
			e := &endpoint{answer: func(string, int) int { return status }}
			if _, err := e.run(t.Context(), t, command(file, "")); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "2 of 2 requests remain") {
				t.Errorf("%d: %v", status, err)
			}
			if results, failed := written(t, file); len(results)+len(failed) != 0 {
				t.Errorf("%d: requests count as done", status)
			}
		})
	}
}

func TestAnInterruptedRunWritesWhatEndsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines []string
		for i := range 100 {
			lines = append(lines, lineOf(fmt.Sprint(i)))
		}
		file := fileOf(t, lines...)
		ctx, stop := context.WithCancel(t.Context())
		e := &endpoint{latency: 3 * time.Second}
		e.came = func(string) {
			if e.flying == 7 { // of at most 8
				time.AfterFunc(time.Second, stop)
			}
		}
		_, err := e.run(ctx, t, command(file, ""))
		results, _ := written(t, file)
		if err == nil || !strings.HasPrefix(err.Error(), "stopped; ") || len(results) != len(e.served) || len(results) == 100 {
			t.Errorf("%v; %d sent, %d results", err, len(e.served), len(results))
		}
		e.came, e.latency = nil, time.Hour
		ctx, stop = context.WithCancel(t.Context())
		time.AfterFunc(time.Second, stop)
		began := time.Now()
		if _, err := e.run(ctx, t, command(file, "")); err == nil || time.Since(began) != 6*time.Second {
			t.Errorf("%v after %s", err, time.Since(began))
		}
		e.latency = 0
		if _, err := e.run(t.Context(), t, command(file, "")); err != nil {
			t.Error(err)
		}
		if results, _ := written(t, file); len(results) != 100 {
			t.Errorf("%d results", len(results))
		}
	})
}

func TestRequestsAreSentInTheOrderOfTheFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var lines, order []string
		for i := range 50 {
			lines = append(lines, lineOf(fmt.Sprint(i)))
		}
		e := &endpoint{latency: time.Second, came: func(id string) { order = append(order, id) }}
		c := command(fileOf(t, lines...), "")
		c.Concurrency = 1
		if _, err := e.run(t.Context(), t, c); err != nil {
			t.Error(err)
		}
		for i, id := range order {
			if id != fmt.Sprint(i) {
				t.Fatalf("order %v", order)
			}
		}
		if e.most != 1 {
			t.Errorf("%d in flight", e.most)
		}
	})
}

// TestNothingIsLostOrDoneTwice interrupts runs at random, cuts files off as a crashed
// machine does, and lets requests fail in every way. A model of the lines that are left
// says what may be sent.
func TestNothingIsLostOrDoneTwice(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 30).Draw(rt, "lines")
		seed := rapid.Uint64().Draw(rt, "seed")
		cuts := rapid.SliceOfN(rapid.IntRange(1, 20), 0, 6).Draw(rt, "interrupted after")
		lost := rapid.SliceOfN(rapid.IntRange(0, 400), 6, 6).Draw(rt, "bytes lost")
		synctest.Test(t, func(t *testing.T) {
			var lines []string
			random := rand.New(rand.NewPCG(seed, 1))
			for i := range n {
				lines = append(lines, lineOf(fmt.Sprint(i)))
				if random.IntN(8) == 0 {
					lines = append(lines, "{")
				}
			}
			file := fileOf(t, lines...)
			done := map[string]bool{} // at the start of the run
			sent := map[string]int{}  // by the run
			e := &endpoint{latency: time.Second, answer: func(id string, n int) int {
				statuses := []int{200, 200, 400, 429, 503, 500, 0, -1}
				return statuses[rand.New(rand.NewPCG(seed, uint64(n)<<32|uint64(len(id)*1000+int(id[len(id)-1])))).IntN(len(statuses))]
			}}
			for run := 0; ; run++ {
				ctx, stop := context.WithCancel(t.Context())
				came := 0
				e.came = func(id string) {
					if done[id] {
						t.Errorf("%s was done and is sent again", id)
					}
					sent[id]++
					if came++; run < len(cuts) && came >= cuts[run] {
						stop()
					}
				}
				_, err := e.run(ctx, t, command(file, ""))
				stop()
				if run >= len(cuts) {
					if err != nil && !strings.Contains(err.Error(), "have errors") {
						t.Error(err)
					}
					break
				}
				name := file + []string{".results.jsonl", ".errors.jsonl"}[run%2]
				if info, err := os.Stat(name); err == nil {
					_ = os.Truncate(name, max(0, info.Size()-int64(lost[run])))
				}
				done = map[string]bool{}
				results, failed := written(t, file)
				for id := range results {
					done[id] = true
				}
				for id := range failed {
					done[id] = true
				}
			}
			results, failed := written(t, file)
			for i := range n {
				id := fmt.Sprint(i)
				if len(results[id])+len(failed[id]) != 1 {
					t.Errorf("%s has %d results and %d errors", id, len(results[id]), len(failed[id]))
				}
			}
			if len(results)+len(failed) != len(lines) {
				t.Errorf("%d of %d lines are done", len(results)+len(failed), len(lines))
			}
		})
	})
}

// TestAKilledRunLosesNothing kills a process of this binary with SIGKILL, again and again.
func TestAKilledRunLosesNothing(t *testing.T) {
	const n, kills = 240, 6
	var lines []string
	for i := range n {
		lines = append(lines, lineOf(fmt.Sprint(i)))
	}
	file := fileOf(t, lines...)
	var mu sync.Mutex // guards all below
	sent, done, came := map[string]int{}, map[string]bool{}, 0
	reached := make(chan struct{}, 1)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, in *http.Request) {
		body, _ := io.ReadAll(in.Body)
		id := gjson.GetBytes(body, "user").String()
		mu.Lock()
		sent[id]++
		if done[id] {
			t.Errorf("%s is done and was sent again", id)
		}
		if came++; came == 25 {
			reached <- struct{}{}
		}
		mu.Unlock()
		select {
		case <-time.After(time.Duration(rand.IntN(20)) * time.Millisecond):
		case <-in.Context().Done():
		}
		fmt.Fprintf(w, `{"of": %q, "usage": {"prompt_tokens": 3}}`, id)
	}))
	defer server.Close()
	start := func() *exec.Cmd {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), childFile+"="+file, childURL+"="+server.URL)
		child.Stderr = os.Stderr
		if err := child.Start(); err != nil {
			t.Fatal(err)
		}
		return child
	}
	for kill := range kills {
		mu.Lock()
		came = 0
		mu.Unlock()
		child := start()
		select {
		case <-reached:
		case <-time.After(60 * time.Second):
			t.Error("the child sends nothing")
		}
		_ = child.Process.Kill()
		_ = child.Wait()
		if kill == kills-1 { // as if it had been killed while it wrote
			results, err := os.OpenFile(file+".results.jsonl", os.O_APPEND|os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(results, `{"id":"batch_req_x","custom_id":"%d","respo`, n-1)
			results.Close()
		}
		results, _ := written(t, file)
		mu.Lock()
		for id := range results {
			done[id] = true
		}
		mu.Unlock()
	}
	if err := start().Wait(); err != nil {
		t.Error(err)
	}
	results, failed := written(t, file)
	if len(results) != n || len(failed) != 0 {
		t.Errorf("%d results, %d errors", len(results), len(failed))
	}
	again := 0
	for id, lines := range results {
		if len(lines) != 1 || lines[0].Get("response.body.of").String() != id {
			t.Errorf("%s: %v", id, lines)
		}
		again += sent[id] - 1
	}
	if most := kills * command("", "").Concurrency; again > most {
		t.Errorf("%d requests were sent again, want at most %d: those in flight at a kill", again, most)
	}
	t.Logf("%d of %d requests were in flight at %d kills and sent again", again, n, kills)
}

func TestWrongSettingsAndFilesAreRefusedBeforeARequest(t *testing.T) {
	dir := t.TempDir()
	path := func(name, content string) string {
		testkit.WriteFile(t, filepath.Join(dir, name), content)
		return filepath.Join(dir, name)
	}
	good := path("good", lineOf("a"))
	if err := os.Symlink(good, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	held, err := openBook(filepath.Join(dir, "held"), filepath.Join(dir, "held.errors.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	defer held.close()
	for name, test := range map[string]struct {
		change func(c *Command)
		want   string
	}{
		"no file":              {func(c *Command) { c.File = filepath.Join(dir, "none") }, "no such file"},
		"a folder":             {func(c *Command) { c.File = dir }, "not a regular file"},
		"no address":           {func(c *Command) { c.URL = "localhost:8000" }, "--url"},
		"an address with user": {func(c *Command) { c.URL = "http://u:p@h" }, "--url"},
		"output is input":      {func(c *Command) { c.Output = good }, "has the requests"},
		"output is a link":     {func(c *Command) { c.Output = filepath.Join(dir, "link") }, "has the requests"},
		"errors are input": {func(c *Command) {
			c.File, c.Output = path("x.errors.jsonl", lineOf("a")), filepath.Join(dir, "x.jsonl")
		}, "has the requests"},
		"output of another": {func(c *Command) { c.Output = path("notes.jsonl", "{\"a\":1}\n") }, "notes.jsonl: line 1 is not a result"},
		"output is no JSON": {func(c *Command) { c.Output = path("notes.txt", "my notes\n") }, "notes.txt: line 1 is not a result"},
		"output in use":     {func(c *Command) { c.Output = filepath.Join(dir, "held") }, "another process writes"},
		"a duplicate":       {func(c *Command) { c.File = path("two", lineOf("a")+"\n\n"+lineOf("b")+"\n"+lineOf("a")) }, `lines 1 and 4 have the same custom_id "a"`},
		"many duplicates":   {func(c *Command) { c.File = path("many", strings.Repeat(lineOf("a")+"\n", 20)) }, "lines 1 and 11 have the same"},
	} {
		t.Run(name, func(t *testing.T) {
			c := command(good, "http://127.0.0.1:1")
			test.change(&c)
			if err := c.Run(t.Context(), io.Discard, io.Discard); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
	if text, err := os.ReadFile(filepath.Join(dir, "notes.txt")); err != nil || string(text) != "my notes\n" {
		t.Errorf("a foreign file has become %q, %v", text, err)
	}
	for want, change := range map[string]func(c *Command){
		"--concurrency 0": func(c *Command) { c.Concurrency = 0 }, "--concurrency 5000": func(c *Command) { c.Concurrency = 5000 },
		"--attempts 0": func(c *Command) { c.Attempts = 0 }, "--answer-timeout": func(c *Command) { c.AnswerTimeout = 0 }, "--answer-timeout and --give-up-after": func(c *Command) { c.GiveUpAfter = -1 },
	} {
		c := command("f", "http://h")
		if change(&c); c.Validate() == nil || !strings.HasPrefix(c.Validate().Error(), want) {
			t.Errorf("%s: %v", want, c.Validate())
		}
	}
}

func TestErrorsAreBesideTheResults(t *testing.T) {
	for results, want := range map[string]string{"f.results.jsonl": "f.errors.jsonl", "out.jsonl": "out.errors.jsonl", "dir/out": "dir/out.errors.jsonl"} {
		if got := errorsBeside(results); got != want {
			t.Errorf("beside %s: %s, want %s", results, got, want)
		}
	}
}

func TestAFileMayBeginWithAByteOrderMark(t *testing.T) {
	file := fileOf(t, "\xef\xbb\xbf"+lineOf("a"), lineOf("b"))
	e := &endpoint{}
	if _, err := e.run(t.Context(), t, command(file, "")); err != nil || e.served["a"] != 1 || e.served["b"] != 1 {
		t.Errorf("%v, served %v", err, e.served)
	}
}

// TestFilesThatAreMovedEndTheRun: a later run would send their requests again.
func TestFilesThatAreMovedEndTheRun(t *testing.T) {
	for name, move := range map[string]func(file string) error{
		"renamed":  func(file string) error { return os.Rename(file, file+".1") },
		"removed":  os.Remove,
		"replaced": func(file string) error { return errors.Join(os.Remove(file), os.WriteFile(file, nil, 0o600)) },
		"a link":   func(file string) error { return errors.Join(os.Rename(file, file+".1"), os.Symlink(file+".1", file)) },
	} {
		for _, end := range []string{".results.jsonl", ".errors.jsonl"} {
			synctest.Test(t, func(t *testing.T) {
				var lines []string
				for i := range 100 {
					lines = append(lines, lineOf(fmt.Sprint(i)))
				}
				file := fileOf(t, lines...)
				e := &endpoint{latency: time.Second, answer: func(id string, _ int) int {
					if id == "9" {
						if err := move(file + end); err != nil {
							t.Error(err)
						}
					}
					return http.StatusOK
				}}
				if _, err := e.run(t.Context(), t, command(file, "")); err == nil || !strings.Contains(err.Error(), file+end+" was renamed, removed or replaced") || len(e.served) > 50 {
					t.Errorf("%s, %s: %v, %d sent", name, end, err, len(e.served))
				}
			})
		}
	}
	file := fileOf(t, lineOf("a")) // ends before the first look
	e := &endpoint{answer: func(string, int) int {
		_ = os.Remove(file + ".results.jsonl")
		return http.StatusOK
	}}
	if _, err := e.run(t.Context(), t, command(file, "")); err == nil {
		t.Error("no error")
	}
}

func TestAFullDiskEndsTheRun(t *testing.T) {
	dir := t.TempDir()
	b, err := openBook(filepath.Join(dir, "r"), filepath.Join(dir, "e"))
	if err != nil {
		t.Fatal(err)
	}
	b.results.Close() // takes no line any more
	id := "a"
	o := &output{ID: newID(), CustomID: &id, Response: &response{Status: 200, Body: json.RawMessage("{}")}}
	for range 2 {
		if err := b.write(o, false); err == nil {
			t.Error("no error")
		}
	}
	if done, _ := b.has(&request{id: "a"}, false); done {
		t.Error("a request without a line counts as done")
	}
	_ = b.close()
}
