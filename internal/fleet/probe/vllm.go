package probe

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"

	dto "github.com/prometheus/client_model/go"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
)

// EventFlags returns the flags of an engine that enable the KV events, and their
// replay, that the router subscribes to. The usual ports are shifted by so many.
func EventFlags(engine kv.Engine, shift int) string {
	sockets := fmt.Sprintf(`"publisher":"zmq","topic":"kv-events","endpoint":"tcp://*:%d","replay_endpoint":"tcp://*:%d"}'`, 5557+shift, 5757+shift)
	if engine == kv.EngineSGLang {
		return fmt.Sprintf("--kv-events-config '{%s --load-publish-endpoint tcp://*:%d", sockets, 5657+shift)
	}
	return `--kv-events-config '{"enable_kv_cache_events":true,` + sockets
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
// names them: one for each rank on its metrics page, at the port s.EventsPort plus the
// rank. With several ranks, the ports of s.KVEvents and s.Replay count likewise. If the
// page fails, the error comes with the stream of a single rank; a server without such a
// page has a single rank.
func (c *Client) InferEventSources(ctx context.Context, s Server) ([]events.Source, error) {
	page, err := c.page(ctx, s, []string{cacheName})
	if Rejected(err) {
		err = nil
	}
	engines := page.engines()
	if len(engines) == 0 {
		engines[0] = nil
	}
	base, replay := fmt.Sprintf("tcp://*:%d", s.EventsPort), ""
	if s.KVEvents != "" && len(engines) > 1 {
		base, replay = s.KVEvents, s.Replay
		s.KVEvents, s.Replay = "", ""
	}
	inferred := map[string]rankEvents{}
	for rank := range engines {
		if rank < kv.MaxRanks {
			inferred[fmt.Sprint(rank)] = rankEvents{Enable: true, Endpoint: ofRank(base, rank), Replay: ofRank(replay, rank)}
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
	rank := firstRank(byRank)
	first, known := byRank[rank]
	if s.KVEvents != "" {
		first.Endpoint, known = s.KVEvents, true
	}
	if s.Replay != "" {
		first.Replay = s.Replay
	}
	if known {
		byRank[rank] = first
	}
	return inOrder(byRank, s.ID)
}

// firstRank returns the least rank, 0 if there is none. That of a server with some of the
// ranks of a deployment (--data-parallel-hybrid-lb, --data-parallel-rank) is not 0: vLLM
// numbers event sources, their ports and the engines on its metrics page by the rank in
// the deployment.
func firstRank(byRank map[uint32]events.Source) uint32 {
	ranks := slices.Sorted(maps.Keys(byRank))
	if len(ranks) == 0 {
		return 0
	}
	return ranks[0]
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
// ports. An endpoint without a port is that of all. It is empty if there is no such port.
func ofRank(endpoint string, rank uint32) string {
	address, port, found := cutLast(endpoint, ":")
	number, err := strconv.ParseUint(port, 10, 16)
	if rank == 0 || !found || err != nil {
		return endpoint
	}
	if number += uint64(rank); number > math.MaxUint16 {
		return ""
	}
	return fmt.Sprintf("%s:%d", address, number)
}

// vllmLoadNames are vLLM's metrics of its load; the last is the older name of the usage.
var vllmLoadNames = [...]string{"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
	"vllm:gpu_cache_usage_perc"}

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
			if engine != "" && slices.ContainsFunc(metric.Label,
				func(l *dto.LabelPair) bool { return l.GetName() == "engine" && l.GetValue() != engine }) {
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

// engines returns the settings of the KV cache of each data-parallel rank of the server.
func (p Page) engines() map[uint32]map[string]string {
	engines := map[uint32]map[string]string{}
	for _, labels := range p.Caches() {
		engines[uint32(labelNumber(labels, "engine"))] = labels
	}
	return engines
}

// labelNumber reads a label that is a number; 0: it is not one, or too great.
func labelNumber(labels map[string]string, label string) int {
	n, err := strconv.ParseUint(labels[label], 10, 31)
	if err != nil {
		return 0
	}
	return int(n)
}

// cacheTokens returns the number of tokens that the KV cache of each data-parallel rank holds;
// engines of unknown size are left out.
//
// vLLM shows each engine the sum of the blocks of all engines of the server
// (_apply_ready_response in vllm/v1/engine/core_client.py).
func (p Page) cacheTokens() map[uint32]int {
	sizes, engines := map[uint32]int{}, p.engines()
	for rank, labels := range engines {
		block := BlockOf(labels)
		// vLLM keeps one block for itself.
		if blocks := labelNumber(labels, "num_gpu_blocks") / len(engines); blocks > 1 && block > 0 {
			sizes[rank] = min((blocks-1)*block, kv.MaxTokens)
		}
	}
	return sizes
}

// retention returns vLLM's --prefix-cache-retention-interval, tokens; 0: unknown or none.
func (p Page) retention() int {
	for _, labels := range p.Caches() {
		if n := labelNumber(labels, "prefix_cache_retention_interval"); n > 0 {
			return n
		}
	}
	return 0
}

// maxBlockSize bounds a server's reported block size, tokens: far more than
// any has.
const maxBlockSize = 1 << 16

// blockSize returns the tokens in a block of an engine's KV cache; 0: unknown.
func (p Page) blockSize() int {
	for _, labels := range p.Caches() {
		if n := BlockOf(labels); n > 0 && n <= maxBlockSize {
			return n
		}
	}
	return 0
}

// BlockOf returns the tokens in a block of full attention of a KV cache with these settings;
// 0: unknown. With decode context parallelism they are those of all ranks of a group
// together (--block-size times --decode-context-parallel-size), as in the KV events;
// vLLM before 0.32 shows those of one.
func BlockOf(cache map[string]string) int {
	return max(labelNumber(cache, "block_size"), labelNumber(cache, "effective_attention_block_size"))
}

// FindsParts reports whether an engine with these settings of its KV cache finds parts of
// blocks, which its KV events do not place (--prefix-match-unit).
func FindsParts(cache map[string]string) bool {
	unit := labelNumber(cache, "prefix_match_unit")
	return unit > 0 && unit < BlockOf(cache)
}
