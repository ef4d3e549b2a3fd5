package vllm

import (
	"os"
	"path/filepath"
	"testing"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/fleet/process"
)

func TestTraitsFollowTheArgumentsAndTheModel(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "config.json"), []byte(`{"text_config":{"attention_chunk_size":8192}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		args   []string
		folder bool
		want   kv.Traits
	}{
		"none":             {nil, false, kv.Traits{}},
		"EAGLE":            {[]string{"--speculative-config", `{"method":"eagle3","model":"m"}`}, false, kv.Traits{DropsLast: true}},
		"MTP by its field": {[]string{"--speculative-config.method=deepseek_mtp"}, false, kv.Traits{DropsLast: true, DropsSome: true}},
		"two arguments":    {[]string{"--speculative_config.method", "mtp"}, false, kv.Traits{DropsLast: true, DropsSome: true}},
		"n-grams":          {[]string{`--speculative-config={"method":"ngram"}`}, false, kv.Traits{}},
		"without the drop": {[]string{"--speculative-config", `{"method":"eagle","disable_eagle_block_drop":true}`}, false, kv.Traits{}},
		"no JSON":          {[]string{"--speculative-config", "{"}, false, kv.Traits{}},
		"no value":         {[]string{"--speculative-config"}, false, kv.Traits{}},
		"interval":         {[]string{"--prefix-cache-retention-interval", "512"}, false, kv.Traits{Retention: 512}},
		"no interval":      {[]string{"--prefix-cache-retention-interval=None"}, false, kv.Traits{}},
		"chunks":           {nil, true, kv.Traits{AttentionChunk: 8192}},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := process.Settings{Model: folder, ModelFolder: c.folder, Args: c.args}
			if got := traits(cfg); got != c.want {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
