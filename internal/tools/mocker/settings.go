package mocker

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/alecthomas/kong"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/tools/engine"
)

// Flags are the flags of simulated workers.
type Flags struct {
	Pairs        []string `name:"mock" group:"Mock workers" sep:"none" placeholder:"KEY=VALUE,..." help:"Properties and faults of mock workers, such as num-gpu-blocks=4096,crash-every=10s. Repeatable; keys: docs/mock-workers.md."`
	SpeedupRatio *float64 `group:"Mock workers" placeholder:"FACTOR" help:"Speed of a mock worker relative to the simulated GPU. 0: no delays. Default: 1."`
}

// Settings are the properties of simulated workers, by the keys of --mock; the simulate
// command uses those with the tag simulate. Keys with help that starts with "Fault"
// inject faults for tests.
type Settings struct {
	SpeedupRatio        float64       `default:"1" simulate:"" help:"Speed of a mock worker relative to the simulated GPU. 0: no delays."`
	API                 string        `name:"api" default:"vllm" enum:"vllm,sglang" simulate:"" help:"Engine that mock workers simulate, with its routes, KV events and load: vllm or sglang."`
	NumGPUBlocks        int           `name:"num-gpu-blocks" default:"16384" simulate:"" help:"KV-cache blocks of a mock worker (vLLM's --num-gpu-blocks-override)."`
	MaxNumSeqs          int           `default:"256" simulate:"" help:"Maximum requests in a mock worker's batch (vLLM's --max-num-seqs)."`
	MaxNumBatchedTokens int           `default:"8192" simulate:"" help:"Maximum tokens that a mock worker computes in one step (vLLM's --max-num-batched-tokens)."`
	DataParallelSize    int           `default:"1" help:"Data-parallel ranks of a mock worker (vLLM's --data-parallel-size), each with its own cache, event and load port."`
	Lora                []string      `name:"lora" placeholder:"NAME" help:"Comma-separated LoRA adapters that a mock worker serves as models (vLLM's --lora-modules)."`
	MaxLoras            int           `default:"0" simulate:"" help:"Adapters that a mock worker has loaded, and in its batch, at a time (vLLM's --max-loras). 0: all, without loading."`
	LoraLoad            time.Duration `default:"100ms" simulate:"" help:"Time that a mock worker takes to load an adapter, with max-loras."`
	PrefillMS           []float64     `name:"prefill-ms" default:"16.50142,0.01518344,4.209989e-07" placeholder:"A,B,C" simulate:"" help:"Prefill time of a step, ms: A + B*n + C*n^2 for n uncached prompt tokens."`
	DecodeMS            []float64     `name:"decode-ms" default:"5.74,54.01,-25.74" placeholder:"A,B,C" simulate:"" help:"Decode time of a step, ms: A + B*u + C*u^2, at least 1, where u (0 to 1) is the share of the KV cache that decoding requests fill."`
	OutputTokens        int           `default:"128" help:"Length of a mock answer, tokens, unless the request sets ignore_eos or a smaller max_tokens."`
	KVTransferBandwidth float64       `name:"kv-transfer-bandwidth" default:"64" placeholder:"GB/S" simulate:"" help:"Bandwidth of KV-cache transfers between mock workers, GB (10^9 bytes) per second."`
	KVBytesPerToken     int           `name:"kv-bytes-per-token" default:"131072" simulate:"" help:"KV cache per prompt token, bytes. Default: Llama 8B in 16 bits (2 * 32 layers * 8 heads * 128 * 2)."`
	Protocol            string        `name:"disagg-kind" default:"" enum:",nixl,sglang" simulate:"" help:"KV-transfer protocol of mock workers with --prefill-workers: nixl (vLLM's, the default) or sglang (the default with api=sglang)."`
	KVLease             time.Duration `name:"kv-lease" default:"30s" help:"Time that a prefill mock worker keeps blocks that no decode worker requests (vLLM's kv_lease_duration)."`
	KVLoadFailure       string        `name:"kv-load-failure" default:"recompute" enum:"recompute,fail" help:"Action of a decode mock worker when the KV transfer fails: recompute or fail (vLLM's kv_load_failure_policy)."`
	BootstrapTimeout    time.Duration `default:"5m" help:"Time that SGLang mock workers wait for each other."`
	ShutdownTimeout     time.Duration `default:"0s" help:"Maximum time for in-flight requests to finish when a mock worker is stopped. 0: stop immediately."`
	BufferSteps         int           `default:"10000" help:"KV-event batches that a mock worker can replay (vLLM's buffer_steps)."`
	ArrayEvents         bool          `help:"Encode KV events as arrays, as vLLM up to 0.23, instead of maps."`
	TierSettings
	ErrorRate       float64                  `default:"0" help:"Fault: share of requests, 0 to 1, that a mock worker answers with status 500."`
	CrashEvery      time.Duration            `default:"0s" help:"Fault: interval at which a mock worker crashes, each in turn. 0: never."`
	HangWorker      map[uint64]time.Duration `mapsep:"," placeholder:"ID=AFTER" help:"Fault: mock worker ID hangs (its ports stay open) this long after each start. Comma-separated."`
	SlowWorker      map[uint64]float64       `mapsep:"," placeholder:"ID=FACTOR" help:"Fault: mock worker ID is slower by FACTOR in every step. Comma-separated."`
	DropEvents      float64                  `default:"0" help:"Fault: share of KV-event batches, 0 to 1, that are not sent but can be replayed."`
	DuplicateEvents float64                  `default:"0" help:"Fault: share of KV-event batches, 0 to 1, that are sent twice."`
	DelayEvents     time.Duration            `default:"0s" help:"Fault: delay of each KV-event batch."`

	// Set by the caller, not by flags of the mocker.
	ServedModelName string        `kong:"-"`
	BlockSize       int           `kong:"-"` // tokens
	Seed            uint64        `kong:"-"`
	KVEvents        bool          `kong:"-"` // KV events are published
	Parts           []kv.Disagg   `kong:"-"` // of each worker, by number
	Ports           process.Ports `kong:"-"`
	Host            string        `kong:"-"` // address that workers listen at; empty: 127.0.0.1
}

