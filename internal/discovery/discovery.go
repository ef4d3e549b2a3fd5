// Package discovery tells which workers there are, and which other routers: by a file, DNS
// or Kubernetes.
//
// Every source keeps to the same rules. What it does not know for sure it does not
// tell: a file that cannot be read, a name server that fails or an API server that is
// away leave the workers as they are known, and a line of the log says so. Nothing
// here connects to a worker, and nothing here decides what becomes of requests.
package discovery

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/kv"
)

// Source tells which workers there are.
type Source interface {
	// Watch sends all workers, ordered by name, as soon as they are known and whenever
	// they change, until ctx ends; then it closes the channel. The caller must receive
	// until then. No list is changed once it was sent.
	Watch(ctx context.Context) <-chan []kv.Worker
}

// maxWorkers bounds the workers that a source tells of.
const maxWorkers = 4096

// eventsPort is where vLLM's examples have it publish KV events.
const eventsPort = 5557

// usualPort is the default of --worker-port.
const usualPort = 8000

// Settings say where the workers are found.
type Settings struct {
	Discovery       string `group:"Discovery" placeholder:"SOURCE" help:"Find the workers, and follow them as they come and go: file:workers.yaml (read again when it changes), dns://vllm.ns:8100 (each address of the name, with this port), dns+srv://_http._tcp.vllm.ns (addresses and ports of its SRV records), or kubernetes (Pods, by --pool or --selector). It may stand beside --worker; with --engine none nothing is started."`
	Pool            string `group:"Discovery" placeholder:"NAME" help:"With kubernetes: the InferencePool whose selector and target ports name the workers."`
	Selector        string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: the labels of the workers' Pods, such as app=vllm."`
	PrefillSelector string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: the labels of Pods that only compute prompts."`
	DecodeSelector  string `group:"Discovery" placeholder:"LABELS" help:"With kubernetes: the labels of Pods that compute the answers."`
	Namespace       string `group:"Discovery" placeholder:"NAME" help:"With kubernetes: the namespace of the Pods and the pool. Default: the router's own, or that of the current context of KUBECONFIG."`
	WorkerPort      int    `group:"Discovery" default:"8000" help:"With kubernetes: the HTTP port of workers where neither the pool nor an annotation of the Pod names it."`
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
		{"--pool", s.Pool}, {"--selector", s.Selector}, {"--prefill-selector", s.PrefillSelector}, {"--decode-selector", s.DecodeSelector}, {"--namespace", s.Namespace},
	} {
		if flag.value != "" && s.Discovery != kubernetes {
			return fmt.Errorf("%s %s: it is for --discovery kubernetes; give that too, or leave it out", flag.name, flag.value)
		}
	}
	if s.WorkerPort != 0 && s.WorkerPort != usualPort && s.Discovery != kubernetes {
		return fmt.Errorf("--worker-port %d: it is for --discovery kubernetes; give that too, or leave it out", s.WorkerPort)
	}
	path, isFile := strings.CutPrefix(s.Discovery, schemeFile)
	switch {
	case s.Discovery == "":
	case s.Discovery == kubernetes:
		return s.validateKubernetes()
	case isFile && path == "":
		return errors.New("--discovery file: names no file; give file:workers.yaml")
	case isFile:
	case strings.HasPrefix(s.Discovery, schemeDNS), strings.HasPrefix(s.Discovery, schemeSRV):
		_, err := parseDNS(s.Discovery)
		return err
	default:
		return fmt.Errorf("--discovery %s: no such source; give file:workers.yaml, dns://name:8100, dns+srv://_http._tcp.name or kubernetes", s.Discovery)
	}
	return nil
}

// Open returns the source that the settings name; nil: none. A file that cannot be
// used, or a cluster that cannot be found, is an error.
func Open(s Settings, log *slog.Logger) (Source, error) {
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
		return openFile(path, log)
	}
	return openDNS(s.Discovery, log)
}

// idOf returns the id of the worker of that key, above those of launched and
// registered workers. It has 53 bits, so that JSON readers with floating-point
// numbers keep it.
func idOf(key string) uint64 { return xxh3.HashString(key)&(1<<52-1) | 1<<52 }

// send sends a list unless ctx ends first. It tells whether it did.
func send(ctx context.Context, to chan<- []kv.Worker, list []kv.Worker) bool {
	select {
	case to <- list:
		return true
	case <-ctx.Done():
		return false
	}
}

// byName orders workers as people look for them.
func byName(list []kv.Worker) []kv.Worker {
	slices.SortFunc(list, func(a, b kv.Worker) int { return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.ID, b.ID)) })
	return list
}

// trouble is what keeps a source from knowing, told once as it comes and once as it
// is over.
type trouble struct {
	log  *slog.Logger
	what string // the source, for people
	now  string // told last; empty: none
}

// is notes what is wrong; remedy says what becomes of the workers, or what to do.
func (t *trouble) is(err error, remedy string) {
	if t.now == err.Error() {
		return
	}
	t.now = err.Error()
	t.log.Warn(fmt.Sprintf("%s: %v; %s", t.what, err, remedy))
}

// over notes that nothing is wrong any more.
func (t *trouble) over() {
	if t.now != "" {
		t.log.Info(t.what + ": known again")
		t.now = ""
	}
}
