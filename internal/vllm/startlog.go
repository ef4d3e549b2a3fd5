package vllm

import (
	"fmt"
	"strings"
	"sync"
)

// Stages of a worker's start, as shown to people.
const (
	StageProcess = "starting process"
	StageReady   = "ready"
)

// startStages are the later stages, in order, each with what vLLM logs when it
// begins.
var startStages = []struct {
	name  string
	signs []string
}{
	{"starting engine", []string{"Initializing a V1 LLM engine", "Resolved architecture"}},
	{"downloading weights", []string{"Time spent downloading weights", "Fetching ", "Downloading "}},
	{"loading weights", []string{"Starting to load model", "Loading safetensors", "Checkpoint size"}},
	{"allocating KV cache", []string{"Loading weights took", "Model loading took", "Available KV cache memory"}},
	{"warming up", []string{"KV cache size:", "Capturing CUDA graph"}},
	{"starting API server", []string{"Starting vLLM server on", "Starting vLLM API server"}},
}

// StartLog follows the output of a worker process: how far its start is, and
// the lines that explain an early end. It is safe for concurrent use.
type StartLog struct {
	mu     sync.Mutex // guards the rest
	stage  int        // index into startStages, -1 before the first
	ready  bool       // the start is over
	ending bool       // it has been told to end
	recent []string   // last lines that may explain an end, oldest first
}

// tailLines is how much of a dead worker's output is shown.
const tailLines = 20

// NewStartLog returns the log of a worker that is about to start.
func NewStartLog() *StartLog { return &StartLog{stage: -1} }

// Line takes in one line of output and returns the stage that begins with it,
// if one does, and whether the line is an error of a worker that is ready.
// Stages never go back: some signs come more than once.
func (s *StartLog) Line(text string) (stage string, failure bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failure = s.ready && !s.ending && strings.Contains(text, " ERROR ")
	if !failure && !isRoutine(text) {
		if len(s.recent) == tailLines {
			s.recent = s.recent[1:]
		}
		s.recent = append(s.recent, text)
	}
	for i := s.stage + 1; i < len(startStages) && !s.ready; i++ {
		for _, sign := range startStages[i].signs {
			if strings.Contains(text, sign) {
				s.stage = i
				return startStages[i].name, failure
			}
		}
	}
	return "", failure
}

// isRoutine tells lines that never explain why a process ended.
func isRoutine(text string) bool {
	for _, level := range []string{" INFO ", " WARNING ", " DEBUG "} {
		if strings.Contains(text, level) {
			return true
		}
	}
	const usage = "[--" // of the long list of flags that goes before an error about one
	return strings.HasPrefix(text, "INFO: ") || strings.Contains(text, "% Completed |") || strings.HasPrefix(strings.TrimSpace(text), usage)
}

// SetReady ends the start: what was printed so far explains no later end.
func (s *StartLog) SetReady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready, s.recent = true, nil
}

// SetEnding tells that the worker was told to end, which vLLM's API server
// reports as the death of its engine.
func (s *StartLog) SetEnding() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
}

// Tail returns the last lines that may explain an end, without the errors that
// Line has reported.
func (s *StartLog) Tail() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.recent...)
}

// failureAdvice maps what vLLM says when it cannot start to what to do. A lasting
// failure will not go away by trying again.
var failureAdvice = []struct {
	sign, advice string
	lasting      bool
}{
	{"No module named 'vllm'", "this Python has no vLLM: run `make setup`, or give --python one that has", true},
	{"error: unrecognized arguments", "vLLM does not know an argument that follows --", true},
	{"api_server.py: error: ", "vLLM refuses an argument that follows --", true},
	{"ddress already in use", "a port is taken: end what holds it or move --base-worker-port, --base-kv-events-port, --base-kv-replay-port", false},
	{"out of memory", "not enough GPU memory: a smaller --model, more --gpus-per-worker, or after -- a smaller --max-model-len", false},
	{"No available memory for the cache", "no memory is left for the KV cache: after -- give a higher --gpu-memory-utilization or a smaller --max-model-len", false},
	{"larger than the available KV cache memory", "the KV cache cannot hold one context: after -- give a smaller --max-model-len (on a CPU VLLM_CPU_KVCACHE_SPACE sets the GiB)", true},
	{"desired GPU memory utilization", "something else uses the GPU: end it, or after -- give a lower --gpu-memory-utilization", false},
	{"gated repo", "the model needs permission: accept its terms on huggingface.co and set HF_TOKEN", true},
	{"401 Client Error", "the model needs permission: accept its terms on huggingface.co and set HF_TOKEN", true},
	{"couldn't connect to", "the model could not be fetched: give --model a folder, or let the machine reach huggingface.co", false},
	{"LocalEntryNotFoundError", "the model could not be fetched: give --model a folder, or let the machine reach huggingface.co", false},
}

// EndError tells why a worker's process ended by itself and what to do.
type EndError struct {
	reason  string
	line    string // of its output, that tells; may be empty
	advice  string
	Lasting bool // trying again will not help
}

func (e *EndError) Error() string {
	if e.line == "" {
		return fmt.Sprintf("vLLM ended (%s): %s", e.reason, e.advice)
	}
	return fmt.Sprintf("vLLM ended (%s): %s [%s]", e.reason, e.advice, strings.TrimSpace(e.line))
}

// Explain finds what to do about a process that ended for a reason, with its
// last lines.
func Explain(reason string, lines []string) *EndError {
	for _, known := range failureAdvice {
		for _, line := range lines {
			if strings.Contains(line, known.sign) {
				return &EndError{reason, line, known.advice, known.lasting}
			}
		}
	}
	switch {
	case reason == "signal: killed":
		return &EndError{reason: reason, advice: "somebody killed it, or the system did for want of memory (see dmesg)"}
	case len(lines) == 0:
		return &EndError{reason: reason, advice: "--log-level debug shows all it says"}
	}
	return &EndError{reason: reason, advice: "its last lines are above; --log-level debug shows all of them"}
}