// Settings returns the settings that the flags give. Each occurrence of --mock overrides
// the keys of those before it.
func (f Flags) Settings() (s Settings, err error) {
	parser, err := newParser(&s)
	if err != nil {
		return s, err
	}
	var keys, arguments []string
	for _, key := range parser.Model.Flags {
		keys = append(keys, key.Name)
	}
	for _, text := range f.Pairs {
		for _, pair := range settings.Pairs(text) {
			key, value, is := strings.Cut(pair, "=")
			if key = strings.TrimSpace(key); !is {
				return s, fmt.Errorf("--mock %s: give KEY=VALUE, such as num-gpu-blocks=4096", pair)
			}
			if !slices.Contains(keys, key) {
				return s, fmt.Errorf("--mock %s: %w (docs/mock-workers.md lists the keys)", pair, settings.UnknownKey(key, keys))
			}
			arguments = slices.DeleteFunc(arguments, func(earlier string) bool { return strings.HasPrefix(earlier, "--"+key+"=") })
			arguments = append(arguments, "--"+key+"="+value)
		}
	}
	if _, err := parser.Parse(arguments); err != nil {
		return s, fmt.Errorf("--mock %s", strings.TrimPrefix(err.Error(), "--"))
	}
	if f.SpeedupRatio != nil {
		s.SpeedupRatio = *f.SpeedupRatio
	}
	return s, nil
}

// newParser returns what reads keys, as flags, into s.
func newParser(s *Settings) (*kong.Kong, error) {
	parser, err := kong.New(s, kong.NoDefaultHelp())
	if err != nil {
		return nil, fmt.Errorf("settings of mock workers: %w", err)
	}
	return parser, nil
}

// host is the address that workers listen at.
func (c *Settings) host() string { return cmp.Or(c.Host, "127.0.0.1") }

// at is where a worker listens on a port.
func (c *Settings) at(port int) string { return net.JoinHostPort(c.host(), strconv.Itoa(port)) }

// Engine is the kind of server that the mock workers are.
func (c *Settings) Engine() kv.Engine {
	if c.API == kv.EngineSGLang.String() {
		return kv.EngineSGLang
	}
	return kv.EngineVLLM
}

// DisaggKind is the protocol between prefill and decode workers.
func (c *Settings) DisaggKind() kv.Kind {
	if c.Engine() == kv.EngineSGLang || c.Protocol == kv.KindSGLang.String() {
		return kv.KindSGLang
	}
	return kv.KindNIXL
}

