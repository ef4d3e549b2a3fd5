package doctor

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/peers/cells"
	"kvrouter/internal/testkit"
)

func TestWhatIsFoundOfARouterBelow(t *testing.T) {
	serve := func(size int, book *summary.Book, ready bool) string {
		reporter := cells.NewReporter(testkit.Defaults[cells.Flags](), cells.Deps{
			Hello: cells.Hello{Router: "kvrouter-1", Version: "1.2", BlockSize: size}, Book: book, Log: slog.New(slog.DiscardHandler),
			Info:  func() cells.Info { return cells.Info{Models: []string{"m"}} },
			State: func() cells.State { return cells.State{Ready: ready, Workers: 4} },
		})
		mux := http.NewServeMux()
		mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
		mux.Handle("GET /cell", reporter)
		server := httptest.NewServer(mux)
		t.Cleanup(func() {
			reporter.Leave()
			server.Close()
		})
		return server.URL
	}
	for name, test := range map[string]struct {
		url    string
		levels []Level
		says   string
	}{
		"well":               {serve(64, summary.NewBook(), true), []Level{OK}, "kvrouter 1.2 serves m with 4 workers"},
		"no summary":         {serve(64, nil, true), []Level{OK, Note}, "--cell"},
		"not ready":          {serve(64, summary.NewBook(), false), []Level{OK, Note}, "no worker that is ready"},
		"another block size": {serve(16, summary.NewBook(), true), []Level{OK}, "kvrouter 1.2 serves m with 4 workers"},
	} {
		t.Run(name, func(t *testing.T) {
			p := Command{Wait: 5 * time.Second}.checkWorker(t.Context(), Setup{BlockSize: 64}, probe.Server{URL: test.url, Disagg: kv.Disagg{Kind: kv.KindRouter}})
			var levels []Level
			var text strings.Builder
			for _, f := range p.report.findings {
				levels = append(levels, f.Level)
				text.WriteString(f.Text + "; " + f.Remedy + "\n")
			}
			if !slices.Equal(levels, test.levels) || !strings.Contains(text.String(), test.says) {
				t.Errorf("%v:\n%s", levels, text.String())
			}
		})
	}
}
