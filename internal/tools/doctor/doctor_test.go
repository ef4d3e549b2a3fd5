package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/fleet/vllm"
	"kvrouter/internal/testkit"
	"kvrouter/internal/tools/mocker"
)

const blockSize = 64

// ward is a set of mock workers.
type ward struct {
	workers  []*mocker.Worker
	attached []probe.Server // as --worker names them
	load     int            // port of worker 0's load; worker i has this plus i
}

// newWard starts n mock workers, which end with the test.
func newWard(t *testing.T, n int, tweak func(*mocker.Settings)) *ward {
	t.Helper()
	model, err := mocker.OpenBuiltinModel()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(model.Close)
	cfg := testkit.Defaults[mocker.Settings]()
	cfg.SpeedupRatio, cfg.ServedModelName, cfg.BlockSize, cfg.KVEvents, cfg.Parts = 0, mocker.ModelName, blockSize, true, make([]kv.Disagg, n)
	if tweak != nil {
		tweak(&cfg)
	}
	ranks := cfg.DataParallelSize
	ports := testkit.FreePorts(t, n+3*n*ranks)
	cfg.Ports = process.Ports{HTTP: ports, KVEvents: ports + n, KVReplay: ports + n + n*ranks, Load: ports + n + 2*n*ranks, Ranks: ranks}
	m, err := mocker.NewMocker(cfg, model, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	w := &ward{load: cfg.Ports.Load}
	for i := range n {
		worker, err := m.Start(i)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			worker.End(errors.New("the test has ended"))
			<-worker.Ended()
		})
		w.workers = append(w.workers, worker)
		w.attached = append(w.attached, probe.Server{ID: uint64(i), URL: fmt.Sprintf("http://127.0.0.1:%d", ports+i)})
	}
	return w
}

// front stands before a worker's HTTP port and may change its answers.
func front(t *testing.T, w *probe.Server, change func(path string, response *http.Response, body string) string) {
	t.Helper()
	target, err := url.Parse(w.URL)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DisableKeepAlives: true}
	server := httptest.NewServer(&httputil.ReverseProxy{
		Rewrite:   func(r *httputil.ProxyRequest) { r.SetURL(target) },
		Transport: transport,
		ModifyResponse: func(response *http.Response) error {
			body, err := io.ReadAll(response.Body)
			if err != nil {
				return err
			}
			_ = response.Body.Close()
			changed := change(response.Request.URL.Path, response, string(body))
			response.Body, response.ContentLength = io.NopCloser(strings.NewReader(changed)), int64(len(changed))
			response.Header.Set("Content-Length", fmt.Sprint(len(changed)))
			return nil
		},
	})
	t.Cleanup(server.Close)
	w.URL = server.URL
}

// visit runs the command and returns its findings, and those that failed; the error must
// report these, too.
func visit(t *testing.T, c Command, s Setup) (all, failed []Finding) {
	t.Helper()
	c.JSON = true
	var out bytes.Buffer
	err := c.Run(t.Context(), s, &out)
	var printed struct {
		OK       bool
		Findings []Finding
	}
	if err := json.Unmarshal(out.Bytes(), &printed); err != nil {
		t.Fatal(err, out.String())
	}
	for _, f := range printed.Findings {
		if f.Level == Fail {
			failed = append(failed, f)
		}
		if strings.ContainsAny(f.Text+f.Remedy, "\n\r") || f.Text == "" || f.About == "" {
			t.Errorf("it is no line: %+v", f)
		}
	}
	if printed.OK != (len(failed) == 0) || (err == nil) != printed.OK {
		t.Errorf("ok %v, error %v, failed %v", printed.OK, err, failed)
	}
	if err != nil && len(failed) > 1 && !strings.Contains(err.Error(), fmt.Sprint(len(failed))) {
		t.Errorf("%d failed: %v", len(failed), err)
	}
	return printed.Findings, failed
}

// setup is one whose workers run already.
func setup(w *ward) Setup {
	return Setup{Workers: w.attached, BlockSize: blockSize, KVEvents: true}
}

const wait = 5 * time.Second

