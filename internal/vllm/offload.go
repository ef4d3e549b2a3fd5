package vllm

import (
	"encoding/json"

	"kvrouter/internal/process"
)

// connector is a --kv-transfer-config.
type connector struct {
	Connector string `json:"kv_connector"`
	Role      string `json:"kv_role"`
	Device    string `json:"kv_buffer_device,omitempty"`
	OnFailure string `json:"kv_load_failure_policy,omitempty"`
	Extra     any    `json:"kv_connector_extra_config,omitempty"`
}

// String returns the value of the flag.
func (c connector) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err) // texts and numbers can always be written
	}
	return string(text)
}

// transferArgs are the arguments of worker i for its KV connector: none, the one that
// hands prompts over, the one that offloads blocks, or both in this order, in which
// vLLM asks them for a prompt.
func transferArgs(cfg process.Settings, i int) []string {
	var all []connector
	if cfg.PrefillWorkers > 0 {
		all = append(all, nixl(cfg, i))
	}
	if cfg.OffloadGiB > 0 {
		all = append(all, offloading(cfg.OffloadGiB))
	}
	switch len(all) {
	case 0:
		return nil
	case 1:
		return []string{"--kv-transfer-config", all[0].String()}
	}
	return []string{"--kv-transfer-config", connector{
		Connector: "MultiConnector", Role: all[0].Role, OnFailure: all[0].OnFailure,
		Extra: struct {
			Connectors []connector `json:"connectors"`
		}{all},
	}.String()}
}

// offloading is the connector that keeps blocks in gib GiB of the machine's memory.
func offloading(gib float64) connector {
	return connector{
		Connector: "OffloadingConnector", Role: "kv_both",
		Extra: struct {
			Bytes int64 `json:"cpu_bytes_to_use"`
			// By default KV events of the tier have neither tokens nor parent: a router
			// that has missed the block's first event could not place them.
			Describes bool `json:"self_describing_kv_events"`
		}{int64(gib * (1 << 30)), true},
	}
}

// offloads reports whether a worker keeps blocks in memory of the machine, by the flag
// or by arguments after --.
func offloads(cfg process.Settings) bool {
	return cfg.OffloadGiB > 0 || flags.Has(cfg.Args, "kv-transfer-config", "kv-offloading-size")
}
