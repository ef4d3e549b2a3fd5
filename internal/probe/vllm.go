package probe

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/events"
	"kvrouter/internal/kv"
	"kvrouter/internal/policy"
)

// EventFlags returns the flags of an engine that enable the KV events, and their
// replay, that the router subscribes to.
func EventFlags(engine kv.Engine) string {
	if engine == kv.EngineSGLang {
		return `--kv-events-config '{"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757"}' --load-publish-endpoint tcp://*:5657`
	}
	return `--kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5757"}'`
}

// rankEvents is what vLLM reports about the KV events of one rank.
type rankEvents struct {
	Enable   bool   `json:"enable_kv_cache_events"`
	Kind     string `json:"publisher"`
	Endpoint string `json:"endpoint"`
	Replay   string `json:"replay_endpoint"`
	Topic    string `json:"topic"`
	bufferSteps
}

// bufferSteps is the number of batches that a replay keeps, as an engine reports it.
type bufferSteps struct {
	Buffer json.RawMessage `json:"buffer_steps"` // a number, or any other value
}

// batches is the number; 0: unknown.
func (b bufferSteps) batches() int {
	steps, err := strconv.ParseFloat(string(b.Buffer), 64)
	if err != nil {
		return 0
	}
	return int(min(max(steps, 0), math.MaxInt32))
}

// EventSources queries the event streams of a vLLM server, in the order of their
// ranks. Endpoints of the settings replace those of the answer, and are returned
// even with an error. Having no source is not an error: not every server publishes
// events.
func (c *Client) EventSources(ctx context.Context, s Server) ([]events.Source, error) {
	var reported map[string]rankEvents
	err := c.get(ctx, s, "/kv_event_sources", answerLimit, &reported)
	if err != nil {
		reported = nil
	}
	sources := sourcesOf(reported, s)
	if n := len(sources); n > kv.MaxRanks {
		c.warnOfRanks(s, int64(n))
		sources = sources[:kv.MaxRanks]
	}
	return sources, err
}

// ParseEventSources is EventSources of an answer to /kv_event_sources; empty: the server
// has no such path.
func ParseEventSources(answer []byte, s Server) ([]events.Source, error) {
	var reported map[string]rankEvents
	if len(answer) > 0 {
		if err := json.Unmarshal(answer, &reported); err != nil {
			return nil, fmt.Errorf("/kv_event_sources: %w", err)
		}
	}
	sources := sourcesOf(reported, s)
	return sources[:min(len(sources), kv.MaxRanks)], nil
}

// InferEventSources returns the event streams of a vLLM server that has no route that
// names them: one for each rank on its metrics page, at consecutive ports from
// s.EventsPort on. If the page fails, the error comes with the stream of a single rank;
// a server without such a page has a single rank.
func (c *Client) InferEventSources(ctx context.Context, s Server) ([]events.Source, error) {
	page, err := c.page(ctx, s, []string{cacheName})
	if Rejected(err) {
		err = nil
	}
	sizes := page.cacheTokens()
	if len(sizes) == 0 {
		sizes = map[uint32]int{0: 0}
	}
	inferred := map[string]rankEvents{}
	for rank := range sizes {
		if port := uint32(s.EventsPort) + rank; rank < kv.MaxRanks && port <= math.MaxUint16 {
			inferred[fmt.Sprint(rank)] = rankEvents{Enable: true, Endpoint: fmt.Sprintf("tcp://*:%d", port)}
		}
	}
	return sourcesOf(inferred, s), err
}

// sourcesOf returns the event streams that a server reports, by its rank in decimal, and
// those of the settings.
func sourcesOf(reported map[string]rankEvents, s Server) []events.Source {
	host := HostOf(s.URL)
	byRank := map[uint32]events.Source{}
	for rank, source := range reported {
		number, err := strconv.ParseUint(rank, 10, 32)
		if err != nil || !source.Enable || source.Endpoint == "" || (source.Kind != "" && source.Kind != "zmq") {
			continue
		}
		byRank[uint32(number)] = events.Source{
			Endpoint: reachable(source.Endpoint, host), Replay: reachable(source.Replay, host), Topic: source.Topic, Buffer: source.batches(),
		}
	}
	if s.KVEvents != "" {
		first := byRank[0]
		first.Endpoint = s.KVEvents
		byRank[0] = first
	}
	if first, ok := byRank[0]; ok && s.Replay != "" {
		first.Replay = s.Replay
		byRank[0] = first
	}
	return inOrder(byRank, s.ID)
}

// inOrder returns the sources of a worker in the order of their ranks.
func inOrder(byRank map[uint32]events.Source, id uint64) (sources []events.Source) {
	for rank, source := range byRank {
		source.Worker = kv.WorkerKey{Worker: id, Rank: rank}
		sources = append(sources, source)
	}
	slices.SortFunc(sources, func(a, b events.Source) int { return a.Worker.Compare(b.Worker) })
	return sources
}