func TestAGoodSetupHasNothingToMend(t *testing.T) {
	for name, tweak := range map[string]func(*mocker.Settings){
		"vLLM": nil, "two ranks": func(c *mocker.Settings) { c.DataParallelSize = 2 }, "SGLang": func(c *mocker.Settings) { c.API = "sglang" },
		"other blocks": func(c *mocker.Settings) { c.BlockSize = 16 }, "other pages": func(c *mocker.Settings) { c.BlockSize, c.API = 1, "sglang" },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t, 2, tweak)
			w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
			s := setup(w)
			s.Ports = []settings.PortUse{{Flag: "--http-port", Base: 8000, Port: testkit.FreePorts(t, 1), Host: "127.0.0.1"}}
			all, failed := visit(t, Command{Wait: wait}, s)
			if len(failed) > 0 {
				t.Errorf("failed: %v", failed)
			}
			var text bytes.Buffer
			if err := (Command{Wait: wait}).Run(t.Context(), s, &text); err != nil || strings.Count(text.String(), "\n") != len(all) {
				t.Errorf("%v, %d lines of %d findings", err, strings.Count(text.String(), "\n"), len(all))
			}
			for _, want := range []string{"the native library works", "serves " + mocker.ModelName, "blocks of ", "ranks, replayed ", "subscribed to its load at", "1 free"} {
				if !strings.Contains(text.String(), want) {
					t.Errorf("%q is not in\n%s", want, text.String())
				}
			}
		})
	}
}

// tiers gives workers a host tier.
func tiers(c *mocker.Settings) { c.HostBlocks = 9 }

// reports has a worker in development mode report its KV connector.
func reports(connector string) func(*testing.T, *ward, *Setup) {
	return func(t *testing.T, w *ward, _ *Setup) {
		front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
			if path != "/server_info" {
				return body
			}
			response.StatusCode = http.StatusOK
			return `{"vllm_config":{"kv_transfer_config":` + connector + `}}`
		})
	}
}

func TestTiersAreListed(t *testing.T) {
	for name, test := range map[string]struct {
		tweak  func(*mocker.Settings)
		change func(*testing.T, *ward, *Setup)
		want   string
	}{
		"vLLM's host": {tiers, reports(`{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true}}`), "keeps blocks in host memory"},
		"vLLM's files": {func(c *mocker.Settings) { tiers(c); c.DiskBlocks = 9 },
			reports(`{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true,"secondary_tiers":[{"type":"fs","enable_kv_events":true}]}}`), "keeps blocks in host memory and 1:fs"},
		"SGLang's": {func(c *mocker.Settings) { c.API = "sglang"; tiers(c) }, nil, "keeps blocks in host memory"},
		"none":     {nil, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWard(t, 1, test.tweak)
			s := setup(w)
			w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
			if test.change != nil {
				test.change(t, w, &s)
			}
			all, _ := visit(t, Command{Wait: wait}, s)
			listed := ""
			for _, f := range all {
				if strings.HasPrefix(f.Text, "keeps blocks") {
					listed = f.Text
				}
				if f.Level == Note && strings.HasPrefix(f.About, "worker") {
					t.Errorf("%+v", f)
				}
			}
			if listed != test.want {
				t.Errorf("%q, want %q", listed, test.want)
			}
		})
	}
}

