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

	"kvrouter/internal/engine"
	"kvrouter/internal/kv"
	"kvrouter/internal/process"
)

// Settings are the flags of simulated workers; the simulate command uses those of
// SimConfig. Flags with help that starts with "Fault" inject faults for tests.
type Settings struct {
	SpeedupRatio            float64       `group:"Mock workers, with --engine mocker" default:"1" help:"Speed of a mock worker relative to the simulated GPU. 0: no delays."`
	MockAPI                 string        `group:"Mock workers, with --engine mocker" name:"mock-api" default:"vllm" enum:"vllm,sglang" help:"Engine that mock workers simulate, with its routes, KV events and load: vllm or sglang."`
	MockNumGPUBlocks        int           `group:"Mock workers, with --engine mocker" name:"mock-num-gpu-blocks" default:"16384" help:"KV-cache blocks of a mock worker (vLLM's --num-gpu-blocks-override)."`
	MockMaxNumSeqs          int           `group:"Mock workers, with --engine mocker" default:"256" help:"Maximum requests in a mock worker's batch (vLLM's --max-num-seqs)."`
	MockMaxNumBatchedTokens int           `group:"Mock workers, with --engine mocker" default:"8192" help:"Maximum tokens that a mock worker computes in one step (vLLM's --max-num-batched-tokens)."`
	MockDataParallelSize    int           `group:"Mock workers, with --engine mocker" default:"1" help:"Data-parallel ranks of a mock worker (vLLM's --data-parallel-size), each with its own cache, event and load port."`
	MockLora                []string      `group:"Mock workers, with --engine mocker" name:"mock-lora" placeholder:"NAME" help:"Comma-separated LoRA adapters that a mock worker serves as models (vLLM's --lora-modules)."`
	MockMaxLoras            int           `group:"Mock workers, with --engine mocker" default:"0" help:"Adapters that a mock worker has loaded, and in its batch, at a time (vLLM's --max-loras). 0: all, without loading."`
	MockLoraLoad            time.Duration `group:"Mock workers, with --engine mocker" default:"100ms" help:"Time that a mock worker takes to load an adapter, with --mock-max-loras."`
	MockPrefillMS           []float64     `group:"Mock workers, with --engine mocker" name:"mock-prefill-ms" default:"16.50142,0.01518344,4.209989e-07" placeholder:"A,B,C" help:"Prefill time of a step, ms: A + B*n + C*n^2 for n uncached prompt tokens."`
	MockDecodeMS            []float64     `group:"Mock workers, with --engine mocker" name:"mock-decode-ms" default:"5.74,54.01,-25.74" placeholder:"A,B,C" help:"Decode time of a step, ms: A + B*u + C*u^2, at least 1, where u (0 to 1) is the share of the KV cache that decoding requests fill."`
	MockOutputTokens        int           `group:"Mock workers, with --engine mocker" default:"128" help:"Length of a mock answer, tokens, unless the request sets ignore_eos or a smaller max_tokens."`
	MockKVTransferBandwidth float64       `group:"Mock workers, with --engine mocker" name:"mock-kv-transfer-bandwidth" default:"64" placeholder:"GB/S" help:"Bandwidth of KV-cache transfers between mock workers, GB (10^9 bytes) per second."`
	MockKVBytesPerToken     int           `group:"Mock workers, with --engine mocker" name:"mock-kv-bytes-per-token" default:"131072" help:"KV cache per prompt token, bytes. Default: Llama 8B in 16 bits (2 * 32 layers * 8 heads * 128 * 2)."`
	MockDisaggKind          string        `group:"Mock workers, with --engine mocker" default:"" enum:",nixl,sglang" help:"KV-transfer protocol of mock workers with --prefill-workers: nixl (vLLM's, the default) or sglang (the default with --mock-api sglang)."`
	MockKVLease             time.Duration `group:"Mock workers, with --engine mocker" name:"mock-kv-lease" default:"30s" help:"Time that a prefill mock worker keeps blocks that no decode worker requests (vLLM's kv_lease_duration)."`
	MockKVLoadFailure       string        `group:"Mock workers, with --engine mocker" name:"mock-kv-load-failure" default:"recompute" enum:"recompute,fail" help:"Action of a decode mock worker when the KV transfer fails: recompute or fail (vLLM's kv_load_failure_policy)."`
	MockBootstrapTimeout    time.Duration `group:"Mock workers, with --engine mocker" default:"5m" help:"Time that SGLang mock workers wait for each other."`
	MockShutdownTimeout     time.Duration `group:"Mock workers, with --engine mocker" default:"0s" help:"Maximum time for in-flight requests to finish when a mock worker is stopped. 0: stop immediately."`
	MockBufferSteps         int           `group:"Mock workers, with --engine mocker" default:"10000" help:"KV-event batches that a mock worker can replay (vLLM's buffer_steps)."`
	MockArrayEvents         bool          `group:"Mock workers, with --engine mocker" help:"Encode KV events as arrays, as vLLM up to 0.23, instead of maps."`
	TierFlags
	MockErrorRate       float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of requests, 0 to 1, that a mock worker answers with status 500."`
	MockCrashEvery      time.Duration            `group:"Mock workers, with --engine mocker" default:"0s" help:"Fault: interval at which a mock worker crashes, each in turn. 0: never."`
	MockHangWorker      map[uint64]time.Duration `group:"Mock workers, with --engine mocker" mapsep:"," placeholder:"ID=AFTER" help:"Fault: mock worker ID hangs (its ports stay open) this long after each start. Comma-separated."`
	MockSlowWorker      map[uint64]float64       `group:"Mock workers, with --engine mocker" mapsep:"," placeholder:"ID=FACTOR" help:"Fault: mock worker ID is slower by FACTOR in every step. Comma-separated."`
	MockDropEvents      float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of KV-event batches, 0 to 1, that are not sent but can be replayed."`
	MockDuplicateEvents float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of KV-event batches, 0 to 1, that are sent twice."`
	MockDelayEvents     time.Duration            `group:"Mock workers, with --engine mocker" default:"0s" help:"Fault: delay of each KV-event batch."`

	// Set by the caller, not by flags of the mocker.
	ServedModelName string        `kong:"-"`
	BlockSize       int           `kong:"-"` // tokens
	Seed            uint64        `kong:"-"`
	KVEvents        bool          `kong:"-"` // KV events are published
	Parts           []kv.Disagg   `kong:"-"` // of each worker, by number
	Ports           process.Ports `kong:"-"`
	Host            string        `kong:"-"` // address that workers listen at; empty: 127.0.0.1
}

