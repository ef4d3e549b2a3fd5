package relay

import (
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
)

// codec passes the contract's messages as bytes, which this package encodes and decodes
// itself, and all others as gRPC does.
type codec struct{ encoding.CodecV2 }

func newCodec() codec { return codec{encoding.GetCodecV2(grpcproto.Name)} }

// Marshal returns the bytes of v.
func (c codec) Marshal(v any) (mem.BufferSlice, error) {
	if text, ok := v.(*[]byte); ok {
		return mem.BufferSlice{mem.SliceBuffer(*text)}, nil
	}
	return c.CodecV2.Marshal(v)
}

// Unmarshal copies data into v.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if text, ok := v.(*[]byte); ok {
		*text = data.Materialize()
		return nil
	}
	return c.CodecV2.Unmarshal(data, v)
}