func TestEachFaultIsFoundWithWhatToChange(t *testing.T) {
	nowhere := func(t *testing.T) string { return fmt.Sprintf("tcp://127.0.0.1:%d", testkit.FreePorts(t, 1)) }
	for _, test := range []struct {
		name   string
		tweak  func(*mocker.Settings)
		change func(t *testing.T, w *ward, s *Setup)
		level  Level
		want   []string // of the text and the remedy of the only finding of that level that is about worker 0
	}{
		{"nobody listens", nil, func(t *testing.T, w *ward, _ *Setup) {
			w.attached[0].URL = "http" + strings.TrimPrefix(nowhere(t), "tcp")
		}, Fail, []string{"does not answer", "refused", "url="}},
		{"prefix caching is off", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
				return strings.Replace(body, "vllm:cache_config_info{", `vllm:cache_config_info{enable_prefix_caching="False",`, 1)
			})
		}, Fail, []string{"prefix caching is off", "--enable-prefix-caching"}},
		{"SGLang's prefix caching is off", func(c *mocker.Settings) { c.API = "sglang" }, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(_ string, _ *http.Response, body string) string {
				return strings.Replace(body, `"disable_radix_cache":false`, `"disable_radix_cache":true`, 1)
			})
		}, Fail, []string{"prefix caching is off", "--disable-radix-cache"}},
		{"a decode server of SGLang without a radix cache", func(c *mocker.Settings) { c.API = "sglang" }, func(t *testing.T, w *ward, _ *Setup) {
			w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
			front(t, &w.attached[0], func(_ string, _ *http.Response, body string) string {
				return strings.Replace(body, `"disaggregation_mode":"null"`, `"disaggregation_mode":"decode"`, 1)
			})
		}, Note, []string{"caches no prompts", "--disaggregation-decode-enable-radix-cache"}},
		{"an SGLang server whose events leave states out", func(c *mocker.Settings) { c.API = "sglang" }, func(t *testing.T, w *ward, _ *Setup) {
			w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
			front(t, &w.attached[0], func(_ string, _ *http.Response, body string) string {
				return strings.Replace(body, `"disaggregation_mode":"null"`, `"disaggregation_mode":"null","uses_mamba_radix_cache":true`, 1)
			})
		}, Note, []string{"predictions are not exact", "upper bound"}},
		{"prefix caching of an older SGLang is off", func(c *mocker.Settings) { c.API = "sglang" }, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
				if path == "/server_info" {
					response.StatusCode = http.StatusNotFound
				}
				return strings.Replace(body, `"disable_radix_cache":false`, `"disable_radix_cache":true`, 1)
			})
		}, Fail, []string{"prefix caching is off", "--disable-radix-cache"}},
		{"no KV events", func(c *mocker.Settings) { c.KVEvents = false }, nil, Note, []string{"publishes no KV events", "--kv-events-config", `"enable_kv_cache_events":true`}},
		{"no KV events of SGLang", func(c *mocker.Settings) { c.KVEvents, c.API = false, "sglang" }, nil, Note, []string{"publishes no KV events", "--kv-events-config", "--load-publish-endpoint"}},
		{"KV events out of reach", nil, func(t *testing.T, w *ward, _ *Setup) { w.attached[0].KVEvents = nowhere(t) }, Fail, []string{"cannot subscribe", "refused", "tcp://*:5557", "kv-events="}},
		{"KV events on a port of HTTP", nil, func(_ *testing.T, w *ward, _ *Setup) {
			w.attached[0].KVEvents = "tcp" + strings.TrimPrefix(w.attached[0].URL, "http")
		}, Fail, []string{"cannot subscribe", "kv-events="}},
		{"a replay out of reach", nil, func(t *testing.T, w *ward, _ *Setup) { w.attached[0].Replay = nowhere(t) }, Fail, []string{"cannot replay", "refused", "replay="}},
		{"no replay", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
				if path == "/kv_event_sources" {
					return strings.ReplaceAll(body, `"replay_endpoint"`, `"unknown"`)
				}
				return body
			})
		}, Note, []string{"have no replay", `"replay_endpoint"`}},
		{"a load socket out of reach", nil, func(t *testing.T, w *ward, _ *Setup) { w.attached[0].Load = nowhere(t) }, Fail, []string{"its load", "cannot subscribe", "load="}},
		{"no load on the page", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(_ string, _ *http.Response, body string) string {
				return strings.ReplaceAll(body, "num_requests_running", "other")
			})
		}, Fail, []string{"load is unknown", "--disable-log-stats"}},
		{"another clock", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(_ string, response *http.Response, body string) string {
				response.Header.Set("Date", time.Now().Add(-time.Hour).UTC().Format(http.TimeFormat))
				return body
			})
		}, Note, []string{"its clock differs", "by -", "NTP"}},
		{"a key is asked for", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
				if path != "/health" {
					response.StatusCode = http.StatusUnauthorized
				}
				return body
			})
		}, Fail, []string{"requires an API key", "key-env=", "--worker-api-key-env"}},
		{"no engine", nil, func(t *testing.T, w *ward, _ *Setup) {
			server := httptest.NewServer(http.NotFoundHandler())
			t.Cleanup(server.Close)
			w.attached[0].URL = server.URL
		}, Fail, []string{"neither /v1/models nor /v1/chat/completions", "URL of an OpenAI server"}},
		{"an engine that is not well", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
				if path == "/health" {
					response.StatusCode = http.StatusServiceUnavailable
				}
				return body
			})
		}, Fail, []string{"unhealthy", "503"}},
		{"ranks that cannot be told apart", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
				return strings.Replace(body, "vllm:cache_config_info{", `vllm:cache_config_info{block_size="64",engine="1"} 1`+"\nvllm:cache_config_info{", 1)
			})
		}, Note, []string{"has 2 data-parallel ranks and names the KV events of 1", "/kv_event_sources"}},
		{"parts of blocks", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
				return strings.Replace(body, "vllm:cache_config_info{", `vllm:cache_config_info{prefix_match_unit="32",`, 1)
			})
		}, Note, []string{"predictions are not exact", "--prefix-match-unit"}},
		{"a host tier of unknown events", tiers, nil, Note, []string{"does not report", `"self_describing_kv_events":true`}},
		{"a host tier of events without tokens", tiers, reports(`{"kv_connector":"OffloadingConnector"}`), Note, []string{"no tokens and parents", `"self_describing_kv_events":true`}},
		{"files without events", func(c *mocker.Settings) { tiers(c); c.DiskBlocks = 9 },
			reports(`{"kv_connector":"MultiConnector","kv_connector_extra_config":{"connectors":[{"kv_connector":"NixlConnector"},{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true,"secondary_tiers":[{"type":"fs"}]}}]}}`),
			Note, []string{"1:fs publishes no KV events", `"enable_kv_events":true`}},
		{"a tier for pulls at an unknown address", tiers, reports(`{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true,"secondary_tiers":[{"type":"p2p","port":5710}]}}`),
			Note, []string{"can pull blocks from other workers", "p2p=HOST:5710"}},
		{"an address for pulls without a tier", tiers, func(t *testing.T, w *ward, s *Setup) {
			reports(`{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true}}`)(t, w, s)
			w.attached[0].P2P = kv.Bootstrap{Host: "127.0.0.1", Port: 5710}
		}, Note, []string{"has no tier p2p", `{"type":"p2p"}`}},
		{"a tier that finds nothing", tiers, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
				if path == "/server_info" {
					response.StatusCode = http.StatusOK
					return `{"vllm_config":{"kv_transfer_config":{"kv_connector":"OffloadingConnector","kv_connector_extra_config":{"self_describing_kv_events":true}}}}`
				}
				return regexp.MustCompile(`(external_prefix_cache_queries_total\{[^}]*\}) 0`).ReplaceAllString(body, "$1 2e+05")
			})
		}, Note, []string{"found nothing of 200000 tokens"}},
		{"LMCache without evictions", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
				if path == "/metrics" {
					body += "lmcache:num_hit_tokens_total 5\n"
				}
				return body
			})
		}, Note, []string{"LMCacheConnectorV1", "LMCacheMPConnector"}},
		{"a storage of SGLang", func(c *mocker.Settings) { c.API = "sglang"; tiers(c); c.DiskBlocks = 9 }, func(_ *testing.T, w *ward, _ *Setup) {
			w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
		}, Note, []string{"predictions are not exact", "no KV events of its storage"}},
		{"no render route", nil, func(t *testing.T, w *ward, _ *Setup) {
			front(t, &w.attached[0], func(path string, response *http.Response, body string) string {
				if strings.HasSuffix(path, "/render") {
					response.StatusCode = http.StatusForbidden
				}
				return body
			})
		}, Note, []string{"render", "--enable-scale-out"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := newWard(t, 1, test.tweak)
			s := setup(w)
			if test.change != nil {
				test.change(t, w, &s)
			}
			all, failed := visit(t, Command{Wait: wait}, s)
			var found []Finding
			for _, f := range all {
				if f.Level == test.level && strings.HasPrefix(f.About, "worker 0, "+w.attached[0].URL) {
					found = append(found, f)
				}
			}
			if len(found) != 1 || test.level == Note && len(failed) > 0 {
				t.Fatalf("found %+v, failed %+v", found, failed)
			}
			for _, want := range test.want {
				if !strings.Contains(found[0].Text+"; "+found[0].Remedy, want) {
					t.Errorf("%q is not in %+v", want, found[0])
				}
			}
		})
	}
}

