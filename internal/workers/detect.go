package workers

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/url"

	"kvrouter/internal/kv"
)

// serverInfo is the part of what an SGLang server tells of itself that matters
// here.
type serverInfo struct {
	Mode     *string `json:"disaggregation_mode"` // "null", "prefill" or "decode"
	Port     uint16  `json:"disaggregation_bootstrap_port"`
	DistAddr string  `json:"dist_init_addr"` // of the first node of several; may be empty
}

// detect returns a worker's part where prefill and decode are apart: what at
// gives, completed by what an SGLang server tells of itself. A worker with a
// role that is none is taken for vLLM, with Mooncake if it has a bootstrap
// server, else with NIXL.
func (f *Fleet) detect(ctx context.Context, at Attached) kv.Disagg {
	given := at.Disagg
	d := given
	asks := d.Kind == kv.KindNone || d.Kind == kv.KindSGLang && d.Role != kv.RoleDecode && !d.Bootstrap.Known()
	if info, ok := f.serverInfo(ctx, at, asks); ok {
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
			d.Bootstrap = info.bootstrap(at.URL)
		}
	}
	if d.Kind == kv.KindNone && d.Role != kv.RoleBoth {
		if d.Kind = kv.KindNIXL; d.Bootstrap.Known() {
			d.Kind = kv.KindMooncake
		}
	}
	return d
}

// serverInfo asks a server what an SGLang server tells; not ok: it is none, or
// is not to be asked.
func (f *Fleet) serverInfo(ctx context.Context, at Attached, asks bool) (info serverInfo, ok bool) {
	if !asks {
		return info, false
	}
	err := f.get(ctx, at, "/server_info", f.Timing.probeLimit, &info)
	var status *statusError
	if errors.As(err, &status) && status.status == http.StatusNotFound {
		err = f.get(ctx, at, "/get_server_info", f.Timing.probeLimit, &info) // its older name
	}
	return info, err == nil && info.Mode != nil
}

// bootstrap returns the address of the bootstrap server of the server at base.
func (i serverInfo) bootstrap(base string) kv.Bootstrap {
	b := kv.Bootstrap{Port: i.Port}
	if b.Port == 0 {
		b.Port = kv.SGLangPort
	}
	if host, _, err := net.SplitHostPort(i.DistAddr); err == nil {
		b.Host = host
	} else if u, err := url.Parse(base); err == nil {
		b.Host = u.Hostname()
	}
	return b
}
