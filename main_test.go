package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/leaks"
	"kvrouter/internal/testkit/nativetest"
)

func TestMain(m *testing.M) { leaks.Main(m) }

// TestAStoppedRouterLeavesNoGoroutine runs every part in this process, over mock workers,
// prefill and decode apart, with a gateway's port and a peer: what test/ runs as a
// process is looked at from inside here.
func TestAStoppedRouterLeavesNoGoroutine(t *testing.T) {
	nativetest.Library(t)
	before := goleak.IgnoreCurrent()
	const workers = 3
	ports := testkit.FreePorts(t, 5+4*workers)
	args := []string{"--engine=mocker", "--prefill-workers=1", "--decode-workers=2", "--speedup-ratio=20", "--drain-delay=0s", "--cluster=one", "--cell", "--session-header=x-session-id",
		"--policy=thompson", "--record=" + t.TempDir() + "/requests", "--index-snapshot=" + t.TempDir()}
	for i, flag := range []string{"http", "router", "ext-proc", "ext-proc-health", "cluster"} {
		args = append(args, fmt.Sprintf("--%s-port=%d", flag, ports+i))
	}
	for i, flag := range []string{"worker", "kv-events", "kv-replay", "metrics"} {
		args = append(args, fmt.Sprintf("--base-%s-port=%d", flag, ports+5+i*workers))
	}
	config, err := parseServe(args)
	if err != nil {
		t.Fatal(err)
	}
	app, err := build(t.Context(), *config, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- app.run(ctx) }()
	url := fmt.Sprintf("http://127.0.0.1:%d", ports)
	testkit.Eventually(t, 20*time.Second, "the router is ready", func() bool {
		response, err := http.Get(url + "/ready")
		if err != nil {
			return false
		}
		response.Body.Close()
		return response.StatusCode == http.StatusOK
	})
	for _, stream := range []bool{true, false} {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":%q}],"max_tokens":8,"stream":%v}`, strings.Repeat("a prompt of several blocks ", 40), stream)
		response, err := http.Post(url+testkit.ChatPath, "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		answer, err := io.ReadAll(response.Body)
		response.Body.Close()
		if err != nil || response.StatusCode != http.StatusOK {
			t.Errorf("%s %s: %v", response.Status, answer, err)
		}
	}
	if err := app.router.Check(); err != nil {
		t.Error(err)
	}
	stop()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the router has not stopped")
	}
	http.DefaultClient.CloseIdleConnections()
	if err := goleak.Find(before); err != nil {
		t.Error(err)
	}
}