func TestAHungWorkerCostsNoMoreThanTheWait(t *testing.T) {
	w := newWard(t, 2, nil)
	w.workers[0].Hung.Store(true)
	began := time.Now()
	_, failed := visit(t, Command{Wait: 2 * time.Second}, setup(w))
	if len(failed) != 1 || !strings.Contains(failed[0].Text, "does not answer") || !strings.Contains(failed[0].About, "worker 0") {
		t.Errorf("failed: %v", failed)
	}
	if took := time.Since(began); took > 10*time.Second {
		t.Errorf("it took %v", took)
	}
}

func TestAReplayThatIsSilentIsFound(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }() // it accepts by the kernel, and says nothing
	w := newWard(t, 1, func(c *mocker.Settings) { c.DataParallelSize = 1 })
	w.attached[0].Replay = "tcp://" + listener.Addr().String()
	_, failed := visit(t, Command{Wait: 2 * time.Second}, setup(w))
	if len(failed) != 1 || !strings.Contains(failed[0].Text, "no answer in time") {
		t.Errorf("failed: %v", failed)
	}
}

func TestManyRanksOutOfReachAreNotAllTried(t *testing.T) {
	w := newWard(t, 1, func(c *mocker.Settings) { c.DataParallelSize = 8 })
	front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
		if path == "/kv_event_sources" {
			return strings.ReplaceAll(body, "tcp://127.0.0.1:", "ipc:///nowhere/")
		}
		return body
	})
	all, failed := visit(t, Command{Wait: wait}, setup(w))
	if len(failed) != maxSilent+1 || !slices.ContainsFunc(all, func(f Finding) bool { return strings.Contains(f.Text, "other 4 ranks") }) {
		t.Errorf("failed: %v", failed)
	}
}

