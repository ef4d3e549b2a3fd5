package workers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	prommodel "github.com/prometheus/common/model"

	"kvrouter/internal/guard"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
	"kvrouter/internal/zmq"
)

const (
	// loadPollInterval is how often a worker without a load socket is asked for
	// its /metrics.
	loadPollInterval = time.Second
	// loadRestInterval is the same of a worker that showed no request when it was asked
	// restAfter times in a row. Hundreds of workers at rest would cost much of a core;
	// what this router sends there it knows by itself. It is below the time for which
	// connections to workers are kept (4 s).
	loadRestInterval = 3 * time.Second
	restAfter        = 5
	// loadRetry is the pause after a failure of either source.
	loadRetry = 500 * time.Millisecond
	// loadLeast is the least time between two reports of a load socket that
	// count: each takes the router's lock.
	loadLeast = 5 * time.Millisecond
	// maxLoadMessage bounds the bytes of a load message; the plugin's has about
	// 100.
	maxLoadMessage = 64 << 10
)

// loadSource says where the load of ranks of one worker is to be had.
type loadSource struct {
	ranks  []kv.WorkerKey
	socket string   // ZMQ PUB, of the plugin's JSON or of SGLang's LoadStat, of the only rank; empty: none
	page   string   // URL of a Prometheus page that shows all ranks; beside a socket: for as long as that fails
	loads  string   // URL of an SGLang server's list of loads, where the page does not show them; empty: none
	apart  bool     // the page shows each rank as an engine of that number; else the whole page is the rank's
	heard  *hearing // is told of each message of the socket; nil: nobody is
}

// where names the source for people.
func (s loadSource) where() string {
	if s.socket != "" {
		return s.socket
	}
	return s.page
}

// loadReader reads what workers say of their load.
type loadReader struct {
	client *http.Client // asks for pages
	edges  *guard.Edges // counts the panics of what parses
	log    *slog.Logger
}

// follow reports the load of a source's ranks to publish until ctx is done: every
// message of the socket where there is one, else the page once a second. It
// reconnects for ever.
func (l loadReader) follow(ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published)) {
	source := l.poll
	if s.socket != "" {
		source = l.readSocket
	}
	for failures := 0; ctx.Err() == nil; failures++ {
		err := l.edges.Do(guard.WorkerLoad, l.log, func() error {
			return source(ctx, s, func(w kv.WorkerKey, p policy.Published) {
				failures = 0
				publish(w, p)
			})
		})
		if ctx.Err() != nil {
			return
		}
		if s.socket != "" && s.page != "" {
			_, _ = l.askPages(ctx, s, publish)
		}
		if failures == 10 { // a worker that is starting is silent for a while
			l.log.Warn("no load from worker", "worker", s.ranks[0].Worker, "rank", s.ranks[0].Rank, "from", s.where(), "error", err)
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
	usage := m.KVUsage
	if usage == nil {
		usage = m.GPUUsage
	}
	if m.Waiting == nil || usage == nil {
		return policy.Published{}, errors.New("load message lacks num_waiting_reqs or kv_cache_usage")
	}
	return published(float64(m.Running), float64(*m.Waiting), *usage), nil
}

// published is a load of these gauges.
func published(running, waiting, usage float64) policy.Published {
	return policy.Published{Running: int(gauge(running, kv.MaxTokens)), Waiting: int(gauge(waiting, kv.MaxTokens)), KVUsage: gauge(usage, 1), At: time.Now()}
}

// gauge is a worker's gauge as far as it can be: 0 to most. What is no number counts
// as the most: it must not draw requests, as an unknown load would.
func gauge(value, most float64) float64 {
	if math.IsNaN(value) {
		return most
	}
	return min(max(value, 0), most)
}

// readLoad reads a load message: the plugin's JSON, or SGLang's.
func readLoad(text []byte) (policy.Published, error) {
	if isLoadStat(text) {
		return readLoadStat(text)
	}
	var load loadMessage
	if err := json.Unmarshal(text, &load); err != nil {
		return policy.Published{}, fmt.Errorf("load message: %w", err)
	}
	return load.published()
}

// readSocket passes on what the socket publishes until it fails or ctx is done. Of
// messages that come faster than loadLeast the last one counts.
func (l loadReader) readSocket(ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published)) error {
	conn, err := zmq.DialSub(ctx, s.socket, "")
	if err != nil {
		return err
	}
	defer conn.Close()
	conn.Limit(maxLoadMessage)
	var last []byte // message that has not been passed on; empty: none
	for next := (time.Time{}); ; {
		var until time.Time
		if len(last) > 0 {
			until = next
		}
		ready, err := conn.Wait(until)
		if err != nil {
			return err
		}
		if ready {
			frames, err := conn.Recv()
			if err != nil {
				return err
			}
			last = append(last[:0], frames[len(frames)-1]...)
		}
		now := time.Now()
		if ready && s.heard != nil {
			s.heard.note(s.ranks[0], now)
		}
		if now.Before(next) {
			continue
		}
		p, err := readLoad(last)
		if err != nil {
			return fmt.Errorf("%s: %w", s.socket, err)
		}
		publish(s.ranks[0], p)
		last, next = last[:0], now.Add(loadLeast)
	}
}

// poll asks a worker's pages again and again, once for all ranks: less often while it
// is at rest.
func (l loadReader) poll(ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published)) error {
	ticker := time.NewTicker(loadPollInterval)
	defer ticker.Stop()
	idle := 0 // times in a row that it showed no request
	for told := false; ; {
		idle++
		lags, err := l.askPages(ctx, s, func(w kv.WorkerKey, p policy.Published) {
			if p.Running+p.Waiting > 0 {
				idle = 0
			}
			publish(w, p)
		})
		if err != nil {
			return err
		}
		switch idle {
		case 0:
			ticker.Reset(loadPollInterval)
		case restAfter:
			ticker.Reset(loadRestInterval)
		}
		if lags && !told {
			told = true
			l.loadsLag(s)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-ticker.C:
		}
	}
}

