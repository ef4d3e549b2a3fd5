package workers

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// Flags are the flags of attached workers, of authentication towards workers, and
// of the supervision of started workers.
type Flags struct {
	Worker            []Attached    `group:"Workers" sep:";" placeholder:"url=URL,..." help:"Attach a running worker: url=http://host:8100[,id=3][,kv-events=tcp://host:5557][,replay=tcp://host:5757][,load=tcp://host:5657][,key-env=NAME][,role=prefill|decode|both][,kind=nixl|sglang|mooncake|router][,bootstrap=host:8998][,p2p=host:5710]. Repeatable. Only url is required; the rest is read from the worker if it reports it: event endpoints of vLLM; event and load endpoints, ranks and role of SGLang. kind=router attaches another kvrouter: see docs/cells.md."`
	WorkerURLs        []Attached    `group:"Workers" name:"worker-urls" placeholder:"URL,..." help:"URLs of running workers: the same as URLs without a flag, or --worker url=URL for each."`
	URLs              []Attached    `arg:"" optional:"" name:"URL" help:"Running workers to attach, each in a form of --worker. With any, no worker is started unless --num-workers or --engine is given."`
	WorkerAPIKeyEnv   string        `group:"Workers" name:"worker-api-key-env" placeholder:"NAME" help:"Environment variable with the bearer key of started and attached workers. It replaces the client's key on every request. Default: VLLM_API_KEY (not with --engine sglang), which replaces the client's key only if the router itself requires keys."`
	WorkerCA          string        `group:"Workers" name:"worker-ca" placeholder:"FILE" help:"PEM file of the certificate authorities of workers, and relays of --relay-cell, with https://. Default: the system's."`
	StartupTimeout    time.Duration `group:"Workers" default:"10m" help:"Maximum time for a started worker to become ready."`
	RestartBackoffMax time.Duration `group:"Workers" default:"30s" help:"Maximum delay before a failed worker is restarted. The first delay is 1s; each further one doubles."`

	WorkerKey kv.Secret   `kong:"-"` // of WorkerAPIKeyEnv; set by Resolve
	WorkerTLS *tls.Config `kong:"-"` // of WorkerCA; nil: the system's roots. Set by Resolve
}

// Join moves the workers that are given by WorkerURLs and without a flag to Worker.
func (f *Flags) Join() {
	f.Worker, f.WorkerURLs, f.URLs = slices.Concat(f.Worker, f.WorkerURLs, f.URLs), nil, nil
}

// Resolve reads the keys from the environment variables of the flags, and the file
// of certificate authorities. An error names the flag.
func (f *Flags) Resolve(getenv func(string) string) error {
	if name := f.WorkerAPIKeyEnv; name != "" {
		if f.WorkerKey = kv.Secret(getenv(name)); f.WorkerKey == "" {
			return fmt.Errorf("--worker-api-key-env %s: the environment variable is not set or empty; set it to the workers' key", name)
		}
	}
	for i := range f.Worker {
		w := &f.Worker[i]
		if w.KeyEnv == "" {
			continue
		}
		if w.Key = kv.Secret(getenv(w.KeyEnv)); w.Key == "" {
			return fmt.Errorf("--worker url=%s,key-env=%s: the environment variable is not set or empty; set it to the worker's key", w.URL,
				w.KeyEnv)
		}
	}
	if f.WorkerCA == "" {
		return nil
	}
	pem, err := os.ReadFile(f.WorkerCA)
	if err != nil {
		return fmt.Errorf("--worker-ca: %w; set it to a PEM file of certificates", err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return fmt.Errorf("--worker-ca %s: contains no certificate; set it to a PEM file (-----BEGIN CERTIFICATE-----)", f.WorkerCA)
	}
	f.WorkerTLS = &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
	return nil
}
