package extproc

import (
	"cmp"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// maxFallbacks is the maximum number of fallback addresses.
const maxFallbacks = 16

const (
	// leastKey is the minimum length of SessionTokenKey, bytes: a client can try keys on a
	// token.
	leastKey = 16
	// leastInflight is the minimum of ExtProcMaxInflightBytes, and leastDefault the minimum
	// of its default; unsetInflight is the default if the machine's memory is unknown.
	leastInflight = 16 << 20
	leastDefault  = 64 << 20
	unsetInflight = 512 << 20
)

// Settings are the flags of the endpoint picker.
type Settings struct {
	ExtProcPort             int      `group:"Gateway" default:"0" placeholder:"PORT" help:"gRPC port of the endpoint picker for gateways (Envoy's ext_proc; usually 9002). 0 disables it."`
	ExtProcHealthPort       int      `group:"Gateway" default:"0" placeholder:"PORT" help:"Plaintext port for gRPC health checks, which --ext-proc-port serves too (usually 9003). 0 disables it."`
	ExtProcHost             string   `group:"Gateway" placeholder:"HOST" help:"Listen address of both ports. Default: that of --host."`
	ExtProcTLS              bool     `group:"Gateway" name:"ext-proc-tls" help:"Serve TLS on --ext-proc-port: with --tls-cert, else with a self-signed certificate made at startup, which gateways accept from an endpoint picker."`
	ExtProcFallbacks        int      `group:"Gateway" default:"3" help:"Number of fallback addresses that a gateway gets in case it cannot reach the first. Use 0 for a gateway that accepts one address only, such as Envoy's cluster ORIGINAL_DST."`
	ExtProcObjectives       []string `group:"Gateway" placeholder:"NAME=PRIORITY" help:"Priorities of the objectives in x-llm-d-inference-objective, as in the spec of an InferenceObjective: higher ones of trusted clients leave the queue first, those below 0 are refused while kvrouter_saturation is at least 1. Several are separated by commas."`
	ExtProcMaxInflightBytes int64    `group:"Gateway" default:"0" placeholder:"BYTES" help:"Maximum memory for the headers of all in-flight requests of gateways, and for the parts of bodies that have not been passed on, bytes. Requests beyond it are answered 503. 0: an eighth of the memory of the machine or container, at least 64 MiB."`
	SessionTokenKey         string   `group:"Gateway" name:"session-token-key" placeholder:"KEY" help:"Key that signs x-session-token, at least 16 characters, the same for all routers behind a gateway. Default: derived from --cluster-key; without that random, and then tokens are valid for this process only. Prefer the environment variable or the configuration file."`
	ExtProcConformance      bool     `group:"Gateway" hidden:"" help:"Accept the headers of the Gateway API Inference Extension's conformance tests, by which a client selects endpoints, and send requests of all routes to workers. For tests only."`
}

// SetDefault sets the default that depends on the machine's memory, bytes; 0: unknown.
func (s *Settings) SetDefault(memory int64) {
	if s.ExtProcMaxInflightBytes == 0 && memory > 0 {
		s.ExtProcMaxInflightBytes = max(leastDefault, memory/8)
	}
}

// Validate checks the settings; its errors name the flag.
func (s Settings) Validate() error {
	if s.ExtProcFallbacks < 0 || s.ExtProcFallbacks > maxFallbacks {
		return fmt.Errorf("--ext-proc-fallbacks %d: give 0 to %d", s.ExtProcFallbacks, maxFallbacks)
	}
	if n := s.ExtProcMaxInflightBytes; n != 0 && n < leastInflight {
		return fmt.Errorf("--ext-proc-max-inflight-bytes %d must be 0 or at least %d", n, leastInflight)
	}
	if n := len(s.SessionTokenKey); n > 0 && n < leastKey {
		return fmt.Errorf("--session-token-key: %d characters, at least %d required", n, leastKey)
	}
	if s.ExtProcPort == 0 && (s.ExtProcHealthPort != 0 || s.ExtProcTLS || len(s.ExtProcObjectives) > 0 || s.ExtProcConformance) {
		return errors.New("--ext-proc-health-port, --ext-proc-tls, --ext-proc-objectives and --ext-proc-conformance: give --ext-proc-port, " +
			"too, such as 9002")
	}
	_, err := s.objectives()
	return err
}

// objectives returns the priority of each objective.
func (s Settings) objectives() (map[string]int, error) {
	all := make(map[string]int, len(s.ExtProcObjectives))
	for _, given := range s.ExtProcObjectives {
		name, number, found := strings.Cut(given, "=")
		priority, err := strconv.ParseInt(number, 10, 32)
		if !found || name == "" || err != nil {
			return nil, fmt.Errorf("--ext-proc-objectives %s: want NAME=PRIORITY with a whole number, such as batch=-1", given)
		}
		all[name] = int(priority)
	}
	return all, nil
}

// Streams returns about how many requests fit into the memory.
func (s Settings) Streams() int {
	return int(cmp.Or(s.ExtProcMaxInflightBytes, unsetInflight) / streamMemory)
}