// askPages asks a worker for its Prometheus page or, where that is not there or shows no
// load, for its list of loads, which lags.
func (l loadReader) askPages(ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published)) (lags bool, err error) {
	err = l.askPage(ctx, s, publish)
	if err == nil || s.loads == "" || ctx.Err() != nil {
		return false, err
	}
	if failure := l.askLoads(ctx, s, publish); failure != nil {
		return false, errors.Join(err, failure)
	}
	return true, nil
}

// askPage asks a worker for its Prometheus page.
func (l loadReader) askPage(ctx context.Context, s loadSource, publish func(kv.WorkerKey, policy.Published)) error {
	families, err := l.fetch(ctx, s.page, loadNames)
	if err != nil {
		return err
	}
	told := 0
	for _, rank := range s.ranks {
		p, failure := loadOf(families, s.engine(rank))
		if failure != nil {
			err = failure
			continue
		}
		publish(rank, p)
		told++
	}
	if told == 0 {
		return fmt.Errorf("%s: %w", s.page, err)
	}
	return nil
}

// engine is the number under which pages show a rank; empty: they show no others.
func (s loadSource) engine(rank kv.WorkerKey) string {
	if !s.apart {
		return ""
	}
	return strconv.FormatUint(uint64(rank.Rank), 10)
}

// vllmLoadNames are vLLM's metrics that a load is read out of; the last is its older
// name for the usage.
var vllmLoadNames = [...]string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}

// GetMetrics reads a worker's load from its Prometheus page at url, which client
// asks for.
func GetMetrics(ctx context.Context, client *http.Client, url string) (policy.Published, error) {
	families, err := loadReader{client: client}.fetch(ctx, url, loadNames)
	if err != nil {
		return policy.Published{}, err
	}
	return loadOf(families, "")
}