// host is the address that workers listen at.
func (c *Settings) host() string { return cmp.Or(c.Host, "127.0.0.1") }

// at is where a worker listens on a port.
func (c *Settings) at(port int) string { return net.JoinHostPort(c.host(), strconv.Itoa(port)) }

// Engine is the kind of server that the mock workers are.
func (c *Settings) Engine() kv.Engine {
	if c.MockAPI == kv.EngineSGLang.String() {
		return kv.EngineSGLang
	}
	return kv.EngineVLLM
}

// DisaggKind is the protocol between prefill and decode workers.
func (c *Settings) DisaggKind() kv.Kind {
	if c.Engine() == kv.EngineSGLang || c.MockDisaggKind == kv.KindSGLang.String() {
		return kv.KindSGLang
	}
	return kv.KindNIXL
}

// SimConfig returns the settings of a worker's engine, with blocks of that many
// tokens.
func (c *Settings) SimConfig(blockSize int) engine.Settings {
	settings := engine.Settings{
		Blocks: c.MockNumGPUBlocks, BlockSize: blockSize, MaxSeqs: c.MockMaxNumSeqs, MaxBatchedTokens: c.MockMaxNumBatchedTokens,
		Timing: engine.DefaultTiming(),
	}
	if c.MockMaxLoras > 0 {
		settings.Adapters = engine.AdapterSettings{Slots: c.MockMaxLoras, LoadMS: float64(c.MockLoraLoad) / float64(time.Millisecond)}
	}
	copy(settings.Timing.Prefill[:], c.MockPrefillMS)
	copy(settings.Timing.Decode[:], c.MockDecodeMS)
	settings.Timing.Speedup = c.SpeedupRatio
	return settings
}

// loraSlots is the number of adapters that the engine has slots for; 0: it serves none.
func (c *Settings) loraSlots() int { return cmp.Or(c.MockMaxLoras, len(c.MockLora)) }

