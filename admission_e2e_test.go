package main

import (
	"context"
	"fmt"
	"io"
	"kvrouter/internal/mocker"
	"kvrouter/internal/testkit"
	"net/http"
	"strings"
	"testing"
	"time"
)

// streamed is a request for so many tokens to a mock site, with a prompt of its
// own that fills more than a fifth of the memory below.
func streamed(s *mockSite, ctx context.Context, i, tokens int) (*http.Response, error) {
	prompt := strings.Repeat(fmt.Sprintf("prompt %d of many ", i), 8)
	body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":%d,"ignore_eos":true,"stream":true}`, prompt, tokens)
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.openAI+testkit.ChatPath, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	return http.DefaultClient.Do(request)
}

// TestMockOverloadIs503 has slow workers whose memory one request fills beyond
// the threshold each.
func TestMockOverloadIs503(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--block-size=4", "--mock-num-gpu-blocks=64", "--speedup-ratio=0.01", "--active-decode-blocks-threshold=0.2")
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{}, 3)
	begin := func(i int) {
		go func() {
			if response, err := streamed(s, ctx, i, 8); err == nil {
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			ended <- struct{}{}
		}()
		testkit.Eventually(t, 10*time.Second, "the request is on its way", func() bool { return s.inFlight() == i+1 })
	}
	begin(0)
	begin(1)
	response, err := streamed(s, ctx, 2, 8)
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if response.StatusCode != http.StatusServiceUnavailable || response.Header.Get("Retry-After") == "" {
		t.Errorf("a third request: %d, Retry-After %q; want 503 and a time", response.StatusCode, response.Header.Get("Retry-After"))
	}
	if status, answer := post(t, s.openAI+"/busy_threshold", fmt.Sprintf(`{"model":%q,"active_decode_blocks_threshold":1}`, mocker.ModelName)); status != http.StatusOK {
		t.Errorf("a change of the threshold: %d %s", status, answer)
	}
	begin(2)
	cancel()
	for range 3 {
		<-ended
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.inFlight() == 0 })
	if err := s.rooms.router.Check(); err != nil {
		t.Error(err)
	}
}

func TestMockQueueServesAllInTheEnd(t *testing.T) {
	s := startMockSite(t, 2, "--policy=kv", "--speedup-ratio=0.5", "--mock-max-num-batched-tokens=1024", "--router-queue-threshold=0", "--router-queue-policy=wspt", "--router-track-output-blocks")
	const requests = 12
	statuses := make(chan int, requests)
	for i := range requests {
		go func() {
			status := 0
			if response, err := streamed(s, t.Context(), i, 3); err == nil {
				status = response.StatusCode
				io.Copy(io.Discard, response.Body)
				response.Body.Close()
			}
			statuses <- status
		}()
	}
	testkit.Eventually(t, 10*time.Second, "some wait", func() bool { n, _ := s.rooms.router.QueueDepth(); return n > 0 })
	for range requests {
		if status := <-statuses; status != http.StatusOK {
			t.Errorf("status %d", status)
		}
	}
	testkit.Eventually(t, 10*time.Second, "all freed", func() bool { return s.inFlight() == 0 })
	if n, tokens := s.rooms.router.QueueDepth(); n != 0 || tokens != 0 {
		t.Errorf("%d requests of %d tokens wait in the end", n, tokens)
	}
	if err := s.rooms.router.Check(); err != nil {
		t.Error(err)
	}
}
