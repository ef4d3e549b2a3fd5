package workers

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"kvrouter/internal/kv"
)

// serverInfo is what an SGLang server tells of itself, as far as it matters here. The
// rest, its keys among it, is neither kept nor logged.
type serverInfo struct {
	Mode        *string `json:"disaggregation_mode"` // "null", "prefill" or "decode"
	Port        uint16  `json:"disaggregation_bootstrap_port"`
	DistAddr    string  `json:"dist_init_addr"`                           // of the first node of several; may be empty
	DecodeRadix bool    `json:"disaggregation_decode_enable_radix_cache"` // a decode server keeps prompts
	NoRadix     bool    `json:"disable_radix_cache"`                      // it keeps none, whatever its mode

	Replicas    int64 `json:"dp_size"`
	AttnRanks   int64 `json:"attn_dp_size"`         // of a replica
	DPAttention bool  `json:"enable_dp_attention"`  // dp_size counts the ranks of attention, as it did in older versions
	PageSize    int64 `json:"page_size"`            // tokens
	PassTokens  int64 `json:"chunked_prefill_size"` // most prompt tokens of a pass; -1: no limit
	CacheTokens int64 `json:"max_total_num_tokens"` // of the KV cache of rank 0

	ModelPath string `json:"model_path"` // a name or a folder

	EventsConfig string      `json:"kv_events_config"` // as given to it; empty: events are off
	Events       *eventsInfo `json:"kv_events"`        // nil: off, or not to be reached over TCP
}

// eventsInfo says where an SGLang server publishes its KV events and its load: rank r
// on port base + r.
type eventsInfo struct {
	Publisher string `json:"publisher"`
	Host      string `json:"endpoint_host"` // may be a wildcard
	Port      uint16 `json:"endpoint_port_base"`
	Topic     string `json:"topic"`
	BlockSize int64  `json:"block_size"` // tokens of the blocks that events tell of
	Ranks     int64  `json:"dp_size"`
	Replay    uint16 `json:"replay_endpoint_port_base"` // 0: no replay
	Load      uint16 `json:"load_endpoint_port_base"`   // 0: no load
}

// serverInfo asks a server what an SGLang server tells; nil: it is none. An error
// means that this is not known, because the server does not answer.
func (f *Fleet) serverInfo(ctx context.Context, at Attached) (*serverInfo, error) {
	var info serverInfo
	err := f.getInfo(ctx, at, f.Timing.probeLimit, &info)
	var status *statusError
	var wrong *json.UnmarshalTypeError
	var broken *json.SyntaxError
	switch {
	case errors.As(err, &wrong): // the rest of its fields is there
	case errors.As(err, &status) && status.status < 500, errors.As(err, &broken), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, err
	}
	if info.Mode == nil {
		return nil, nil
	}
	return &info, nil
}

// getInfo fetches what an SGLang server tells of itself, under its name or the older
// one. The server asks the schedulers of all its ranks for it, between two passes.
func (f *Fleet) getInfo(ctx context.Context, at Attached, limit time.Duration, into any) error {
	err := f.get(ctx, at, "/server_info", limit, into)
	var status *statusError
	if errors.As(err, &status) && status.status == http.StatusNotFound {
		err = f.get(ctx, at, "/get_server_info", limit, into)
	}
	return err
}

// partOf returns a worker's part where prefill and decode are apart: what was given,
// completed by what an SGLang server tells of itself; info is nil for another. A worker
// with a role that is none is taken for vLLM, with Mooncake if it has a bootstrap
// server, else with NIXL.
func partOf(given kv.Disagg, info *serverInfo, base string) kv.Disagg {
	d := given
	if info != nil && (d.Kind == kv.KindNone || d.Kind == kv.KindSGLang) {
		d.Kind = kv.KindSGLang
		if given.Role == kv.RoleBoth && given.Kind == kv.KindNone {
			switch *info.Mode {
			case kv.RolePrefill.String():
				d.Role = kv.RolePrefill
			case kv.RoleDecode.String():
				d.Role = kv.RoleDecode
			default: // it takes no part
				d.Kind = kv.KindNone
			}
		}
		if !d.Bootstrap.Known() && d.Role != kv.RoleDecode && d.Kind == kv.KindSGLang {
			d.Bootstrap = info.bootstrap(base)
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
func (i *serverInfo) bootstrap(base string) kv.Bootstrap {
	b := kv.Bootstrap{Port: i.Port}
	if b.Port == 0 {
		b.Port = kv.SGLangPort
	}
	if host, _, err := net.SplitHostPort(i.DistAddr); err == nil {
		b.Host = host
	} else {
		b.Host = hostOf(base)
	}
	return b
}

// hostOf returns the host of a worker's URL.
func hostOf(base string) string {
	if u, err := url.Parse(base); err == nil {
		return u.Hostname()
	}
	return ""
}
