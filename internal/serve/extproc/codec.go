package extproc

import (
	"fmt"
	"net/http"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"kvrouter/internal/base/web"
)

const (
	// maxParts is the maximum number of fields of a message, at all depths: an empty one
	// takes 2 bytes encoded and about 100 decoded. A subset of maxSubset addresses has two
	// fields for each.
	maxParts = 64 << 10
	// maxDepth is the maximum depth of nested messages.
	maxDepth = 64
	// maxNumber is the maximum number of a field whose message is counted. Envoy's numbers
	// are lower.
	maxNumber = 1 << 10
)

// errParts refuses a message beyond maxParts or maxDepth.
var errParts = &refusal{reasonHeaders, web.BodyError{Status: http.StatusRequestHeaderFieldsTooLarge,
	Message: fmt.Sprintf("the headers and metadata of the request have more than %d fields, or are nested more than %d deep", maxParts,
		maxDepth)}}

// incoming is a message of a gateway.
type incoming struct {
	message *extprocv3.ProcessingRequest
	refused error // the limit that it exceeds; it is not decoded then
}

// codec decodes the messages of gateways within limits, and all others without.
type codec struct {
	encoding.CodecV2
	kind *kind // of extprocv3.ProcessingRequest
}

func newCodec() codec {
	request := new(extprocv3.ProcessingRequest).ProtoReflect().Descriptor()
	return codec{encoding.GetCodecV2(grpcproto.Name), kindOf(request, map[protoreflect.FullName]*kind{})}
}

// kind is a message type: its fields that are messages, with their types. Reading the same
// from a descriptor takes several times as long as decoding.
type kind struct{ fields []*kind }

// kindOf returns the kind of a descriptor. known are the kinds made before.
func kindOf(message protoreflect.MessageDescriptor, known map[protoreflect.FullName]*kind) *kind {
	if k := known[message.FullName()]; k != nil {
		return k
	}
	k := new(kind)
	known[message.FullName()] = k // a message may contain its own kind
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		if number := int(field.Number()); field.Message() != nil && number <= maxNumber {
			k.fields = append(k.fields, make([]*kind, max(0, number+1-len(k.fields)))...)
			k.fields[number] = kindOf(field.Message(), known)
		}
	}
	return k
}

// Unmarshal decodes a message into v.
func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	in, ok := v.(*incoming)
	if !ok {
		return c.CodecV2.Unmarshal(data, v)
	}
	buffer := data.MaterializeToBuffer(mem.DefaultBufferPool())
	defer buffer.Free()
	text, left := buffer.ReadOnlyData(), maxParts
	if err := countParts(text, c.kind, &left, maxDepth); err == errParts {
		in.refused = err
		return nil
	} else if err != nil {
		return err
	}
	in.message = new(extprocv3.ProcessingRequest)
	return proto.Unmarshal(text, in.message)
}

// countParts subtracts the fields of a message from left. It fails with errParts if there
// are more, or if they are nested deeper than allowed.
func countParts(text []byte, k *kind, left *int, depth int) error {
	if depth == 0 {
		return errParts
	}
	for len(text) > 0 {
		if *left--; *left < 0 {
			return errParts
		}
		number, wire, n := protowire.ConsumeTag(text)
		if n < 0 {
			return protowire.ParseError(n)
		}
		text = text[n:]
		if wire == protowire.BytesType && int(number) < len(k.fields) && k.fields[number] != nil {
			inner, n := protowire.ConsumeBytes(text)
			if n < 0 {
				return protowire.ParseError(n)
			}
			if err := countParts(inner, k.fields[number], left, depth-1); err != nil {
				return err
			}
			text = text[n:]
			continue
		}
		if n = protowire.ConsumeFieldValue(number, wire, text); n < 0 {
			return protowire.ParseError(n)
		}
		text = text[n:]
	}
	return nil
}