// loadOf reads an engine's load out of the metrics of loadNames. Without an engine's
// number counts are summed over engines, and the usage is the fullest engine's.
func loadOf(families metricFamilies, engine string) (policy.Published, error) {
	if families[sglangRunning] != nil {
		return sglangLoadOf(families, engine)
	}
	running, waiting, usage := 0.0, 0.0, 0.0
	for _, of := range []struct {
		names []string
		add   func(value float64)
	}{
		{vllmLoadNames[:1], func(v float64) { running += gauge(v, kv.MaxTokens) }},
		{vllmLoadNames[1:2], func(v float64) { waiting += gauge(v, kv.MaxTokens) }},
		{vllmLoadNames[2:], func(v float64) { usage = max(usage, gauge(v, 1)) }},
	} {
		at := slices.IndexFunc(of.names, func(name string) bool { return families[name] != nil })
		if at < 0 {
			return policy.Published{}, fmt.Errorf("metrics page lacks %s", strings.Join(of.names, " or "))
		}
		for _, metric := range families[of.names[at]].Metric {
			if engine != "" && slices.ContainsFunc(metric.Label, func(l *dto.LabelPair) bool { return l.GetName() == "engine" && l.GetValue() != engine }) {
				continue
			}
			of.add(metric.GetGauge().GetValue())
		}
	}
	return published(running, waiting, usage), nil
}

// cacheSizes tells how many tokens the KV cache of each data-parallel rank holds.
type cacheSizes map[uint32]int

// cacheSizes asks a worker's Prometheus page at url for the sizes of its engines' KV
// caches; engines that name none are left out.
func (l loadReader) cacheSizes(ctx context.Context, url string) (cacheSizes, error) {
	families, err := l.fetch(ctx, url, []string{cacheName})
	if err != nil {
		return nil, err
	}
	return cacheSizesOf(families), nil
}

func cacheSizesOf(families metricFamilies) cacheSizes {
	sizes := cacheSizes{}
	for _, metric := range families[cacheName].GetMetric() {
		labels := map[string]uint64{}
		for _, label := range metric.Label {
			if n, err := strconv.ParseUint(label.GetValue(), 10, 31); err == nil {
				labels[label.GetName()] = n
			}
		}
		// vLLM keeps one block for itself.
		if blocks := labels["num_gpu_blocks"]; blocks > 1 && labels["block_size"] > 0 {
			sizes[uint32(labels["engine"])] = int(min((blocks-1)*labels["block_size"], kv.MaxTokens))
		}
	}
	return sizes
}

// blockSizeOf returns the tokens in a block of an engine's KV cache; 0: it is not told.
func blockSizeOf(families metricFamilies) int {
	for _, metric := range families[cacheName].GetMetric() {
		for _, label := range metric.Label {
			if n, err := strconv.ParseUint(label.GetValue(), 10, 31); err == nil && label.GetName() == "block_size" && n <= maxBlockSize {
				return int(n)
			}
		}
	}
	return 0
}

// fetch asks for a Prometheus page and reads those of its metrics that have one of
// the names.
func (l loadReader) fetch(ctx context.Context, url string, names []string) (metricFamilies, error) {
	ctx, cancel := context.WithTimeout(ctx, pageLimit)
	defer cancel()
	body, err := l.open(ctx, url)
	if err != nil {
		return nil, err
	}
	defer func() { _ = body.Close() }()
	families, err := l.parse(io.LimitReader(body, maxMetricsBytes), names)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	return families, nil
}

// open asks for a page; its reader must be closed.
func (l loadReader) open(ctx context.Context, url string) (io.ReadCloser, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := l.client.Do(request)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		_ = response.Body.Close()
		return nil, &statusError{url, response.StatusCode}
	}
	return response.Body, nil
}

// parse reads the metrics of these names out of a Prometheus page.
func (l loadReader) parse(page io.Reader, names []string) (families metricFamilies, err error) {
	text, err := linesOf(page, names)
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	// The library panics at some pages, such as "{}".
	err = l.edges.Do(guard.WorkerMetrics, l.log, func() (err error) {
		parser := expfmt.NewTextParser(prommodel.UTF8Validation)
		families, err = parser.TextToMetricFamilies(text)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("metrics page: %w", err)
	}
	return families, nil
}
