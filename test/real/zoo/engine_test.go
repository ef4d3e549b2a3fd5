package zoo

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/testkit"
	"kvrouter/test"
)

// block is the size of a block, tokens: the smallest of vLLM on a CPU.
const block = 32

// modelFolder writes a model of a form, which has the tokenizer of the test model.
func modelFolder(t *testing.T, config string) string {
	t.Helper()
	folder := t.TempDir()
	text, err := os.ReadFile(filepath.Join("test/real/zoo/testdata", config+".json"))
	if err != nil {
		t.Fatal(err)
	}
	testkit.WriteFile(t, filepath.Join(folder, "config.json"), string(text))
	for _, name := range []string{"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} {
		if err := os.Symlink(filepath.Join(test.ModelFolder(), name), filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// adapterFolder writes a LoRA adapter with random weights for a model.
func adapterFolder(t *testing.T, model string, random *rand.Rand) string {
	t.Helper()
	const rank = 8
	text, err := os.ReadFile(filepath.Join(model, "config.json"))
	if err != nil {
		t.Fatal(err)
	}
	config := gjson.ParseBytes(text)
	hidden, head := config.Get("hidden_size").Int(), config.Get("head_dim").Int()
	type tensor struct {
		Type    string   `json:"dtype"`
		Shape   [2]int64 `json:"shape"`
		Offsets [2]int   `json:"data_offsets"`
	}
	header, data := map[string]tensor{}, []byte{}
	add := func(name string, rows, columns int64) {
		start := len(data)
		for range rows * columns {
			data = binary.LittleEndian.AppendUint32(data, math.Float32bits(float32(random.NormFloat64()/10)))
		}
		header[name] = tensor{"F32", [2]int64{rows, columns}, [2]int{start, len(data)}}
	}
	for layer := range config.Get("num_hidden_layers").Int() {
		for part, heads := range map[string]string{"q_proj": "num_attention_heads", "v_proj": "num_key_value_heads"} {
			name := fmt.Sprintf("base_model.model.model.layers.%d.self_attn.%s", layer, part)
			add(name+".lora_A.weight", rank, hidden)
			add(name+".lora_B.weight", config.Get(heads).Int()*head, rank)
		}
	}
	names, err := json.Marshal(header)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	testkit.WriteFile(t, filepath.Join(folder, "adapter_model.safetensors"), string(binary.LittleEndian.AppendUint64(nil, uint64(len(names))))+string(names)+string(data))
	testkit.WriteFile(t, filepath.Join(folder, "adapter_config.json"), fmt.Sprintf(`{"peft_type":"LORA","task_type":"CAUSAL_LM","r":%d,"lora_alpha":16,"target_modules":["q_proj","v_proj"],"bias":"none"}`, rank))
	return folder
}

// start starts a router with one engine that serves a form.
func start(t *testing.T, f form) *test.Router {
	t.Helper()
	model, length := modelFolder(t, cmp.Or(f.config, f.name)), strconv.Itoa(cmp.Or(f.length, 2048))
	args := []string{"--model=" + model, fmt.Sprintf("--block-size=%d", block), "--engine=" + f.engine.String(), "--", "--load-format", "dummy"}
	if f.engine == kv.EngineSGLang {
		args = append(args, "--context-length", length, "--max-total-tokens", strconv.Itoa(f.cache*block))
	} else {
		args = append(args, "--max-model-len", length, "--num-gpu-blocks-override", strconv.Itoa(f.cache))
	}
	if f.drafter != "" {
		args = append(args, "--speculative-config", fmt.Sprintf(`{"method":%q,"model":%q,"num_speculative_tokens":2}`, f.drafter, modelFolder(t, f.drafter)))
	}
	if len(f.adapters) > 0 {
		args = append(args, "--enable-lora", "--max-lora-rank", "8")
		args = append(args, "--max-loras", strconv.Itoa(len(f.adapters)), "--lora-modules")
		random := rand.New(rand.NewPCG(8, 8))
		for _, name := range f.adapters {
			args = append(args, name+"="+adapterFolder(t, model, random))
		}
	}
	return test.StartEngines(t, 1, f.env, append(args, f.args...)...)
}

// about returns an engine's name and version, and the ports of its ranks' KV events.
func about(t *testing.T, s *test.Router, f form) (version string, ports []string) {
	t.Helper()
	worker := *s.Workers()[0].Endpoint
	if f.engine == kv.EngineSGLang {
		info := gjson.ParseBytes(s.Get(worker + "/server_info"))
		for rank := range info.Get("kv_events.dp_size").Int() {
			ports = append(ports, strconv.FormatInt(info.Get("kv_events.endpoint_port_base").Int()+rank, 10))
		}
		version = "SGLang " + info.Get("version").Str
	} else {
		sources := gjson.ParseBytes(s.Get(worker + "/kv_event_sources")).Map()
		for rank := range len(sources) {
			endpoint := sources[strconv.Itoa(rank)].Get("endpoint").Str
			ports = append(ports, endpoint[strings.LastIndex(endpoint, ":")+1:])
		}
		version = "vLLM " + gjson.GetBytes(s.Get(worker+"/version"), "version").Str
	}
	if len(ports) == 0 {
		t.Fatal("the engine names no KV events")
	}
	return version, ports
}

// answer is what became of a request, in tokens.
type answer struct {
	predicted, cached int
	output            []uint32
}

// ask sends a prompt and reads the answer. Some forms cannot be sampled with a seed on a
// CPU, and the weights are made up anyway.
func ask(t *testing.T, s *test.Router, f form, one *conversation, tokens int) (a answer) {
	t.Helper()
	path, query := "/v1/completions", map[string]any{"prompt": one.tokens, "max_tokens": tokens, "ignore_eos": true, "return_token_ids": true, "temperature": 0}
	if one.adapter != "" {
		query["model"] = one.adapter
	}
	cached, output := "usage.prompt_tokens_details.cached_tokens", "choices.0.token_ids"
	if f.engine == kv.EngineSGLang {
		path, query = "/generate", map[string]any{"input_ids": one.tokens, "sampling_params": map[string]any{"max_new_tokens": tokens, "ignore_eos": true, "temperature": 0}}
		cached, output = "meta_info.cached_tokens", "output_ids"
	}
	text, err := json.Marshal(query)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.Post(s.OpenAI+path, "application/json", bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil || response.StatusCode != http.StatusOK {
		t.Fatalf("%s: %v: %.500s", response.Status, err, body)
	}
	a.predicted, err = strconv.Atoi(response.Header.Get(web.HeaderOverlap))
	if err != nil {
		t.Fatalf("%s: %v", web.HeaderOverlap, err)
	}
	a.cached = int(gjson.GetBytes(body, cached).Int())
	for _, token := range gjson.GetBytes(body, output).Array() {
		a.output = append(a.output, uint32(token.Uint()))
	}
	if len(a.output) == 0 {
		t.Fatalf("no tokens in the answer: %.300s", body)
	}
	return a
}
