package vllm

import (
	"encoding/json"

	"kvrouter/internal/fleet/process"
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
		all = append(all, offloading(cfg, i))
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

// tier is a place for blocks below the machine's memory.
type tier struct {
	Type string `json:"type"`
	Host string `json:"host"`
	Port int    `json:"port"` // of the first rank: vLLM adds a rank's number
}

// offloading is the connector of worker i that keeps blocks in the machine's memory, from
// where others pull them if they are to.
func offloading(cfg process.Settings, i int) connector {
	extra := struct {
		Spec  string `json:"spec_name,omitempty"`
		Bytes int64  `json:"cpu_bytes_to_use"`
		// By default KV events of the tier have neither tokens nor parent: a router
		// that has missed the block's first event could not place them.
		Describes bool   `json:"self_describing_kv_events"`
		Tiers     []tier `json:"secondary_tiers,omitempty"`
	}{Bytes: int64(cfg.OffloadGiB * (1 << 30)), Describes: true}
	if cfg.Pulls {
		extra.Spec, extra.Tiers = "TieringOffloadingSpec", []tier{{"p2p", "127.0.0.1", cfg.Ports.P2P + i*cfg.Ports.Ranks}}
	}
	return connector{Connector: "OffloadingConnector", Role: "kv_both", Extra: extra}
}

// setPullEnvironment has workers find each other's blocks: they compare hashes, which are
// equal only with equal seeds. On a CPU everything stays on loopback.
func setPullEnvironment(cfg process.Settings, env process.Environment) {
	env.SetDefault("PYTHONHASHSEED", "0")
	if len(cfg.GPUs) == 0 {
		env.SetNIXLOnCPU()
	}
}

// offloads reports whether a worker keeps blocks in memory of the machine, by the flag
// or by arguments after --.
func offloads(cfg process.Settings) bool {
	return cfg.OffloadGiB > 0 || flags.Has(cfg.Args, "kv-transfer-config", "kv-offloading-size")
}
