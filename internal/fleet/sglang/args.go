package sglang

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"kvrouter/internal/fleet/process"
)

const (
	partsApart = "--prefill-workers and --decode-workers before --"
	oneMachine = "nothing: a worker runs on this machine; start others yourself and attach them with --worker"
	plainHTTP  = "nothing: the router reaches workers by plain HTTP on loopback"
)

// reservedArgs are SGLang's flags that the router sets itself or could not follow,
// with what to use instead.
var reservedArgs = map[string]string{
	"model-path":            "--model before --",
	"served-model-name":     "--served-model-name before --",
	"host":                  "nothing: workers listen on loopback",
	"port":                  "--base-worker-port before --",
	"page-size":             "--block-size before --",
	"kv-events-config":      "--base-kv-events-port and --base-kv-replay-port before --",
	"load-publish-endpoint": "--base-metrics-port before --",
	"config":                "the settings of that file themselves after --",

	"disaggregation-mode":           partsApart,
	"disaggregation-bootstrap-port": "--base-bootstrap-port before --",
	"enable-pd-role-switch":         partsApart,
	"encoder-only":                  "nothing: the router needs workers that answer",

	"nnodes":         oneMachine,
	"node-rank":      oneMachine,
	"dist-init-addr": oneMachine,

	"grpc-mode":     plainHTTP,
	"smg-grpc-mode": plainHTTP,
	"ssl-keyfile":   plainHTTP,
	"ssl-certfile":  plainHTTP,
	"enable-http2":  plainHTTP,
}

// flags read SGLang's arguments: the other names of those that matter here, and the
// beginnings of them that everybody writes.
var flags = process.Flags{
	"--model": "model-path", "--nccl-init-addr": "dist-init-addr",
	"--tp": tensorFlag, "--tensor-parallel-size": tensorFlag,
	"--dp": ranksFlag, "--data-parallel-size": ranksFlag,
	"--attention-data-parallel-size": attentionFlag,
}

const (
	tensorFlag    = "tp-size"
	ranksFlag     = "dp-size"
	attentionFlag = "attn-dp-size" // ranks that share one model
	batchFlag     = "chunked-prefill-size"
	tokensFlag    = "max-total-tokens"
	keyFlag       = "api-key"
)

// readArgs are the flags beside reservedArgs that the router reads.
var readArgs = append([]string{tensorFlag, ranksFlag, attentionFlag, batchFlag, tokensFlag, keyFlag, "enable-dp-attention", offloadFlag},
	sizeFlags...)

// checkArgs refuses arguments for SGLang that the router sets itself or could not
// follow; its errors name the argument and what to use instead.
func checkArgs(s process.Settings) error {
	args := s.Args
	for _, arg := range args {
		name := flags.Name(arg)
		if name == "" {
			continue
		}
		if instead, reserved := reservedArgs[name]; reserved {
			return fmt.Errorf("%s after --: not supported; use %s", arg, instead)
		}
		if long := shortened(name); long != "" {
			return fmt.Errorf("%s after --: SGLang reads it as --%s; use the full name", arg, long)
		}
	}
	for _, flag := range []string{ranksFlag, attentionFlag} {
		if value, given := flags.Value(args, flag); given && flags.Number(args, flag) < 1 {
			return fmt.Errorf("--%s %s after --: must be at least 1", flag, value)
		}
	}
	apart := s.PrefillWorkers > 0
	if apart && s.OffloadGiB > 0 {
		return errors.New("--kv-offload-gib with --prefill-workers: not supported for SGLang; start such workers yourself and attach them " +
			"with --worker")
	}
	if apart && ranks(args) > 1 {
		return errors.New("--dp-size after -- with --prefill-workers: the router starts SGLang's prefill and decode workers with one rank " +
			"each; increase the number of workers")
	}
	return nil
}

// shortened returns the flag that the router sets or reads and that name is the
// beginning of, which SGLang takes for the whole; empty: none. No flag of SGLang
// has a name that another such name begins with.
func shortened(name string) string {
	for _, long := range slices.AppendSeq(slices.Clone(readArgs), maps.Keys(reservedArgs)) {
		if strings.HasPrefix(long, name) && long != name {
			return long
		}
	}
	for spelling, long := range flags {
		if strings.HasPrefix(spelling, "--"+name) {
			return long
		}
	}
	return ""
}

// ranks is the number of data-parallel ranks in a worker's arguments.
func ranks(args []string) int {
	return max(1, flags.Number(args, ranksFlag)) * max(1, flags.Number(args, attentionFlag))
}

// sharesModel reports whether the ranks share one model, split over the GPUs of them
// all, and only attention is theirs alone.
func sharesModel(args []string) bool {
	return flags.Has(args, "enable-dp-attention") || flags.Number(args, attentionFlag) > 1
}

// limits reports how many tokens a rank computes in a pass at most and the blocks of
// its KV cache, where the arguments say so.
func limits(args []string, blockSize int) (maxBatchedTokens, totalBlocks int) {
	return flags.Number(args, batchFlag), flags.Number(args, tokensFlag) / max(1, blockSize)
}

// key returns the key that started workers will require.
func key(args []string) string {
	key, _ := flags.Value(args, keyFlag)
	return key
}

// tensorSize is --tp-size by the arguments, otherwise by --gpus-per-worker.
func tensorSize(cfg process.Settings) (size string, given bool) {
	if size, given := flags.Value(cfg.Args, tensorFlag); given {
		return size, true
	}
	if sharesModel(cfg.Args) {
		return strconv.Itoa(cfg.GPUsPerWorker * cfg.Ports.Ranks), false
	}
	return strconv.Itoa(cfg.GPUsPerWorker), false
}
