package workers

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"time"

	"kvrouter/internal/kv"
)

// Flags say which workers run already, how the router shows itself to workers, and
// how started ones are looked after.
type Flags struct {
	Worker            []Attached    `group:"Workers" sep:";" placeholder:"url=URL,..." help:"Attach a worker that runs already: url=http://host:8100[,id=3][,kv-events=tcp://host:5557][,replay=tcp://host:5757][,load=tcp://host:5657][,key-env=NAME][,role=prefill|decode|both][,kind=nixl|sglang|mooncake][,bootstrap=host:8998]. Repeatable. Only url is needed: the worker itself names the rest, where it can: vLLM its event endpoints, SGLang those of events and load, its ranks and its part."`
	WorkerAPIKeyEnv   string        `group:"Workers" name:"worker-api-key-env" placeholder:"NAME" help:"Environment variable with the bearer key that started and attached workers ask for. It replaces the client's own on every request. Default: VLLM_API_KEY (not with --engine sglang), which replaces the client's only where the router asks for keys itself."`
	WorkerCA          string        `group:"Workers" name:"worker-ca" placeholder:"FILE" help:"PEM file of the authorities whose certificates workers with https:// show. Default: the system's."`
	StartupTimeout    time.Duration `group:"Workers" default:"10m" help:"Longest time for a started worker to become ready."`
	RestartBackoffMax time.Duration `group:"Workers" default:"30s" help:"Longest pause before a dead worker is started again; the first is 1s, each next one double."`

	WorkerKey kv.Secret   `kong:"-"` // of WorkerAPIKeyEnv; set by Resolve
	WorkerTLS *tls.Config `kong:"-"` // of WorkerCA; nil: the system's roots. Set by Resolve
}

// Resolve reads the keys that the flags name out of the environment, and the file
// of authorities. An error names the flag.
func (f *Flags) Resolve(getenv func(string) string) error {
	if name := f.WorkerAPIKeyEnv; name != "" {
		if f.WorkerKey = kv.Secret(getenv(name)); f.WorkerKey == "" {
			return fmt.Errorf("--worker-api-key-env %s: the environment has no such variable, or an empty one; set it to the workers' key", name)
		}
	}
	for i := range f.Worker {
		w := &f.Worker[i]
		if w.KeyEnv == "" {
			continue
		}
		if w.Key = kv.Secret(getenv(w.KeyEnv)); w.Key == "" {
			return fmt.Errorf("--worker url=%s,key-env=%s: the environment has no such variable, or an empty one; set it to the worker's key", w.URL, w.KeyEnv)
		}
	}
	if f.WorkerCA == "" {
		return nil
	}
	pem, err := os.ReadFile(f.WorkerCA)
	if err != nil {
		return fmt.Errorf("--worker-ca: %w; give a PEM file of certificates", err)
	}
	authorities := x509.NewCertPool()
	if !authorities.AppendCertsFromPEM(pem) {
		return fmt.Errorf("--worker-ca %s: no certificate in it; give a PEM file (-----BEGIN CERTIFICATE-----)", f.WorkerCA)
	}
	f.WorkerTLS = &tls.Config{RootCAs: authorities, MinVersion: tls.VersionTLS12}
	return nil
}
