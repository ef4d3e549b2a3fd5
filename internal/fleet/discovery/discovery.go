// Package discovery finds workers and other routers in a file, DNS or Kubernetes.
//
// Every source follows the same rules. An unreadable file, a failing name server or an
// unreachable API server leaves the workers unchanged, and is logged. No source connects
// to a worker or decides about requests.
package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
)

// Source reports the workers.
type Source interface {
	// Watch sends all workers, ordered by name, as soon as they are known and
	// whenever they change, until ctx is done; then it closes the channel. The
	// caller must receive until then. A list does not change after it was sent.
	Watch(ctx context.Context) <-chan []kv.Worker
}

// maxWorkers bounds the workers of a source.
const maxWorkers = 4096

// eventsPort is where vLLM's examples have it publish KV events.
const eventsPort = 5557

// usualPort is the default of --worker-port.
const usualPort = 8000

// Settings are the source of the workers.
type Settings struct {
	Discovery       string `group:"Discovery" placeholder:"SOURCE" help:"Service-discovery source of workers: file:workers.yaml (reloaded when it changes), dns://vllm.ns:8100 (each address of the name, with this port), dns+srv://_http._tcp.vllm.ns (addresses and ports of its SRV records), or kubernetes (Pods, by --pool or --selector). It can be combined with --worker. Without --num-workers and --engine, no worker is started."`
	Pool            string `group:"Discovery" placeholder:"NAME" help:"With kubernetes: InferencePool whose selector and target ports select the workers."`
	Selector        string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: label selector of the workers' Pods, such as app=vllm."`
	PrefillSelector string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: label selector of the prefill workers' Pods."`
	DecodeSelector  string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: label selector of the decode workers' Pods."`
	Namespace       string `group:"Discovery" placeholder:"NAME" help:"With kubernetes: namespace of the Pods and the pool. Default: the router's own, or that of the current KUBECONFIG context."`
	WorkerPort      int    `group:"Discovery" default:"8000" help:"With kubernetes: HTTP port of workers whose pool and Pod annotations name none."`
}

// Schemes of --discovery.
const (
	schemeFile = "file:"
	schemeDNS  = "dns://"
	schemeSRV  = "dns+srv://"
	kubernetes = "kubernetes"
)

// Validate checks the settings; its errors name the flag.
func (s Settings) Validate() error {
	for _, flag := range []struct{ name, value string }{
		{"--pool", s.Pool}, {"--selector", s.Selector}, {"--prefill-selector", s.PrefillSelector}, {"--decode-selector", s.DecodeSelector},
		{"--namespace", s.Namespace},
	} {
		if flag.value != "" && s.Discovery != kubernetes {
			return fmt.Errorf("%s %s: it requires --discovery kubernetes", flag.name, flag.value)
		}
	}
	if s.WorkerPort != 0 && s.WorkerPort != usualPort && s.Discovery != kubernetes {
		return fmt.Errorf("--worker-port %d: it requires --discovery kubernetes", s.WorkerPort)
	}
	path, isFile := strings.CutPrefix(s.Discovery, schemeFile)
	switch {
	case s.Discovery == "":
	case s.Discovery == kubernetes:
		return s.validateKubernetes()
	case isFile && path == "":
		return errors.New("--discovery file: the file name is missing; use file:workers.yaml")
	case isFile:
	case strings.HasPrefix(s.Discovery, schemeDNS), strings.HasPrefix(s.Discovery, schemeSRV):
		_, err := parseDNS(s.Discovery)
		return err
	default:
		return fmt.Errorf("--discovery %s: unknown source; use file:workers.yaml, dns://name:8100, dns+srv://_http._tcp.name or kubernetes",
			s.Discovery)
	}
	return nil
}

// Open returns the source that the settings name; nil: none. A file that cannot be
// used, or a cluster that cannot be found, is an error. fileRead is called after each later
// reading of the file.
func Open(s Settings, fileRead func(failed bool), log *slog.Logger) (Source, error) {
	if err := s.Validate(); err != nil {
		return nil, err
	}
	path, isFile := strings.CutPrefix(s.Discovery, schemeFile)
	switch {
	case s.Discovery == "":
		return nil, nil
	case s.Discovery == kubernetes:
		return openKubernetes(s, log)
	case isFile:
		return openFile(path, fileRead, log)
	}
	return openDNS(s.Discovery, log)
}

// File returns the file that is the source; empty: it is none.
func (s Settings) File() string {
	path, isFile := strings.CutPrefix(s.Discovery, schemeFile)
	if !isFile {
		return ""
	}
	return path
}

// idOf returns the id of the worker of that key, above those of launched and
// registered workers. It has 53 bits, so that JSON readers with floating-point
// numbers keep it.
func idOf(key string) uint64 { return xxh3.HashString(key)&(1<<52-1) | 1<<52 }

// startWatch returns the channel of a Watch, to which run sends in a goroutine. run ends with ctx,
// or when send reports that ctx has ended.
func startWatch(ctx context.Context, run func(send func([]kv.Worker) (sent bool))) <-chan []kv.Worker {
	out := make(chan []kv.Worker)
	go func() {
		defer close(out)
		run(func(list []kv.Worker) bool {
			select {
			case out <- list:
				return true
			case <-ctx.Done():
				return false
			}
		})
	}()
	return out
}

// sleep waits for d, and reports whether ctx still lives then.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// byName orders workers by name.
func byName(list []kv.Worker) []kv.Worker {
	slices.SortFunc(list, func(a, b kv.Worker) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return list
}

// trouble logs a failure of a source once when it begins and once when it is over.
type trouble struct {
	log  *slog.Logger
	what string // the source, for messages
	now  string // logged last; empty: none
}

// is notes a failure; remedy says what happens to the workers, or what to do.
func (t *trouble) is(err error, remedy string) {
	if t.now == err.Error() {
		return
	}
	t.now = err.Error()
	t.log.Warn(fmt.Sprintf("%s: %v; %s", t.what, err, remedy))
}

// over notes that the source works again.
func (t *trouble) over() {
	if t.now != "" {
		t.log.Info(t.what + ": recovered")
		t.now = ""
	}
}