// Handover returns the transfer speed of prompts between mock workers.
func (c *Settings) Handover() engine.Handover {
	return engine.Handover{Bandwidth: c.MockKVTransferBandwidth, BytesPerToken: c.MockKVBytesPerToken}
}

// Validate checks the settings for the given number of workers.
func (c *Settings) Validate(workers int) error {
	for flag, value := range map[string]int{
		"--mock-num-gpu-blocks": c.MockNumGPUBlocks, "--mock-max-num-seqs": c.MockMaxNumSeqs,
		"--mock-max-num-batched-tokens": c.MockMaxNumBatchedTokens, "--mock-output-tokens": c.MockOutputTokens,
		"--mock-data-parallel-size": c.MockDataParallelSize, "--mock-buffer-steps": c.MockBufferSteps,
	} {
		if value < 1 {
			return fmt.Errorf("%s %d: must be at least 1", flag, value)
		}
	}
	for flag, share := range map[string]float64{"--mock-error-rate": c.MockErrorRate, "--mock-drop-events": c.MockDropEvents, "--mock-duplicate-events": c.MockDuplicateEvents} {
		if share < 0 || share > 1 {
			return fmt.Errorf("%s %v: must be a share from 0 to 1", flag, share)
		}
	}
	if c.Engine() == kv.EngineSGLang && c.MockDisaggKind == kv.KindNIXL.String() {
		return errors.New("--mock-disagg-kind nixl with --mock-api sglang: SGLang has its own protocol; remove --mock-disagg-kind")
	}
	if c.pulls() && (c.Engine() == kv.EngineSGLang || c.MockDataParallelSize > 1) {
		return errors.New("--mock-peer-bandwidth: vLLM mock workers of one rank pull; remove --mock-api sglang and --mock-data-parallel-size")
	}
	if c.Engine() == kv.EngineSGLang && c.MockArrayEvents {
		return errors.New("--mock-array-events with --mock-api sglang: only vLLM has sent events as arrays; remove one of the two")
	}
	if c.MockKVLease <= 0 || c.MockBootstrapTimeout <= 0 {
		return errors.New("--mock-kv-lease and --mock-bootstrap-timeout must be more than 0")
	}
	if c.SpeedupRatio < 0 || c.MockCrashEvery < 0 || c.MockDelayEvents < 0 || c.MockShutdownTimeout < 0 {
		return errors.New("--speedup-ratio, --mock-crash-every, --mock-delay-events and --mock-shutdown-timeout cannot be negative")
	}
	if !(c.MockKVTransferBandwidth > 0) || c.MockKVBytesPerToken < 0 {
		return fmt.Errorf("--mock-kv-transfer-bandwidth %v and --mock-kv-bytes-per-token %d: the bandwidth must be more than 0, and the size must not be negative", c.MockKVTransferBandwidth, c.MockKVBytesPerToken)
	}
	if len(c.MockPrefillMS) != 3 || len(c.MockDecodeMS) != 3 {
		return errors.New("--mock-prefill-ms and --mock-decode-ms take three numbers, separated by commas")
	}
	if c.MockMaxLoras < 0 || c.MockLoraLoad < 0 {
		return fmt.Errorf("--mock-max-loras %d and --mock-lora-load %s: neither can be negative", c.MockMaxLoras, c.MockLoraLoad)
	}
	for i, name := range c.MockLora {
		if name == "" || slices.Contains(c.MockLora[:i], name) {
			return fmt.Errorf("--mock-lora %s: give each adapter once, with a name", strings.Join(c.MockLora, ","))
		}
	}
	if err := c.TierFlags.validate(workers); err != nil {
		return err
	}
	for id := range c.MockHangWorker {
		if id >= uint64(workers) {
			return fmt.Errorf("--mock-hang-worker %d=...: the workers are 0 to %d", id, workers-1)
		}
	}
	for id, factor := range c.MockSlowWorker {
		if id >= uint64(workers) || factor <= 0 {
			return fmt.Errorf("--mock-slow-worker %d=%v: the workers are 0 to %d, and the factor must be more than 0", id, factor, workers-1)
		}
	}
	return nil
}
