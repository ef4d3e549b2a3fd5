package workers

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"

	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/zmq"
)

// loadPollInterval is how often a worker without a load socket is asked for
// its /metrics; loadRetry is the pause after a failure of either source.
const (
	loadPollInterval = time.Second
	loadRetry        = 500 * time.Millisecond
	maxMetricsBytes  = 16 << 20
)

// followLoad reports worker w's load to publish until ctx is done: every
// message of its load socket (ZMQ PUB of JSON, as the plugin sends) where
// zmqEndpoint names one, else its Prometheus page at metricsURL once a second.
// It reconnects for ever. Of a page that shows several engines the fragment of
// metricsURL names the one that counts; without one all do. client asks for pages.
func followLoad(ctx context.Context, client *http.Client, w kv.WorkerKey, zmqEndpoint, metricsURL string, publish func(kv.WorkerKey, policy.Published), log *slog.Logger) {
	source, where := func(ctx context.Context, url string, publish func(policy.Published)) error {
		return pollMetrics(ctx, client, url, publish)
	}, metricsURL
	if zmqEndpoint != "" {
		source, where = readLoadSocket, zmqEndpoint
	}
	for failures := 0; ctx.Err() == nil; failures++ {
		err := source(ctx, where, func(p policy.Published) {
			failures = 0
			publish(w, p)
		})
		if ctx.Err() != nil {
			return
		}
		if failures == 10 { // a worker that is starting is silent for a while
			log.Warn("no load from worker", "worker", w.Worker, "rank", w.Rank, "from", where, "error", err)
		}
		pause := time.NewTimer(loadRetry + rand.N(loadRetry))
		select {
		case <-ctx.Done():
		case <-pause.C:
		}
		pause.Stop()
	}
}

// loadMessage is the plugin's JSON. The example's older publisher calls the
// usage gpu_cache_usage.
type loadMessage struct {
	Waiting  *int     `json:"num_waiting_reqs"`
	Running  int      `json:"num_running_reqs"`
	KVUsage  *float64 `json:"kv_cache_usage"`
	GPUUsage *float64 `json:"gpu_cache_usage"`
}

func (m loadMessage) published() (policy.Published, error) {
	p := policy.Published{Running: m.Running, At: time.Now()}
	if m.Waiting == nil || (m.KVUsage == nil && m.GPUUsage == nil) {
		return p, fmt.Errorf("load message lacks num_waiting_reqs or kv_cache_usage")
	}
	p.Waiting = *m.Waiting
	if m.KVUsage != nil {
		p.KVUsage = *m.KVUsage
	} else {
		p.KVUsage = *m.GPUUsage
	}
	return p, nil
}

// readLoadSocket passes on what the socket publishes until it fails or ctx is
// done.
func readLoadSocket(ctx context.Context, endpoint string, publish func(policy.Published)) error {
	conn, err := zmq.DialSub(ctx, endpoint, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		frames, err := conn.Recv()
		if err != nil {
			return err
		}
		var load loadMessage
		if err := json.Unmarshal(frames[len(frames)-1], &load); err != nil {
			return fmt.Errorf("load message from %s: %w", endpoint, err)
		}
		p, err := load.published()
		if err != nil {
			return fmt.Errorf("%s: %w", endpoint, err)
		}
		publish(p)
	}
}

// pollMetrics asks a worker's Prometheus page again and again.
func pollMetrics(ctx context.Context, client *http.Client, url string, publish func(policy.Published)) error {
	ticker := time.NewTicker(loadPollInterval)
	defer ticker.Stop()
	for {
		p, err := GetMetrics(ctx, client, url)
		if err != nil {
			return err
		}
		publish(p)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// GetMetrics reads a worker's load from its Prometheus page at url, which client
// asks for.
func GetMetrics(ctx context.Context, client *http.Client, url string) (policy.Published, error) {
	_, engine, _ := strings.Cut(url, "#")
	return readMetrics(ctx, client, url, func(page io.Reader) (policy.Published, error) { return parseMetrics(page, engine) })
}

// readMetrics fetches a Prometheus page and reads it with parse.
func readMetrics[T any](ctx context.Context, client *http.Client, url string, parse func(io.Reader) (T, error)) (T, error) {
	var none T
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return none, err
	}
	response, err := client.Do(request)
	if err != nil {
		return none, err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return none, fmt.Errorf("%s answered %s", url, response.Status)
	}
	return parse(io.LimitReader(response.Body, maxMetricsBytes))
}

// parseMetrics reads the engine's load out of a Prometheus page in vLLM's names
// (its older one for the KV usage too). Without an engine's number counts are
// summed over engines, and the usage is the fullest engine's.
func parseMetrics(page io.Reader, engine string) (policy.Published, error) {
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(page)
	if err != nil {
		return policy.Published{}, fmt.Errorf("metrics page: %w", err)
	}
	running, ok := gauges(families, engine, "vllm:num_requests_running")
	waiting, ok2 := gauges(families, engine, "vllm:num_requests_waiting")
	usage, ok3 := gauges(families, engine, "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
	if !ok || !ok2 || !ok3 {
		return policy.Published{}, fmt.Errorf("metrics page lacks vllm:num_requests_running, vllm:num_requests_waiting or vllm:kv_cache_usage_perc")
	}
	p := policy.Published{At: time.Now()}
	for _, v := range running {
		p.Running += int(v)
	}
	for _, v := range waiting {
		p.Waiting += int(v)
	}
	for _, v := range usage {
		p.KVUsage = max(p.KVUsage, v)
	}
	return p, nil
}

// cacheSizes tells how many tokens the KV cache of each data-parallel rank holds.
type cacheSizes map[uint32]int

// parseCacheSizes reads the sizes of the engines' KV caches out of a Prometheus
// page in vLLM's names; engines that name none are left out.
func parseCacheSizes(page io.Reader) (cacheSizes, error) {
	parser := expfmt.NewTextParser(prommodel.UTF8Validation)
	families, err := parser.TextToMetricFamilies(page)
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	sizes := cacheSizes{}
	for _, metric := range families["vllm:cache_config_info"].GetMetric() {
		labels := map[string]uint64{}
		for _, label := range metric.Label {
			if n, err := strconv.ParseUint(label.GetValue(), 10, 31); err == nil {
				labels[label.GetName()] = n
			}
		}
		// vLLM keeps one block for itself.
		if blocks := labels["num_gpu_blocks"]; blocks > 1 && labels["block_size"] > 0 {
			sizes[uint32(labels["engine"])] = int((blocks - 1) * labels["block_size"])
		}
	}
	return sizes, nil
}

// gauges returns the values of the first of names that the page has, for one
// engine or, if empty, for all.
func gauges(families map[string]*dto.MetricFamily, engine string, names ...string) ([]float64, bool) {
	for _, name := range names {
		family := families[name]
		if family == nil {
			continue
		}
		var values []float64
		for _, metric := range family.Metric {
			other := slices.ContainsFunc(metric.Label, func(l *dto.LabelPair) bool { return l.GetName() == "engine" && l.GetValue() != engine })
			if engine == "" || !other {
				values = append(values, metric.GetGauge().GetValue())
			}
		}
		return values, true
	}
	return nil, false
}
