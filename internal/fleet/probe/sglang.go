package probe

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"slices"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
)

// ServerInfo has the used fields of an SGLang server's report. Other fields,
// including its keys, are neither stored nor logged.
type ServerInfo struct {
	Version     string  `json:"version"`
	Mode        *string `json:"disaggregation_mode"` // "null", "prefill" or "decode"; never nil
	Port        uint16  `json:"disaggregation_bootstrap_port"`
	DistAddr    string  `json:"dist_init_addr"`                           // of the first node of several; may be empty
	DecodeRadix bool    `json:"disaggregation_decode_enable_radix_cache"` // a decode server keeps prompts
	NoRadix     bool    `json:"disable_radix_cache"`                      // it keeps none, in any mode

	Replicas    int64 `json:"dp_size"`
	AttnRanks   int64 `json:"attn_dp_size"`         // of a replica
	DPAttention bool  `json:"enable_dp_attention"`  // dp_size counts the ranks of attention, as in older versions
	PageSize    int64 `json:"page_size"`            // tokens
	PassTokens  int64 `json:"chunked_prefill_size"` // maximum prompt tokens of a pass; -1: no limit
	CacheTokens int64 `json:"max_total_num_tokens"` // of the KV cache of rank 0

	ModelPath string `json:"model_path"` // a name or a folder

	KeepsStates bool       `json:"uses_mamba_radix_cache"` // a prompt is usable up to the positions whose state is kept
	States      []rankInfo `json:"internal_states"`        // by rank
	Speculation string     `json:"speculative_algorithm"`  // such as EAGLE; empty: none

	CacheReport *bool `json:"enable_cache_report"` // answers say how many tokens were cached; nil: not reported

	Hierarchical bool   `json:"enable_hierarchical_cache"` // blocks are kept in host memory
	Storage      string `json:"hicache_storage_backend"`   // and behind it, such as file; empty: nowhere

	EventsConfig string      `json:"kv_events_config"` // its flag; empty: events are off
	Events       *EventsInfo `json:"kv_events"`        // nil: off, or not over TCP
}

// rankInfo has the used fields of the state of a rank.
type rankInfo struct {
	Memory struct {
		WindowTokens *float64 `json:"token_capacity_swa"` // of the cache of layers with a sliding window; nil: there is none
	} `json:"memory_usage"`
}

// EventsInfo has the endpoints of an SGLang server's KV events and load: rank r on
// port base + r.
type EventsInfo struct {
	Publisher string `json:"publisher"`
	Host      string `json:"endpoint_host"` // may be a wildcard
	Port      uint16 `json:"endpoint_port_base"`
	Topic     string `json:"topic"`
	BlockSize int64  `json:"block_size"` // tokens of the blocks of events
	Ranks     int64  `json:"dp_size"`
	Replay    uint16 `json:"replay_endpoint_port_base"` // 0: no replay
	Load      uint16 `json:"load_endpoint_port_base"`   // 0: no load
}

// ParseServerInfo reads an answer to GET /server_info; nil: it is not an SGLang server's.
// Fields of unexpected types are ignored.
func ParseServerInfo(answer []byte) *ServerInfo {
	var info ServerInfo
	var wrong *json.UnmarshalTypeError
	if err := json.Unmarshal(answer, &info); err != nil && !errors.As(err, &wrong) || info.Mode == nil {
		return nil
	}
	return &info
}

// ServerInfo queries an SGLang server's report; nil: it is not an SGLang server. An
// error means that the server does not answer, so that this is unknown.
func (c *Client) ServerInfo(ctx context.Context, s Server) (*ServerInfo, error) {
	var answer json.RawMessage
	err := c.serverInfo(ctx, s, answerLimit, &answer)
	var broken *json.SyntaxError
	switch {
	case Answered(err) && statusOf(err) < 500, errors.As(err, &broken), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, err
	}
	info := ParseServerInfo(answer)
	if info != nil && info.ranks() > kv.MaxRanks {
		c.warnOfRanks(s, info.ranks())
	}
	return info, nil
}

// CheckScheduler requests, within limit, an answer of an SGLang server to which the
// schedulers of all its ranks contribute between two passes.
func (c *Client) CheckScheduler(ctx context.Context, s Server, limit time.Duration) error {
	return c.serverInfo(ctx, s, limit, nil)
}

