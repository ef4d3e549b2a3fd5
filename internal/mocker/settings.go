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

// Settings holds the settings of simulated workers; the simulate command reads
// those of SimConfig. Those whose help begins with "Fault" are for tests of what
// routes to them.
type Settings struct {
	SpeedupRatio            float64                  `group:"Mock workers, with --engine mocker" default:"1" help:"How many times faster than the simulated GPU a mock worker runs; 0: no waits at all."`
	MockAPI                 string                   `group:"Mock workers, with --engine mocker" name:"mock-api" default:"vllm" enum:"vllm,sglang" help:"Whose server a mock worker is, with its routes, KV events and load: vllm or sglang."`
	MockNumGPUBlocks        int                      `group:"Mock workers, with --engine mocker" name:"mock-num-gpu-blocks" default:"16384" help:"KV-cache blocks of a mock worker (vLLM's --num-gpu-blocks-override)."`
	MockMaxNumSeqs          int                      `group:"Mock workers, with --engine mocker" default:"256" help:"Most requests in a mock worker's batch (vLLM's --max-num-seqs)."`
	MockMaxNumBatchedTokens int                      `group:"Mock workers, with --engine mocker" default:"8192" help:"Most tokens a mock worker computes in one step (vLLM's --max-num-batched-tokens)."`
	MockDataParallelSize    int                      `group:"Mock workers, with --engine mocker" default:"1" help:"Data-parallel ranks of a mock worker (vLLM's --data-parallel-size), each with its own cache, event and load port."`
	MockLora                []string                 `group:"Mock workers, with --engine mocker" name:"mock-lora" placeholder:"NAME" help:"LoRA adapters that a mock worker serves as models (vLLM's --lora-modules); several are separated by commas."`
	MockPrefillMS           []float64                `group:"Mock workers, with --engine mocker" name:"mock-prefill-ms" default:"16.50142,0.01518344,4.209989e-07" placeholder:"A,B,C" help:"Time of a step's prefill, ms: A + B*n + C*n^2 for n prompt tokens that are not cached."`
	MockDecodeMS            []float64                `group:"Mock workers, with --engine mocker" name:"mock-decode-ms" default:"5.74,54.01,-25.74" placeholder:"A,B,C" help:"Time of a step's decoding, ms: A + B*u + C*u^2, at least 1, where the decoding requests' tokens fill the share u (0 to 1) of the KV cache."`
	MockOutputTokens        int                      `group:"Mock workers, with --engine mocker" default:"128" help:"Tokens after which a mock answer ends by itself, unless the request says ignore_eos or a smaller max_tokens."`
	MockKVTransferBandwidth float64                  `group:"Mock workers, with --engine mocker" name:"mock-kv-transfer-bandwidth" default:"64" placeholder:"GB/S" help:"How fast a computed prompt goes from one mock worker to another, GB (10^9 bytes) a second."`
	MockKVBytesPerToken     int                      `group:"Mock workers, with --engine mocker" name:"mock-kv-bytes-per-token" default:"131072" help:"KV cache of one prompt token, bytes. Default: a Llama 8B's in 16 bits (2 * 32 layers * 8 heads * 128 * 2)."`
	MockDisaggKind          string                   `group:"Mock workers, with --engine mocker" default:"" enum:",nixl,sglang" help:"With --prefill-workers, the protocol of mock workers: nixl (vLLM's, the default) or sglang (the default with --mock-api sglang)."`
	MockKVLease             time.Duration            `group:"Mock workers, with --engine mocker" name:"mock-kv-lease" default:"30s" help:"How long a prefill mock worker keeps a prompt's blocks that no decode worker asks for (vLLM's kv_lease_duration)."`
	MockKVLoadFailure       string                   `group:"Mock workers, with --engine mocker" name:"mock-kv-load-failure" default:"recompute" enum:"recompute,fail" help:"What a decode mock worker does with a request whose prompt does not come (vLLM's kv_load_failure_policy)."`
	MockBootstrapTimeout    time.Duration            `group:"Mock workers, with --engine mocker" default:"5m" help:"How long SGLang mock workers wait for each other."`
	MockShutdownTimeout     time.Duration            `group:"Mock workers, with --engine mocker" default:"0s" help:"How long a mock worker that is told to end, and takes no new connection any more, may finish what it answers; 0: it ends at once."`
	MockBufferSteps         int                      `group:"Mock workers, with --engine mocker" default:"10000" help:"Batches of KV events that a mock worker can replay (vLLM's buffer_steps)."`
	MockArrayEvents         bool                     `group:"Mock workers, with --engine mocker" help:"Send KV events as arrays, as vLLM did up to 0.23, not as maps."`
	MockErrorRate           float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of the requests, 0 to 1, that a mock worker answers with status 500."`
	MockCrashEvery          time.Duration            `group:"Mock workers, with --engine mocker" default:"0s" help:"Fault: so often a mock worker, each in its turn, dies as if it were killed; 0 is never."`
	MockHangWorker          map[uint64]time.Duration `group:"Mock workers, with --engine mocker" mapsep:"," placeholder:"ID=AFTER" help:"Fault: mock worker ID stops to compute and to answer (its ports stay open) that long after each of its starts. Several are separated by commas."`
	MockSlowWorker          map[uint64]float64       `group:"Mock workers, with --engine mocker" mapsep:"," placeholder:"ID=FACTOR" help:"Fault: mock worker ID takes FACTOR times as long for every step. Several are separated by commas."`
	MockDropEvents          float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of the KV-event batches, 0 to 1, that are not sent; their replay has them."`
	MockDuplicateEvents     float64                  `group:"Mock workers, with --engine mocker" default:"0" help:"Fault: share of the KV-event batches, 0 to 1, that are sent twice."`
	MockDelayEvents         time.Duration            `group:"Mock workers, with --engine mocker" default:"0s" help:"Fault: each KV-event batch is sent so much later."`

	// What no flag of the mocker says, set by who starts one.
	ServedModelName string        `kong:"-"`
	BlockSize       int           `kong:"-"` // tokens
	Seed            uint64        `kong:"-"`
	KVEvents        bool          `kong:"-"` // they are published
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
	copy(settings.Timing.Prefill[:], c.MockPrefillMS)
	copy(settings.Timing.Decode[:], c.MockDecodeMS)
	settings.Timing.Speedup = c.SpeedupRatio
	return settings
}

