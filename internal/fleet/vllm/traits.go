package vllm

import (
	"encoding/json"
	"path/filepath"
	"slices"
	"strings"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/textfile"
	"kvrouter/internal/fleet/process"
)

// traits returns what a worker's arguments and its model's config.json say of its KV
// cache.
func traits(cfg process.Settings) kv.Traits {
	method := drafter(cfg.Args)
	return kv.Traits{
		DropsLast:      slices.Contains(dropMethods, method),
		DropsSome:      method == "mtp", // of a hybrid model the group of its own last layer
		AttentionChunk: attentionChunk(cfg),
		Retention:      max(0, flags.Number(cfg.Args, "prefix-cache-retention-interval")),
	}
}

// dropMethods are the methods of speculative decoding with which vLLM up to 0.32
// computes the last block of a match again (use_eagle in vllm/config/speculative.py).
// Newer versions hash the tokens behind a block instead, which their events show.
var dropMethods = []string{"eagle", "eagle3", "mtp", "dflash", "dspark"}

// drafter returns the method of speculative decoding that the arguments choose; empty:
// none, or one without the drop.
func drafter(args []string) string {
	var config struct {
		Method   string `json:"method"`
		Disabled bool   `json:"disable_eagle_block_drop"`
	}
	for i, arg := range args {
		if flags.Name(arg) != "speculative-config" {
			continue
		}
		name, value, inside := strings.Cut(arg, "=")
		if !inside && i+1 < len(args) {
			value = args[i+1]
		}
		switch _, field, _ := strings.Cut(name, "."); field {
		case "":
			_ = json.Unmarshal([]byte(value), &config) // vLLM refuses what is no JSON
		case "method":
			config.Method = value
		case "disable_eagle_block_drop":
			config.Disabled = strings.EqualFold(value, "true")
		}
	}
	switch {
	case config.Disabled:
		return ""
	case strings.HasSuffix(config.Method, "_mtp"): // the older names, one for each model
		return "mtp"
	}
	return config.Method
}

// configLimit is the maximum size of a model's config.json, bytes.
const configLimit = 16 << 20

// attentionChunk returns the chunk of the model's chunked local attention, tokens; 0:
// it has none, or its config.json is not here.
func attentionChunk(cfg process.Settings) int {
	if !cfg.ModelFolder {
		return 0
	}
	data, err := textfile.Read(filepath.Join(cfg.Model, "config.json"), configLimit)
	if err != nil {
		return 0
	}
	type part struct {
		Chunk int `json:"attention_chunk_size"`
	}
	var model struct {
		part
		Text part `json:"text_config"` // of models that also see or hear
	}
	if json.Unmarshal(data, &model) != nil {
		return 0
	}
	return max(0, model.Chunk, model.Text.Chunk)
}