func TestAPageOfManyCachesIsReadOnce(t *testing.T) {
	w := newWard(t, 1, nil)
	const lines = 60_000
	var page strings.Builder
	page.WriteString("# TYPE vllm:cache_config_info gauge\n")
	for i := range lines {
		fmt.Fprintf(&page, "vllm:cache_config_info{block_size=\"%d\",engine=\"%d\"} 1\n", max(blockSize, i-lines/2), i)
	}
	front(t, &w.attached[0], func(path string, _ *http.Response, body string) string {
		if path == "/metrics" {
			return page.String()
		}
		return body
	})
	w.attached[0].Load = fmt.Sprintf("tcp://127.0.0.1:%d", w.load)
	began := time.Now()
	all, failed := visit(t, Command{Wait: 30 * time.Second}, setup(w))
	sizes := slices.DeleteFunc(all, func(f Finding) bool { return !strings.HasPrefix(f.Text, "blocks of ") })
	if len(failed) > 0 || len(sizes) != maxCaches || sizes[0].Text != "blocks of 64 tokens" {
		t.Errorf("%v, failed: %v", sizes, failed)
	}
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("it took %v", took)
	}
}

func TestWorkersAreComparedWithEachOther(t *testing.T) {
	w := newWard(t, 2, nil)
	front(t, &w.attached[1], func(path string, _ *http.Response, body string) string {
		switch path {
		case "/v1/models":
			return `{"data":[{"id":"other"},{"id":"adapter","parent":"other"}]}`
		case "/version":
			return `{"version":"0.1"}`
		}
		return body
	})
	w.attached[1].KVEvents = fmt.Sprintf("tcp://127.0.0.1:%d", w.load-4) // worker 0's
	all, failed := visit(t, Command{Wait: wait}, setup(w))
	if len(failed) != 1 || !strings.Contains(failed[0].Text, "have the same KV event endpoint") || failed[0].About != "workers" {
		t.Errorf("failed: %v", failed)
	}
	for _, want := range []string{"different models: " + mocker.ModelName + " and other", "different versions: vLLM " + mocker.Version + " and vLLM 0.1"} {
		if !slices.ContainsFunc(all, func(f Finding) bool { return f.Level == Note && strings.Contains(f.Text, want) }) {
			t.Errorf("%q is not among %v", want, all)
		}
	}
}

func TestTheSameKVEventsAreToldByHostAndOnOneLine(t *testing.T) {
	long := "tcp://host:1/\n" + strings.Repeat("x", 2*maxShown)
	of := func(about, host, endpoint string) patient {
		return patient{report: report{about: about}, host: host, endpoints: []string{endpoint}}
	}
	for name, test := range map[string]struct {
		seen []patient
		want int
	}{
		"one socket file of two hosts": {[]patient{of("worker 0", "a", "ipc:///events"), of("worker 1", "b", "ipc:///events")}, 0},
		"one socket file of one host":  {[]patient{of("worker 0", "a", "ipc:///events"), of("worker 1", "a", "ipc:///events")}, 1},
		"a foreign text":               {[]patient{of("worker 0", "a", long), of("worker 1", "b", long)}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			var r report
			compare(test.seen, &r)
			if len(r.findings) != test.want {
				t.Fatalf("found %v", r.findings)
			}
			for _, f := range r.findings {
				if strings.Contains(f.Text, "\n") || len(f.Text) > maxShown+100 {
					t.Errorf("%q", f.Text)
				}
			}
		})
	}
}

