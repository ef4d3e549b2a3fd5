package vllm

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"kvrouter/internal/kv"
	"kvrouter/internal/process"
)

// traits returns what a worker's arguments and its model's config.json say of its KV
// cache.
func traits(cfg process.Settings) kv.Traits {
	return kv.Traits{DropsLast: dropsLast(cfg.Args), AttentionChunk: attentionChunk(cfg)}
}

// dropMethods are the methods of speculative decoding with which vLLM up to 0.32
// computes the last block of a match again (use_eagle in vllm/config/speculative.py).
// Newer versions hash the tokens behind a block instead, which their events show.
var dropMethods = []string{"eagle", "eagle3", "mtp", "dflash", "dspark"}

// dropsLast reports whether the arguments choose one of dropMethods.
func dropsLast(args []string) bool {
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
	method := config.Method
	if strings.HasSuffix(method, "_mtp") { // the older names, one for each model
		method = "mtp"
	}
	return !config.Disabled && slices.Contains(dropMethods, method)
}

// attentionChunk returns the chunk of the model's chunked local attention, tokens; 0:
// it has none, or its config.json is not here.
func attentionChunk(cfg process.Settings) int {
	if !cfg.ModelFolder {
		return 0
	}
	data, err := os.ReadFile(filepath.Join(cfg.Model, "config.json"))
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
