package extproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"kvrouter/internal/base/web"
	"kvrouter/internal/serve/proxy"
)

// Names of the endpoint picker protocol.
const (
	headerDestination  = "x-gateway-destination-endpoint"
	metadataEnvoy      = "envoy.lb"
	metadataSubset     = "envoy.lb.subset_hint"
	keySubset          = "x-gateway-destination-endpoint-subset"
	keyServed          = "x-gateway-destination-endpoint-served"
	headerObjective    = "X-Llm-D-Inference-Objective"
	headerModelRewrite = "X-Llm-D-Model-Name-Rewrite"
	headerTestPick     = "Test-Epp-Endpoint-Selection"
	headerTestServed   = "X-Conformance-Test-Served-Endpoint"
)

const (
	// maxHeaders is the maximum size of a message's headers, bytes, plus headerCost for
	// each (RFC 9113, section 6.5.2). maxHeaderCount is their maximum number.
	maxHeaders     = 256 << 10
	maxHeaderCount = 1000
	headerCost     = 32
	// maxSubset is the maximum number of addresses of a subset.
	maxSubset = 16 << 10
)

// errHeaders refuses headers beyond maxHeaders or maxHeaderCount.
var errHeaders = &refusal{reasonHeaders, web.BodyError{Status: http.StatusRequestHeaderFieldsTooLarge,
	Message: fmt.Sprintf("the headers are more than %d, or larger than %d bytes with %d bytes for each", maxHeaderCount, maxHeaders,
		headerCost)}}

// readHeaders returns a message's headers, and the pseudo headers by name.
func readHeaders(given *corev3.HeaderMap) (header http.Header, pseudo map[string]string, err error) {
	if len(given.GetHeaders()) > maxHeaderCount {
		return nil, nil, errHeaders
	}
	header, pseudo = make(http.Header, len(given.GetHeaders())), make(map[string]string, 4)
	size := 0
	for _, h := range given.GetHeaders() {
		value := h.GetValue()
		if raw := h.GetRawValue(); len(raw) > 0 {
			value = string(raw)
		}
		if size += len(h.GetKey()) + len(value) + headerCost; size > maxHeaders {
			return nil, nil, errHeaders
		}
		if strings.HasPrefix(h.GetKey(), ":") {
			pseudo[h.GetKey()] = value
			continue
		}
		key := http.CanonicalHeaderKey(h.GetKey())
		header[key] = append(header[key], value)
	}
	return header, pseudo, nil
}

// newRequest makes a request of a stream's first message.
func newRequest(ctx context.Context, message *extprocv3.HttpHeaders, body io.ReadCloser) (*http.Request, error) {
	header, pseudo, err := readHeaders(message.GetHeaders())
	if err != nil {
		return nil, err
	}
	target, err := url.ParseRequestURI(pseudo[":path"])
	if err != nil || target.Host != "" {
		return nil, errors.New("invalid request path")
	}
	if method := pseudo[":method"]; method == "" || strings.ContainsFunc(method, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("invalid request method")
	}
	request := &http.Request{
		Method: pseudo[":method"], URL: target, RequestURI: pseudo[":path"], Host: pseudo[":authority"], Header: header, Body: body,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, ContentLength: -1,
	}
	if n, err := strconv.ParseInt(header.Get("Content-Length"), 10, 64); err == nil && n >= 0 {
		request.ContentLength = n
	}
	if message.GetEndOfStream() {
		request.ContentLength, request.Body = 0, http.NoBody
	}
	return request.WithContext(ctx), nil
}

// newAnswer makes an answer of a stream's message with the worker's headers.
func newAnswer(message *extprocv3.HttpHeaders, body io.ReadCloser) (*http.Response, error) {
	header, pseudo, err := readHeaders(message.GetHeaders())
	if err != nil {
		return nil, err
	}
	status, err := strconv.Atoi(pseudo[":status"])
	if err != nil || status < 100 || status > 999 {
		return nil, fmt.Errorf("the answer's status is %.10q", pseudo[":status"])
	}
	answer := &http.Response{
		StatusCode: status, Status: strings.TrimSpace(fmt.Sprintf("%d %s", status, http.StatusText(status))),
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: header, Body: body, ContentLength: -1,
	}
	if message.GetEndOfStream() {
		answer.ContentLength, answer.Body = 0, http.NoBody
	}
	return answer, nil
}

