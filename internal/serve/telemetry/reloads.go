package telemetry

import "github.com/prometheus/client_golang/prometheus"

// Files that are read again while the router runs, as the metric names them.
const (
	FileConfig  = "config"   // of --config, with the command line and the environment
	FileKeys    = "api_keys" // of --api-keys-file
	FileTLS     = "tls"      // of --tls-cert, --tls-key and --tls-client-ca
	FileWorkers = "workers"  // of --discovery file:
)

// Reloads shows which files could not be used when they were read again. It is safe for
// concurrent use.
type Reloads struct{ failed *prometheus.GaugeVec }

// NewReloads returns Reloads of those files, all of which could be used.
func NewReloads(files ...string) *Reloads {
	r := &Reloads{prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kvrouter_config_reload_failed",
		Help: "Whether the last reading of a file was refused and the settings before it are still in use: 1 or 0. Files: config, api_keys, " +
			"tls, workers.",
	}, []string{"file"})}
	for _, file := range files {
		r.Note(file, false)
	}
	return r
}

// Note sets the result of reading one of the files.
func (r *Reloads) Note(file string, failed bool) {
	value := 0.0
	if failed {
		value = 1
	}
	r.failed.WithLabelValues(file).Set(value)
}

// Collectors returns the metrics.
func (r *Reloads) Collectors() []prometheus.Collector { return []prometheus.Collector{r.failed} }
