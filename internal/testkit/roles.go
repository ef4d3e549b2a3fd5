package testkit

import "kvrouter/internal/base/kv"

// Roles of workers in prefill/decode disaggregation, by KV connector and role.
var (
	NixlPrefill    = kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindNIXL}
	NixlDecode     = kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindNIXL}
	NixlBoth       = kv.Disagg{Kind: kv.KindNIXL}
	SglangPrefill  = kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang, Bootstrap: kv.Bootstrap{Host: "h", Port: 8998}}
	SglangDecode   = kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindSGLang}
	SglangUnknown  = kv.Disagg{Role: kv.RolePrefill, Kind: kv.KindSGLang}
	MooncakeDecode = kv.Disagg{Role: kv.RoleDecode, Kind: kv.KindMooncake}
	Plain          = kv.Disagg{}
)