// subset returns the addresses that metadata allows; nil: all.
func subset(metadata *corev3.Metadata) []string {
	given, named := metadata.GetFilterMetadata()[metadataSubset].GetFields()[keySubset]
	if !named {
		return nil
	}
	addresses := []string{}
	add := func(text string) {
		for address := range strings.SplitSeq(text, ",") {
			if address = strings.TrimSpace(address); address != "" && len(addresses) < maxSubset {
				addresses = append(addresses, address)
			}
		}
	}
	if list := given.GetListValue(); list != nil {
		for _, value := range list.GetValues() {
			add(value.GetStringValue())
		}
	} else {
		add(given.GetStringValue())
	}
	return addresses
}

// served returns the address of the worker that gave an answer, from the protocol's
// metadata or the attribute upstream.address; empty: the gateway reports none.
func served(message *extprocv3.ProcessingRequest) string {
	if reported := message.GetMetadataContext().GetFilterMetadata()[metadataEnvoy].GetFields()[keyServed].GetStringValue(); reported != "" {
		return reported
	}
	return attribute(message, "upstream.address")
}

// clientAddress returns the address and port of the gateway's client; empty: the gateway
// does not state it.
func clientAddress(message *extprocv3.ProcessingRequest) string {
	address, err := netip.ParseAddrPort(attribute(message, "source.address"))
	if err != nil {
		return ""
	}
	return address.String()
}

// attribute returns an attribute that the gateway, not the client, has set; empty: the
// gateway is not configured to send it.
func attribute(message *extprocv3.ProcessingRequest, name string) string {
	for _, attributes := range message.GetAttributes() {
		if text := attributes.GetFields()[name].GetStringValue(); text != "" {
			return text
		}
	}
	return ""
}

// gateway returns the data about the request in a stream's first message, without its
// headers, and the choice of the conformance tests if that is enabled.
func (p *Server) gateway(message *extprocv3.ProcessingRequest, header http.Header) *proxy.Gateway {
	g := &proxy.Gateway{
		Subset: subset(message.GetMetadataContext()), Others: p.settings.ExtProcFallbacks, Any: p.settings.ExtProcConformance,
		Model: header.Get(headerModelRewrite), Priority: p.objectives[header.Get(headerObjective)],
		Token: header.Get(proxy.HeaderSession), Tokens: p.tokens,
	}
	if picked := header.Get(headerTestPick); p.settings.ExtProcConformance && picked != "" {
		g.Subset = strings.FieldsFunc(picked, func(r rune) bool { return r == ',' || r == ' ' })
	}
	return g
}

// metadata has the addresses in the form that a gateway's load balancer reads.
func metadata(addresses string) *structpb.Struct {
	text := func(s string) *structpb.Value {
		return &structpb.Value{Kind: &structpb.Value_StringValue{StringValue: s}}
	}
	inner := &structpb.Struct{Fields: map[string]*structpb.Value{headerDestination: text(addresses)}}
	return &structpb.Struct{Fields: map[string]*structpb.Value{metadataEnvoy: {Kind: &structpb.Value_StructValue{StructValue: inner}}}}
}

// mutation returns the mutation that turns the received headers into those.
func mutation(came, headers http.Header) *extprocv3.HeaderMutation {
	m := new(extprocv3.HeaderMutation)
	for name := range came {
		if _, stays := headers[name]; !stays {
			m.RemoveHeaders = append(m.RemoveHeaders, strings.ToLower(name))
		}
	}
	for name, values := range headers {
		if !slices.Equal(values, came[name]) {
			m.SetHeaders = appendHeader(m.SetHeaders, name, values...)
		}
	}
	return m
}

// appendHeader appends options that set a header to those values.
func appendHeader(options []*corev3.HeaderValueOption, name string, values ...string) []*corev3.HeaderValueOption {
	action := corev3.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD
	for _, value := range values {
		options = append(options, &corev3.HeaderValueOption{
			Header: &corev3.HeaderValue{Key: strings.ToLower(name), RawValue: []byte(value)}, AppendAction: action,
		})
		action = corev3.HeaderValueOption_APPEND_IF_EXISTS_OR_ADD
	}
	return options
}
