package workers

import (
	"encoding/json"
	"fmt"
	"io"
	"log/slog"

	"kvrouter/internal/events"
	"kvrouter/internal/guard"
	"kvrouter/internal/kv"
)

// EventFlags returns the engine's flags that turn on what the router follows.
func EventFlags(engine kv.Engine) string {
	if engine == kv.EngineSGLang {
		return sglangEvents
	}
	return vllmEvents
}

// EventSourcesTold reads a vLLM's answer to /kv_event_sources by the rules for a worker
// that is attached. None is no error: not every server publishes events.
func EventSourcesTold(answer []byte, spec Attached) ([]events.Source, error) {
	told := map[string]kvEventSource{}
	if len(answer) > 0 {
		if err := json.Unmarshal(answer, &told); err != nil {
			return nil, fmt.Errorf("/kv_event_sources: %w", err)
		}
	}
	return stranger().sourcesOf(told, spec), nil
}

// SGLangTold is what an SGLang server says of itself, as far as it matters to who looks
// at it from outside.
type SGLangTold struct {
	Version   string
	BlockSize int    // tokens
	Caches    bool   // it keeps prompts
	Remedy    string // how it would; empty where it does
	Decodes   bool   // it takes prompts from a prefill server
	Sources   []events.Source
	Load      string // socket of rank 0; empty: none
}

// ReadSGLang reads an SGLang server's answer to /server_info; false: it is none.
func ReadSGLang(answer []byte, spec Attached) (SGLangTold, bool) {
	var info serverInfo
	var version struct{ Version string }
	if json.Unmarshal(answer, &info) != nil || info.Mode == nil {
		return SGLangTold{}, false
	}
	_ = json.Unmarshal(answer, &version) // else it stays unknown
	ranks := int(min(info.ranks(), kv.MaxRanks))
	keeps, remedy := info.keepsPrompts()
	return SGLangTold{
		Version: version.Version, BlockSize: int(min(max(info.PageSize, 0), kv.MaxTokens)),
		Caches: keeps, Remedy: remedy, Decodes: *info.Mode == kv.RoleDecode.String(),
		Sources: stranger().listSources(info.sources(spec, ranks), spec), Load: info.loadOf(spec, 0),
	}, true
}

// PageTold is what a worker's Prometheus page says.
type PageTold struct {
	Load  error               // why the load cannot be read; nil: it can
	Cache []map[string]string // settings of the KV cache of each engine, as vLLM names them
}

// ReadPage reads a worker's Prometheus page. An error means that it is none.
func ReadPage(page io.Reader) (PageTold, error) {
	reader := loadReader{edges: guard.New(), log: slog.New(slog.DiscardHandler)}
	families, err := reader.parse(io.LimitReader(page, maxMetricsBytes), append([]string{cacheName}, loadNames...))
	if err != nil {
		return PageTold{}, err
	}
	var told PageTold
	_, told.Load = loadOf(families, "")
	for _, metric := range families[cacheName].GetMetric() {
		labels := map[string]string{}
		for _, label := range metric.Label {
			labels[label.GetName()] = label.GetValue()
		}
		told.Cache = append(told.Cache, labels)
	}
	return told, nil
}

// stranger returns a fleet that knows no worker and is never run: it reads what servers
// say.
func stranger() *Fleet { return &Fleet{log: slog.New(slog.DiscardHandler)} }