// SimConfig returns the settings of a worker's engine, with blocks of that many
// tokens.
func (c *Settings) SimConfig(blockSize int) engine.Settings {
	config := engine.Settings{
		Blocks: c.NumGPUBlocks, BlockSize: blockSize, MaxSeqs: c.MaxNumSeqs, MaxBatchedTokens: c.MaxNumBatchedTokens,
		Timing: engine.DefaultTiming(),
	}
	if c.MaxLoras > 0 {
		config.Adapters = engine.AdapterSettings{Slots: c.MaxLoras, LoadMS: float64(c.LoraLoad) / float64(time.Millisecond)}
	}
	copy(config.Timing.Prefill[:], c.PrefillMS)
	copy(config.Timing.Decode[:], c.DecodeMS)
	config.Timing.Speedup = c.SpeedupRatio
	return config
}

// loraSlots is the number of adapters that the engine has slots for; 0: it serves none.
func (c *Settings) loraSlots() int { return cmp.Or(c.MaxLoras, len(c.Lora)) }

// Handover returns the transfer speed of prompts between mock workers.
func (c *Settings) Handover() engine.Handover {
	return engine.Handover{Bandwidth: c.KVTransferBandwidth, BytesPerToken: c.KVBytesPerToken}
}

// Validate checks the settings for the given number of workers.
func (c *Settings) Validate(workers int) error {
	for key, value := range map[string]int{
		"num-gpu-blocks": c.NumGPUBlocks, "max-num-seqs": c.MaxNumSeqs,
		"max-num-batched-tokens": c.MaxNumBatchedTokens, "output-tokens": c.OutputTokens,
		"data-parallel-size": c.DataParallelSize, "buffer-steps": c.BufferSteps,
	} {
		if value < 1 {
			return fmt.Errorf("--mock %s=%d: must be at least 1", key, value)
		}
	}
	for key, share := range map[string]float64{"error-rate": c.ErrorRate, "drop-events": c.DropEvents, "duplicate-events": c.DuplicateEvents} {
		if share < 0 || share > 1 {
			return fmt.Errorf("--mock %s=%v: must be a share from 0 to 1", key, share)
		}
	}
	if c.Engine() == kv.EngineSGLang && c.Protocol == kv.KindNIXL.String() {
		return errors.New("--mock disagg-kind=nixl with api=sglang: SGLang has its own protocol; remove disagg-kind")
	}
	if c.pulls() && (c.Engine() == kv.EngineSGLang || c.DataParallelSize > 1) {
		return errors.New("--mock peer-bandwidth: vLLM mock workers of one rank pull; remove api=sglang and data-parallel-size")
	}
	if c.Engine() == kv.EngineSGLang && c.ArrayEvents {
		return errors.New("--mock array-events with api=sglang: only vLLM has sent events as arrays; remove one of the two")
	}
	if c.KVLease <= 0 || c.BootstrapTimeout <= 0 {
		return errors.New("--mock kv-lease and bootstrap-timeout must be more than 0")
	}
	if c.SpeedupRatio < 0 || c.CrashEvery < 0 || c.DelayEvents < 0 || c.ShutdownTimeout < 0 {
		return errors.New("--speedup-ratio and --mock crash-every, delay-events and shutdown-timeout cannot be negative")
	}
	if !(c.KVTransferBandwidth > 0) || c.KVBytesPerToken < 0 {
		return fmt.Errorf("--mock kv-transfer-bandwidth=%v,kv-bytes-per-token=%d: the bandwidth must be more than 0, and the size must not be negative", c.KVTransferBandwidth, c.KVBytesPerToken)
	}
	if len(c.PrefillMS) != 3 || len(c.DecodeMS) != 3 {
		return errors.New("--mock prefill-ms and decode-ms take three numbers, separated by commas")
	}
	if c.MaxLoras < 0 || c.LoraLoad < 0 {
		return fmt.Errorf("--mock max-loras=%d,lora-load=%s: neither can be negative", c.MaxLoras, c.LoraLoad)
	}
	for i, name := range c.Lora {
		if name == "" || slices.Contains(c.Lora[:i], name) {
			return fmt.Errorf("--mock lora=%s: give each adapter once, with a name", strings.Join(c.Lora, ","))
		}
	}
	if err := c.TierSettings.validate(workers); err != nil {
		return err
	}
	for id := range c.HangWorker {
		if id >= uint64(workers) {
			return fmt.Errorf("--mock hang-worker=%d=...: the workers are 0 to %d", id, workers-1)
		}
	}
	for id, factor := range c.SlowWorker {
		if id >= uint64(workers) || factor <= 0 {
			return fmt.Errorf("--mock slow-worker=%d=%v: the workers are 0 to %d, and the factor must be more than 0", id, factor, workers-1)
		}
	}
	return nil
}