// serverInfo fetches what an SGLang server reports about itself, at its path or the
// older one.
func (c *Client) serverInfo(ctx context.Context, s Server, limit time.Duration, into any) error {
	err := c.get(ctx, s, "/server_info", limit, into)
	if NotFound(err) {
		err = c.get(ctx, s, "/get_server_info", limit, into)
	}
	return err
}

// Disagg returns a worker's role in disaggregated serving: that of the settings,
// completed by what an SGLang server reports; info is nil for another. A worker that has
// a role but no KV connector is a vLLM server, with Mooncake if it has a bootstrap
// server, else with NIXL.
func Disagg(s Server, info *ServerInfo) kv.Disagg {
	d := s.Disagg
	if info != nil && (d.Kind == kv.KindNone || d.Kind == kv.KindSGLang) {
		d.Kind = kv.KindSGLang
		if s.Role == kv.RoleBoth && s.Kind == kv.KindNone {
			switch *info.Mode {
			case kv.RolePrefill.String():
				d.Role = kv.RolePrefill
			case kv.RoleDecode.String():
				d.Role = kv.RoleDecode
			default: // it is not disaggregated
				d.Kind = kv.KindNone
			}
		}
		if !d.Bootstrap.Known() && d.Role != kv.RoleDecode && d.Kind == kv.KindSGLang {
			d.Bootstrap = info.bootstrap(s.URL)
		}
	}
	if d.Kind == kv.KindNone && d.Role != kv.RoleBoth {
		if d.Kind = kv.KindNIXL; d.Bootstrap.Known() {
			d.Kind = kv.KindMooncake
		}
	}
	return d
}

// bootstrap returns the address of the bootstrap server of the server at base.
func (i *ServerInfo) bootstrap(base string) kv.Bootstrap {
	b := kv.Bootstrap{Port: i.Port}
	if b.Port == 0 {
		b.Port = kv.SGLangPort
	}
	if host, _, err := net.SplitHostPort(i.DistAddr); err == nil {
		b.Host = host
	} else {
		b.Host = HostOf(base)
	}
	return b
}

// ranks is how many data-parallel ranks the server reports; at least 1, and perhaps far
// more than can be.
func (i *ServerInfo) ranks() int64 {
	replicas, attn := min(max(i.Replicas, 1), 2*kv.MaxRanks), min(max(i.AttnRanks, 1), 2*kv.MaxRanks)
	switch {
	case i.Events != nil && i.Events.Ranks > 0:
		return i.Events.Ranks
	case i.DPAttention: // the two may count the same ranks
		return max(replicas, attn)
	}
	return replicas * attn
}

// Ranks returns the number of data-parallel ranks, each with its own cache: 1 to
// kv.MaxRanks.
func (i *ServerInfo) Ranks() int { return int(min(i.ranks(), kv.MaxRanks)) }

// MaxBatchedTokens returns the maximum prompt tokens of a pass; 0: unknown.
func (i *ServerInfo) MaxBatchedTokens() int { return tokens(i.PassTokens) }

// tokens is a reported number of tokens: 0 to kv.MaxTokens.
func tokens(n int64) int { return int(min(max(n, 0), kv.MaxTokens)) }

// BlockSize returns the tokens in a block of KV events, or of the cache if there
// are none; 0: unknown.
func (i *ServerInfo) BlockSize() int {
	if i.Events != nil && i.Events.BlockSize > 0 {
		return int(min(i.Events.BlockSize, maxBlockSize))
	}
	return int(min(max(i.PageSize, 0), maxBlockSize))
}

// publishes reports whether the server names a publisher of KV events over ZMQ.
func (i *ServerInfo) publishes() bool {
	return i.Events != nil && i.Events.Port != 0 && (i.Events.Publisher == "" || i.Events.Publisher == "zmq")
}

// endpoint returns where rank 0 has a socket: on this port, at the host that the server
// reports or, if that is a wildcard, at the host of the server's URL. Empty: there is
// none.
func (i *ServerInfo) endpoint(base string, port uint16) string {
	if !i.publishes() || port == 0 {
		return ""
	}
	endpoint, err := kv.ParseEndpoint(reachable(fmt.Sprintf("tcp://%s:%d", i.Events.Host, port), HostOf(base)))
	if err != nil {
		return ""
	}
	return endpoint
}