// Handover returns the speed at which prompts go from one mock worker to another.
func (c *Settings) Handover() engine.Handover {
	return engine.Handover{Bandwidth: c.MockKVTransferBandwidth, BytesPerToken: c.MockKVBytesPerToken}
}

// Validate checks the settings for that many workers.
func (c *Settings) Validate(workers int) error {
	for flag, value := range map[string]int{
		"--mock-num-gpu-blocks": c.MockNumGPUBlocks, "--mock-max-num-seqs": c.MockMaxNumSeqs,
		"--mock-max-num-batched-tokens": c.MockMaxNumBatchedTokens, "--mock-output-tokens": c.MockOutputTokens,
		"--mock-data-parallel-size": c.MockDataParallelSize, "--mock-buffer-steps": c.MockBufferSteps,
	} {
		if value < 1 {
			return fmt.Errorf("%s %d: give at least 1", flag, value)
		}
	}
	for flag, share := range map[string]float64{"--mock-error-rate": c.MockErrorRate, "--mock-drop-events": c.MockDropEvents, "--mock-duplicate-events": c.MockDuplicateEvents} {
		if share < 0 || share > 1 {
			return fmt.Errorf("%s %v: give a share from 0 to 1", flag, share)
		}
	}
	if c.Engine() == kv.EngineSGLang && c.MockDisaggKind == kv.KindNIXL.String() {
		return errors.New("--mock-disagg-kind nixl with --mock-api sglang: SGLang's workers have a protocol of their own; leave --mock-disagg-kind out")
	}
	if c.Engine() == kv.EngineSGLang && c.MockArrayEvents {
		return errors.New("--mock-array-events with --mock-api sglang: only vLLM has sent its events as arrays; leave one of the two out")
	}
	if c.MockKVLease <= 0 || c.MockBootstrapTimeout <= 0 {
		return errors.New("--mock-kv-lease and --mock-bootstrap-timeout must be more than 0")
	}
	if c.SpeedupRatio < 0 || c.MockCrashEvery < 0 || c.MockDelayEvents < 0 || c.MockShutdownTimeout < 0 {
		return errors.New("--speedup-ratio, --mock-crash-every, --mock-delay-events and --mock-shutdown-timeout cannot be negative")
	}
	if !(c.MockKVTransferBandwidth > 0) || c.MockKVBytesPerToken < 0 {
		return fmt.Errorf("--mock-kv-transfer-bandwidth %v and --mock-kv-bytes-per-token %d: give a bandwidth of more than 0, and no negative size", c.MockKVTransferBandwidth, c.MockKVBytesPerToken)
	}
	if len(c.MockPrefillMS) != 3 || len(c.MockDecodeMS) != 3 {
		return errors.New("--mock-prefill-ms and --mock-decode-ms take three numbers, separated by commas")
	}
	for i, name := range c.MockLora {
		if name == "" || slices.Contains(c.MockLora[:i], name) {
			return fmt.Errorf("--mock-lora %s: give each adapter once and by a name", strings.Join(c.MockLora, ","))
		}
	}
	for id := range c.MockHangWorker {
		if id >= uint64(workers) {
			return fmt.Errorf("--mock-hang-worker %d=...: there are workers 0 to %d", id, workers-1)
		}
	}
	for id, factor := range c.MockSlowWorker {
		if id >= uint64(workers) || factor <= 0 {
			return fmt.Errorf("--mock-slow-worker %d=%v: there are workers 0 to %d, and the factor must be more than 0", id, factor, workers-1)
		}
	}
	return nil
}