// warnOfRanks logs that a server has more ranks than are followed.
func (c *Client) warnOfRanks(s Server, ranks int64) {
	c.log.Warn(fmt.Sprintf("worker %d: reports %d data-parallel ranks: only the first %d are used", s.ID, ranks, kv.MaxRanks), "url", s.URL)
}

// reachable replaces the wildcard of an endpoint that a server binds by the host of the
// server's URL.
func reachable(endpoint, host string) string {
	address, isTCP := strings.CutPrefix(endpoint, "tcp://")
	if !isTCP {
		return endpoint
	}
	bound, port, found := cutLast(address, ":")
	if !found || !slices.Contains([]string{"*", "0.0.0.0", "[::]", "::"}, bound) {
		return endpoint
	}
	return "tcp://" + net.JoinHostPort(host, port)
}

func cutLast(s, separator string) (before, after string, found bool) {
	i := strings.LastIndex(s, separator)
	if i < 0 {
		return s, "", false
	}
	return s[:i], s[i+len(separator):], true
}

// ofRank returns the endpoint of a rank from that of rank 0: ranks have consecutive
// ports. An endpoint without a port is that of all.
func ofRank(endpoint string, rank uint32) string {
	address, port, found := cutLast(endpoint, ":")
	number, err := strconv.ParseUint(port, 10, 16)
	if rank == 0 || !found || err != nil {
		return endpoint
	}
	return fmt.Sprintf("%s:%d", address, number+uint64(rank))
}

// vllmLoadNames are vLLM's metrics of its load; the last is the older name of the usage.
var vllmLoadNames = [...]string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"}

// cacheName is the metric that has the settings of an engine's KV cache in its labels.
const cacheName = "vllm:cache_config_info"

// vllmLoad reads the load of an engine by its number or, if that is empty, of all: the
// counts are sums, and the usage is that of the fullest.
func (p Page) vllmLoad(engine string) (policy.Published, error) {
	running, waiting, usage := 0.0, 0.0, 0.0
	for _, of := range []struct {
		names []string
		add   func(value float64)
	}{
		{vllmLoadNames[:1], func(v float64) { running += gauge(v, kv.MaxTokens) }},
		{vllmLoadNames[1:2], func(v float64) { waiting += gauge(v, kv.MaxTokens) }},
		{vllmLoadNames[2:], func(v float64) { usage = max(usage, gauge(v, 1)) }},
	} {
		at := slices.IndexFunc(of.names, func(name string) bool { return p[name] != nil })
		if at < 0 {
			return policy.Published{}, fmt.Errorf("metrics page lacks %s", strings.Join(of.names, " or "))
		}
		for _, metric := range p[of.names[at]].Metric {
			if engine != "" && slices.ContainsFunc(metric.Label, func(l *dto.LabelPair) bool { return l.GetName() == "engine" && l.GetValue() != engine }) {
				continue
			}
			of.add(metric.GetGauge().GetValue())
		}
	}
	return published(running, waiting, usage), nil
}

// Caches returns the settings of the KV cache of each vLLM engine of the page, under
// vLLM's names.
func (p Page) Caches() (caches []map[string]string) {
	for _, metric := range p[cacheName].GetMetric() {
		caches = append(caches, labelsOf(metric))
	}
	return caches
}

func labelsOf(metric *dto.Metric) map[string]string {
	labels := make(map[string]string, len(metric.Label))
	for _, label := range metric.Label {
		labels[label.GetName()] = label.GetValue()
	}
	return labels
}

// cacheTokens returns the number of tokens that the KV cache of each data-parallel rank holds;
// engines of unknown size are left out.
func (p Page) cacheTokens() map[uint32]int {
	sizes := map[uint32]int{}
	for _, labels := range p.Caches() {
		number := func(label string) uint64 {
			n, err := strconv.ParseUint(labels[label], 10, 31)
			if err != nil {
				return 0
			}
			return n
		}
		// vLLM keeps one block for itself.
		if blocks := number("num_gpu_blocks"); blocks > 1 && number("block_size") > 0 {
			sizes[uint32(number("engine"))] = int(min((blocks-1)*number("block_size"), kv.MaxTokens))
		}
	}
	return sizes
}

// maxBlockSize bounds a server's reported block size, tokens: far more than
// any has.
const maxBlockSize = 1 << 16

// BlockSize queries the block size of a vLLM server's KV cache, tokens; 0: unknown.
func (c *Client) BlockSize(ctx context.Context, s Server) (int, error) {
	page, err := c.page(ctx, s, []string{cacheName})
	return page.blockSize(), err
}

// blockSize returns the tokens in a block of an engine's KV cache; 0: unknown.
func (p Page) blockSize() int {
	for _, labels := range p.Caches() {
		if n, err := strconv.ParseUint(labels["block_size"], 10, 31); err == nil && n <= maxBlockSize {
			return int(n)
		}
	}
	return 0
}
