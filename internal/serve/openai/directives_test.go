package openai

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/prompt/tokens"
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/testkit"
)

// directing are the keys of clients that may direct the engines.
var directing = keys.Settings{TrustTransferParams: true}

// aForeignHost is in all that a client must not name.
const aForeignHost = "127.0.0.9"

// TestNoClientNamesAnEnginesHosts: on no route, in no spelling, whether or not keys are required.
func TestNoClientNamesAnEnginesHosts(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{"choices":[]}`) })
	api := func(engine kv.Engine, settings keys.Settings) *testAPI {
		return newTestAPIOf(t, setup{Keys: settings}, nil, kv.Target{URL: worker.URL, Models: []string{"m"}, Engine: engine})
	}
	keyed := keys.Settings{APIKeysFile: filepath.Join(t.TempDir(), "keys.yaml")}
	if err := os.WriteFile(keyed.APIKeysFile, []byte("- {name: a, key: key-a}\n- {name: b, key: key-b, trust-hints: true}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	withKeys, without, flagged := api(kv.EngineSGLang, keyed), api(kv.EngineSGLang, keys.Settings{}), api(kv.EngineSGLang, directing)
	members := map[string]string{
		"kv_transfer_params":                 `"kv_transfer_params":{"do_remote_prefill":true,"remote_host":"127.0.0.9","remote_port":1}`,
		"bootstrap_host":                     `"bootstrap_host":"127.0.0.9","bootstrap_host":null`,
		"vllm_xargs.ec_transfer_params":      `"vllm_xargs":{"\u0065c_transfer_params":"127.0.0.9"}`,
		"sampling_params.kv_transfer_params": `"sampling_params":{"extra_args":{"kv_transfer_params":{"remote_host":"127.0.0.9"}}}`,
		"extra_body.bootstrap_host":          `"extra_body":{"bootstrap_host":["127.0.0.9"]}`,
		"nvext.disaggregated_params":         `"nvext":{"disaggregated_params":{"host":"127.0.0.9"}}`,
		"requests.remote_kv_source":          `"requests":[{"remote_kv_source":"127.0.0.9:1"}]`,
	}
	routes := []string{"/tokenize"}
	for route := range tokens.Routes {
		routes = append(routes, route)
	}
	for _, route := range routes {
		for param, member := range members {
			body := `{"model":"m","prompt":"p","messages":[],` + member + `}`
			for name, h := range map[string]*testAPI{"with keys": withKeys, "without": without} {
				response, answer := h.post(t, route, body, "Authorization", "Bearer key-a")
				if response.StatusCode != http.StatusBadRequest || !strings.HasPrefix(gjson.Get(answer, "error.message").Str, param+" is not accepted") {
					t.Errorf("%s, %s: %s: %d %s", route, name, body, response.StatusCode, answer)
				}
			}
		}
	}
	if got := worker.Received(); len(got) != 0 {
		t.Fatalf("the worker got %q", got)
	}
	body := `{"model":"m","messages":[],` + members["kv_transfer_params"] + `}`
	for name, send := range map[string]func() (*http.Response, string){
		"the key is trusted": func() (*http.Response, string) {
			return withKeys.post(t, testkit.ChatPath, body, "Authorization", "Bearer key-b", "X-Prefiller-Host-Port", "127.0.0.9:1")
		},
		"a flag says so": func() (*http.Response, string) {
			return flagged.post(t, testkit.ChatPath, body, "X-Prefiller-Host-Port", "127.0.0.9:1")
		},
	} {
		response, answer := send()
		if got := worker.Received(); response.StatusCode != http.StatusOK || got[len(got)-1] != body || worker.Header.Get("X-Prefiller-Host-Port") == "" {
			t.Errorf("%s: %d %s", name, response.StatusCode, answer)
		}
	}
	for _, harmless := range []string{`"kv_transfer_params":null,"bootstrap_room":null`, `"kv_transfer_params":{"prompt_token_ids":[1,2]}`} {
		body := `{"model":"m","messages":[],` + harmless + `}`
		response, answer := withKeys.post(t, testkit.ChatPath, body, "Authorization", "Bearer key-a",
			"X-Prefiller-Host-Port", "127.0.0.9:1", "X-Kv-Cache-Source-Host-Port", "127.0.0.9:1", "x-override-bootstrap-host", "127.0.0.9", "x-data-parallel-rank", "1", "x-vllm-priority", "-9", "x-request-id", "___prefill_addr_127.0.0.9:1___decode_addr_127.0.0.9:1", "x-worker-instance-id", "0", "x-dp-rank", "1")
		got := worker.Received()
		if response.StatusCode != http.StatusOK || got[len(got)-1] != body {
			t.Errorf("%s: %d %s", body, response.StatusCode, answer)
		}
		for name, values := range worker.Header {
			if strings.Contains(fmt.Sprint(values), aForeignHost) || name == "X-Data-Parallel-Rank" || name == "X-Vllm-Priority" || name == "X-Dp-Rank" {
				t.Errorf("the worker got %s: %s", name, values)
			}
		}
	}
}

// TestBodiesThatAreNoJSONNameNoHosts: forms, and what is called something else.
func TestBodiesThatAreNoJSONNameNoHosts(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	h := newTestAPI(t, setup{}, worker.URL)
	form := func(name, value string) string {
		return "--x\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n--x--\r\n"
	}
	for _, c := range []struct {
		path, kind, body string
		want             int
	}{
		{"/v1/audio/transcriptions", "multipart/form-data; boundary=x", form("model", "m"), 200},
		{"/v1/audio/transcriptions", "multipart/form-data; boundary=x", form("vllm_xargs", `{"kv_transfer_params":"h"}`), 400},
		{"/v1/audio/transcriptions", "multipart/form-data; boundary=x", form("bootstrap_host", "h"), 400},
		{"/v1/embeddings", "Application/JSON; charset=utf-8", `{"bootstrap_host":"h"}`, 400},
		{"/v1/embeddings", "application/vnd.x+json", `{"bootstrap_host":"h"}`, 400},
		{"/v1/embeddings", "", `{"bootstrap_host":"h"}`, 400},
		{"/v1/embeddings", "text/plain", `{"bootstrap_host":"h"}`, 400},
		{"/v1/embeddings", "text/plain", `{"a":NaN,"bootstrap_host":"h"}`, 400},
		{"/v1/embeddings", "", `{"a":NaN}`, 400},
		{"/v1/embeddings", "text/plain", `hello`, 200},
	} {
		request, _ := http.NewRequest(http.MethodPost, h.URL+c.path, bytes.NewReader([]byte(c.body)))
		request.Header.Set("Content-Type", c.kind)
		response, err := h.Client().Do(request)
		if err != nil {
			t.Fatal(err)
		}
		response.Body.Close()
		if response.StatusCode != c.want {
			t.Errorf("%s %s: %s: %d, want %d", c.path, c.kind, c.body, response.StatusCode, c.want)
		}
	}
}

// TestNoClientOpensAFileOfAWorker: SGLang takes paths for media. vLLM asks its own flag.
func TestNoClientOpensAFileOfAWorker(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	chat := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"file:///a.png"}}]}]}`
	for _, c := range []struct {
		engine     kv.Engine
		settings   keys.Settings
		path, body string
		want       int
	}{
		{kv.EngineSGLang, keys.Settings{}, testkit.ChatPath, chat, 400},
		{kv.EngineSGLang, keys.Settings{}, generateRoute, `{"text":"a","image_data":["/a"]}`, 400},
		{kv.EngineSGLang, directing, testkit.ChatPath, chat, 200},
		{kv.EngineVLLM, keys.Settings{}, testkit.ChatPath, chat, 200},
	} {
		h := newTestAPIOf(t, setup{Keys: c.settings}, nil, kv.Target{URL: worker.URL, Models: []string{"m"}, Engine: c.engine})
		if response, answer := h.post(t, c.path, c.body); response.StatusCode != c.want {
			t.Errorf("%s %s: %d %s, want %d", c.engine, c.body, response.StatusCode, answer, c.want)
		}
	}
}