// Sources returns the KV event endpoints of the ranks, in order. The endpoints of
// the settings are those of rank 0: ranks have consecutive ports.
func (i *ServerInfo) Sources(s Server) []events.Source {
	var first events.Source
	if i.publishes() {
		first = events.Source{Endpoint: i.endpoint(s.URL, i.Events.Port), Replay: i.endpoint(s.URL, i.Events.Replay), Topic: i.Events.Topic}
	}
	var keeps bufferSteps
	_ = json.Unmarshal([]byte(i.EventsConfig), &keeps) // else it stays unknown
	first.Buffer = keeps.batches()
	first.Endpoint, first.Replay = cmp.Or(s.KVEvents, first.Endpoint), cmp.Or(s.Replay, first.Replay)
	byRank := map[uint32]events.Source{}
	for rank := uint32(0); rank < uint32(i.Ranks()) && first.Endpoint != ""; rank++ {
		source := first
		source.Endpoint, source.Replay = ofRank(first.Endpoint, rank), ofRank(first.Replay, rank)
		if source.Endpoint != "" {
			byRank[rank] = source
		}
	}
	return inOrder(byRank, s.ID)
}

// Load returns the load endpoint of a rank; empty: none. i is nil if the server is
// not an SGLang server.
func (i *ServerInfo) Load(s Server, rank uint32) string {
	if s.Load == "" && i != nil && i.Events != nil {
		s.Load = i.endpoint(s.URL, i.Events.Load)
	}
	return ofRank(s.Load, rank)
}

// Reasons why predictions for an SGLang server are too high at times: its KV events
// report blocks of full attention only (mem_cache/unified_cache/unified_tree_core.py).
const (
	unknownWindows = "the KV events of SGLang do not report which blocks sliding-window layers still have"
	unknownStates  = "the KV events of SGLang do not report up to where a prompt's state is cached"
)

// unknownStorage is why predictions for an SGLang server are too low at times.
const unknownStorage = "lower bound: SGLang publishes no KV events of its storage"

// Predictions describes predictions for the server; empty: they are exact.
func (i *ServerInfo) Predictions() string {
	const upper = "upper bound: "
	windows := slices.ContainsFunc(i.States, func(r rankInfo) bool { return r.Memory.WindowTokens != nil })
	switch {
	case windows && i.KeepsStates:
		return upper + unknownWindows + "; " + unknownStates
	case windows:
		return upper + unknownWindows
	case i.KeepsStates:
		return upper + unknownStates
	case len(i.Tiers().Storage) > 0:
		return unknownStorage
	}
	return ""
}

// Decodes reports whether the server is a decode server.
func (i *ServerInfo) Decodes() bool { return *i.Mode == kv.RoleDecode.String() }

// KeepsPrompts reports whether the server caches prompts, otherwise the remedy.
func (i *ServerInfo) KeepsPrompts() (keeps bool, remedy string) {
	switch {
	case i.NoRadix:
		return false, "start it without --disable-radix-cache"
	case i.Decodes() && !i.DecodeRadix:
		return false, "a decode server caches prompts only with --disaggregation-decode-enable-radix-cache"
	}
	return true, ""
}

// EventsRemedy returns the remedy for a server without KV events. The usual ports are shifted by so many.
func (i *ServerInfo) EventsRemedy(shift int) string {
	remedy := "start it with " + EventFlags(kv.EngineSGLang, shift)
	if i.EventsConfig != "" {
		return "its --kv-events-config names no publisher over TCP: " + remedy
	}
	return remedy
}

// sglangCaches returns the tokens that the KV cache of each rank of an SGLang server holds.
// Its report about itself is rank 0's: others may have more or less memory.
func (c *Client) sglangCaches(ctx context.Context, s Server, info *ServerInfo, ranks []uint32) (_ map[uint32]int, err error) {
	sizes := map[uint32]int{}
	if info == nil { // the router has started it
		info, err = c.ServerInfo(ctx, s)
	}
	if info != nil && info.CacheTokens > 0 {
		for _, rank := range ranks {
			sizes[rank] = tokens(info.CacheTokens)
		}
	}
	if info != nil && info.Ranks() > 1 || len(ranks) > 1 {
		if list, failure := c.listLoads(ctx, s); failure == nil {
			maps.Copy(sizes, list.cacheTokens())
		}
	}
	return sizes, err
}

// listLoads requests the list of loads from an SGLang server.
func (c *Client) listLoads(ctx context.Context, s Server) (list sglangLoads, err error) {
	err = c.getBy(ctx, c.pages, s, loadsPath, answerLimit, &list)
	return list, err
}