func TestNoWorkerIsNotedWhereNoneIsRun(t *testing.T) {
	for _, attached := range []bool{false, true} {
		all, _ := visit(t, Command{Wait: wait}, Setup{Attached: attached})
		if noted := slices.ContainsFunc(all, func(f Finding) bool { return f.Text == "no worker is configured" }); noted != attached {
			t.Errorf("attached %v: %v", attached, all)
		}
	}
}

func TestALookThatIsCutShortPrintsNothing(t *testing.T) {
	why := errors.New("interrupted")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(why)
	var out bytes.Buffer
	if err := (Command{Wait: wait}).Run(ctx, setup(newWard(t, 1, nil)), &out); !errors.Is(err, why) || out.Len() > 0 {
		t.Errorf("%v, printed %q", err, out.String())
	}
}

func TestTheMachineIsLookedAt(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	port := listener.Addr().(*net.TCPAddr).Port
	python := "python3"
	if _, err := exec.LookPath(python); err != nil {
		t.Skip(err)
	}
	empty, hostile := t.TempDir(), t.TempDir()
	testkit.WriteFiles(t, hostile, map[string]string{"org/deep/tokenizer.json": strings.Repeat("[", 1000), "org/deep/config.json": "{}"})
	vllmOf := func(python, model string) Setup {
		return Setup{Engine: vllm.Engine(), Starts: true, Settings: process.Settings{Python: python, Model: model, NumWorkers: 1}, BlockSize: blockSize}
	}
	for _, test := range []struct {
		name string
		c    Command
		s    Setup
		want []string // of the only failed one
	}{
		{"a taken port", Command{}, Setup{Ports: []settings.PortUse{{Flag: "--router-port", Base: port, Port: port, Host: "127.0.0.1"}}}, []string{"--router-port", "address already in use"}},
		{"settings that cannot be", Command{Unusable: errors.New("no model: run `make setup`")}, Setup{Starts: true}, []string{"make setup"}},
		{"no Python", Command{}, vllmOf(filepath.Join(empty, "python"), ""), []string{"--python", "make setup"}},
		{"a Python without vLLM", Command{}, vllmOf(withoutVLLM(t, python), ""), []string{"has no vLLM", "make setup", "--python"}},
		{"a folder that is no model", Command{}, Setup{Settings: process.Settings{Model: empty}}, []string{"--model " + empty, "tokenizer.json"}},
		{"a tokenizer in --models-dir that is refused", Command{}, Setup{ModelsDir: hostile}, []string{filepath.Join(hostile, "org", "deep"), "levels deep", "workers tokenize"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.c.Wait = wait
			_, failed := visit(t, test.c, test.s)
			if len(failed) != 1 {
				t.Fatalf("failed: %v", failed)
			}
			for _, want := range test.want {
				if !strings.Contains(failed[0].Text+"; "+failed[0].Remedy, want) {
					t.Errorf("%q is not in %+v", want, failed[0])
				}
			}
		})
	}
	if err := (Command{}).Run(t.Context(), Setup{}, io.Discard); err == nil || !strings.Contains(err.Error(), "--wait") {
		t.Errorf("no wait: %v", err)
	}
}

// withoutVLLM returns a Python that finds no installed packages.
func withoutVLLM(t *testing.T, python string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "python")
	testkit.WriteFile(t, path, "#!/bin/sh\nexec "+python+" -S -E \"$@\"\n")
	if err := exec.CommandContext(t.Context(), "chmod", "+x", path).Run(); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestSkewIsWhatTheQuestionCannotExplain(t *testing.T) {
	at := time.Date(2026, 11, 22, 12, 0, 0, 400e6, time.UTC)
	for _, test := range []struct {
		date string
		want time.Duration
	}{
		{"Sun, 22 Nov 2026 12:00:00 GMT", 0},
		{"Sun, 22 Nov 2026 12:00:01 GMT", 0},
		{"Sun, 22 Nov 2026 12:00:10 GMT", 8600 * time.Millisecond},
		{"Sun, 22 Nov 2026 11:59:50 GMT", -9400 * time.Millisecond},
		{"", 0},
		{"yesterday", 0},
	} {
		if got := skewOf(test.date, at, at.Add(time.Second)); got != test.want {
			t.Errorf("%s: %v, want %v", test.date, got, test.want)
		}
	}
}
