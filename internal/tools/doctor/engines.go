package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"

	"kvrouter/internal/fleet/probe"
)

const (
	nameVLLM   = "vLLM"
	nameLlama  = "llama.cpp"
	nameOllama = "Ollama"
)

// owners are the engines by the owner of the models that their lists name.
var owners = map[string]string{
	"vllm": nameVLLM, "llamacpp": nameLlama, "library": nameOllama, "tensorrt_llm": "TensorRT-LLM", "lmdeploy": "LMDeploy",
}

// engineOf names the engine of a server that is not SGLang's, by the owner of its models or the
// routes that only one engine has.
func (v visitor) engineOf(ctx context.Context, owner string, page []byte) (name, version string) {
	name = owners[owner]
	ask := func(path string) (fields struct {
		Version  string
		Build    string `json:"build_info"`
		Router   string
		Settings json.RawMessage `json:"default_generation_settings"`
	}) {
		if a, err := v.ask(ctx, http.MethodGet, path); err == nil && a.status == http.StatusOK {
			_ = json.Unmarshal(a.body, &fields) // else they stay empty
		}
		return fields
	}
	if name == "" && strings.Contains(string(page), "\nvllm:") {
		name = nameVLLM
	}
	if name == "" || name == nameLlama {
		if props := ask("/props"); props.Settings != nil {
			return nameLlama, props.Build
		}
	}
	if name == "" || name == nameOllama {
		if about := ask("/api/version"); about.Version != "" {
			return nameOllama, about.Version
		}
	}
	if name == "" {
		if info := ask("/info"); info.Router == "text-generation-router" {
			return "TGI", info.Version
		}
		return "an OpenAI server", ""
	}
	return name, ask("/version").Version
}

// checkOther says what is done with a server of an engine that the router knows no events and no
// load of.
func (v visitor) checkOther(ctx context.Context, s Setup, p *patient) {
	r := &p.report
	r.ok("%s serves %s", p.version, cmp.Or(listed(p.models), "models that it does not list"))
	if v.at.KVEvents != "" {
		sources, _ := probe.ParseEventSources(nil, v.at)
		v.checkEvents(ctx, sources, p)
	} else if s.KVEvents {
		r.note("is routed approximately: the router follows no KV events of this engine, and expects what it has sent to the worker itself in "+
			"its cache", "")
	}
	v.checkLoad(ctx, v.at.Load, r)
}

// reportsCached checks whether a vLLM server's answers report the number of cached prompt tokens. It
// sends one prompt twice, for one token each: some versions leave out a count of 0.
func (v visitor) reportsCached(ctx context.Context, p *patient, blockSize int) (reports, known bool) {
	if len(p.models) == 0 {
		return false, false
	}
	body, err := json.Marshal(map[string]any{"model": p.models[0], "prompt": strings.Repeat("kvrouter doctor ", max(1, blockSize)), "max_tokens": 1})
	if err != nil {
		return false, false
	}
	for range 2 {
		answered, err := v.post(ctx, "/v1/completions", body)
		var answer struct {
			Usage *struct {
				Details *struct {
					Cached *int `json:"cached_tokens"`
				} `json:"prompt_tokens_details"`
			}
		}
		if err != nil || json.Unmarshal(answered, &answer) != nil || answer.Usage == nil {
			return false, false
		}
		if answer.Usage.Details != nil && answer.Usage.Details.Cached != nil {
			return true, true
		}
	}
	return false, true
}

// shift is how far the ports of a worker's sockets are from the usual ones, so that workers on one
// host have their own: its place among them, times its ranks.
func (s Setup) shift(v visitor, ranks int) (ports int) {
	for _, other := range s.Workers {
		if other.ID == v.at.ID {
			break
		}
		if probe.HostOf(other.URL) == probe.HostOf(v.at.URL) {
			ports += max(1, ranks)
		}
	}
	return ports
}

// lack notes an argument that the worker's command line lacks.
func (p *patient) lack(argument string) { p.lacks = append(p.lacks, argument) }

// adviseAll says what to add to the worker's command line, if it is more than one argument: each
// is the remedy of its own finding, too.
func (p *patient) adviseAll() {
	if len(p.lacks) > 1 {
		p.report.note(fmt.Sprintf("lacks %d arguments for exact predictions", len(p.lacks)), "add to its command line: "+strings.Join(p.lacks, " "))
	}
}