// TestUntrustedClientsNameNoMediaOfOthers: vLLM keeps them by the uuid that a client gives.
func TestUntrustedClientsNameNoMediaOfOthers(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	for names, want := range map[string]int{"": 200, "k": 200, "k l": 400} {
		h := newTestAPI(t, setup{APIKey: strings.Fields(names)}, worker.URL)
		body := `{"model":"m","messages":[{"role":"user","content":[{"type":"image_url","image_url":null,"uuid":"a"}]}]}`
		if response, answer := h.post(t, testkit.ChatPath, body, "Authorization", "Bearer k"); response.StatusCode != want {
			t.Errorf("keys %s: %d %s", names, response.StatusCode, answer)
		}
	}
}

// TestAnUntrustedClientIsNotPreferredInsideAnEngine: it may only lower its priority there.
func TestAnUntrustedClientIsNotPreferredInsideAnEngine(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	no := false
	for _, c := range []struct {
		engine   kv.Engine
		priority string
		kept     bool
	}{
		{kv.EngineVLLM, "-1", false}, {kv.EngineVLLM, "1", true}, {kv.EngineVLLM, "0", true}, {kv.EngineVLLM, `" -1 "`, false}, {kv.EngineVLLM, "null", true},
		{kv.EngineSGLang, "-1", true}, {kv.EngineSGLang, "1", false}, {kv.EngineSGLang, "[1]", false},
	} {
		for _, trusted := range []bool{false, true} {
			settings := keys.Settings{}
			if !trusted {
				settings.TrustHints = &no
			}
			h := newTestAPIOf(t, setup{Keys: settings}, nil, kv.Target{URL: worker.URL, Models: []string{"m"}, Engine: c.engine})
			h.post(t, testkit.ChatPath, `{"model":"m","messages":[],"priority":`+c.priority+`}`)
			got := worker.Received()
			if kept := strings.Contains(got[len(got)-1], "priority"); kept != (c.kept || trusted) {
				t.Errorf("%s, trusted %v: %s", c.engine, trusted, got[len(got)-1])
			}
		}
	}
}

