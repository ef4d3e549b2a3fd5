package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
)

// routerProcess is a running kvrouter over mock workers.
type routerProcess struct {
	*site
	t *testing.T
}

// status is that of a GET on the OpenAI port, over a connection of its own; 0: it
// is not answered.
func (p *routerProcess) status(path string) int {
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 5 * time.Second}
	response, err := client.Get(p.openAI + path)
	if err != nil {
		return 0
	}
	response.Body.Close()
	return response.StatusCode
}

// over waits for the process's end and returns its exit code, -1 after a signal.
func (p *routerProcess) over(limit time.Duration) int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(limit):
		p.t.Fatalf("still there %s later", limit)
	}
	return p.command.ProcessState.ExitCode()
}

// says waits for a line of the log.
func (p *routerProcess) says(text string) {
	p.t.Helper()
	testkit.Eventually(p.t, 10*time.Second, "the log says: "+text, func() bool { return strings.Contains(p.log.String(), text) })
}

// stream starts a stream of so many tokens and returns when its first byte has
// come. rest reads it to its end.
func (p *routerProcess) stream(tokens int) (rest func() string) {
	p.t.Helper()
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":"Hi"}],"stream":true,"max_tokens":%d,"ignore_eos":true}`, tokens)
	response, err := http.Post(p.openAI+testkit.ChatPath, "application/json", strings.NewReader(body))
	if err != nil {
		p.t.Fatal(err)
	}
	first := make([]byte, 1)
	if _, err := io.ReadFull(response.Body, first); err != nil {
		p.t.Fatal(err)
	}
	return func() string {
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil {
			return err.Error()
		}
		return string(first) + string(text)
	}
}

// with posts a body with a key and returns the status.
func (p *routerProcess) with(t *testing.T, key, path, body string) int {
	t.Helper()
	request, _ := http.NewRequest(http.MethodPost, p.openAI+path, strings.NewReader(body))
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("Authorization", "Bearer "+key)
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	io.Copy(io.Discard, response.Body)
	return response.StatusCode
}

// balancer sends requests to the routers that are ready, as a balancer does that
// looks every few milliseconds.
type balancer struct {
	client  http.Client
	routers []atomic.Pointer[string] // URL; nil: not ready
	turn    atomic.Uint64
}

// watch looks at a router until ctx ends.
func (b *balancer) watch(ctx context.Context, i int, url string) {
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Second}
	for ctx.Err() == nil {
		response, err := client.Get(url + "/ready")
		if err == nil {
			response.Body.Close()
		}
		if err == nil && response.StatusCode == http.StatusOK {
			b.routers[i].Store(&url)
		} else {
			b.routers[i].Store(nil)
		}
		select {
		case <-ctx.Done():
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// chat sends one chat to a ready router; err says how it was lost.
func (b *balancer) chat(i int) error {
	for range 500 {
		url := b.routers[b.turn.Add(1)%uint64(len(b.routers))].Load()
		if url == nil {
			<-time.After(time.Millisecond)
			continue
		}
		body := mocker.MustJSON(map[string]any{"messages": say(fmt.Sprint("chat ", i%20, strings.Repeat(" words", 20))), "max_tokens": 20, "ignore_eos": true, "stream": i%2 == 0})
		response, err := b.client.Post(*url+testkit.ChatPath, "application/json", bytes.NewReader(body))
		if err != nil {
			return err
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		switch {
		case err != nil:
			return err
		case response.StatusCode != http.StatusOK:
			return fmt.Errorf("%s: %s", response.Status, text)
		case i%2 == 0 && !bytes.HasSuffix(text, []byte("data: [DONE]\n\n")):
			return fmt.Errorf("a stream that ends with %q", text[max(0, len(text)-200):])
		}
		return nil
	}
	return errors.New("no router was ready for a long time")
}