// TestWebSocketsNameNoHosts: a message that does ends its connection, and is not passed on.
func TestWebSocketsNameNoHosts(t *testing.T) {
	for _, allowed := range []bool{false, true} {
		h := newTestAPI(t, setup{RequestTimeout: 10 * time.Second, Keys: keys.Settings{TrustTransferParams: allowed}}, echo(t).URL)
		conn, text, _ := dialRealtime(t, h, "m")
		conn.SetDeadline(time.Now().Add(10 * time.Second))
		message := func(payload string) string { return "\x81" + string(rune(len(payload))) + payload }
		harmless, foreign := message(`{"type":"session.update","model":"m"}`), message(`{"type":"session.update","kv_transfer_params":{"remote_host":"`+aForeignHost+`"}}`)
		io.WriteString(conn, harmless)
		if got, err := text.Peek(len(harmless)); string(got) != harmless {
			t.Errorf("allowed %v: %q came back, %v", allowed, got, err)
		}
		text.Discard(len(harmless))
		io.WriteString(conn, foreign)
		got := make([]byte, len(foreign))
		n, _ := io.ReadFull(text, got)
		if passed := strings.Contains(string(got[:n]), aForeignHost); passed != allowed {
			t.Errorf("allowed %v: %q came back", allowed, got[:n])
		}
		if !allowed && !strings.Contains(string(got[:n]), "\x03\xf0kv_transfer_params") { // code 1008
			t.Errorf("closed with %q", got[:n])
		}
		conn.Close()
		testkit.Eventually(t, 5*time.Second, "the booking has ended", func() bool { return h.router.Load(kv.WorkerKey{}).InFlight == 0 })
	}
}

// TestEngineAdministrationNeedsATrustedKey where clients are isolated from each other.
func TestEngineAdministrationNeedsATrustedKey(t *testing.T) {
	worker := testkit.NewFakeWorker(t, func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, `{}`) })
	for names, want := range map[string]int{"k": 200, "k l": 403} {
		h := newTestAPI(t, setup{AllowEngineAdmin: true, APIKey: strings.Fields(names)}, worker.URL)
		if response, answer := h.post(t, "/v1/load_lora_adapter", `{"lora_path":"/etc"}`, "Authorization", "Bearer k"); response.StatusCode != want {
			t.Errorf("keys %s: %d %s", names, response.StatusCode, answer)
		}
	}
}
