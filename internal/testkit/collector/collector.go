// Package collector is a small OpenTelemetry collector for tests. It receives spans by
// gRPC and HTTP, stores them, and formats them as trees.
package collector

import (
	"cmp"
	"context"
	"encoding/hex"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
)

// Span is a received span.
type Span struct {
	Trace, ID, Parent string // hexadecimal; empty: none
	Service, Name     string
	Kind              string // such as SERVER
	Attributes        map[string]string
	Events            []string
	Links             []string // traces
	State             string   // trace state
	Failed            bool
	Why               string
	Start, End        time.Time
}

// Collector stores received spans. Its methods are safe for concurrent use.
type Collector struct {
	HTTP string // URL
	GRPC string // URL

	collectorpb.UnimplementedTraceServiceServer
	mu    sync.Mutex // guards spans
	spans []Span
}

// maxBody is the maximum size of a request body, bytes.
const maxBody = 16 << 20

// Start starts a collector, which is stopped at the end of the test.
func Start(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(io.LimitReader(r.Body, maxBody))
		var request collectorpb.ExportTraceServiceRequest
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &request) != nil {
			http.Error(w, "no traces", http.StatusBadRequest)
			return
		}
		c.take(&request)
		w.Header().Set("Content-Type", "application/x-protobuf")
	}))
	server.Config.SetKeepAlivesEnabled(false) // the exporter would keep a connection after its end
	server.Start()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	grpcServer := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(grpcServer, c)
	var serving sync.WaitGroup
	serving.Go(func() { _ = grpcServer.Serve(listener) })
	t.Cleanup(func() {
		server.Close()
		grpcServer.Stop()
		serving.Wait()
	})
	c.HTTP, c.GRPC = server.URL, "http://"+listener.Addr().String()
	return c
}

// Export implements the collector's gRPC service.
func (c *Collector) Export(_ context.Context,
	request *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.take(request)
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

func (c *Collector) take(request *collectorpb.ExportTraceServiceRequest) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range request.ResourceSpans {
		service := attributes(resource.GetResource().GetAttributes())["service.name"]
		for _, scope := range resource.ScopeSpans {
			for _, s := range scope.Spans {
				c.spans = append(c.spans, spanOf(service, s))
			}
		}
	}
}

func spanOf(service string, s *tracepb.Span) Span {
	span := Span{
		Trace: hex.EncodeToString(s.TraceId), ID: hex.EncodeToString(s.SpanId), Parent: hex.EncodeToString(s.ParentSpanId), Service: service,
		Name: s.Name,
		Kind: strings.TrimPrefix(s.Kind.String(), "SPAN_KIND_"), Attributes: attributes(s.Attributes), State: s.TraceState,
		Failed: s.GetStatus().GetCode() == tracepb.Status_STATUS_CODE_ERROR, Why: s.GetStatus().GetMessage(),
		Start: time.Unix(0, int64(s.StartTimeUnixNano)), End: time.Unix(0, int64(s.EndTimeUnixNano)),
	}
	for _, e := range s.Events {
		span.Events = append(span.Events, e.Name)
	}
	for _, l := range s.Links {
		span.Links = append(span.Links, hex.EncodeToString(l.TraceId))
	}
	return span
}

func attributes(list []*commonpb.KeyValue) map[string]string {
	found := map[string]string{}
	for _, kv := range list {
		found[kv.Key] = text(kv.Value)
	}
	return found
}

// text formats a value for people.
func text(v *commonpb.AnyValue) string {
	switch v := v.GetValue().(type) {
	case *commonpb.AnyValue_StringValue:
		return v.StringValue
	case *commonpb.AnyValue_IntValue:
		return fmt.Sprint(v.IntValue)
	case *commonpb.AnyValue_DoubleValue:
		return fmt.Sprint(v.DoubleValue)
	case *commonpb.AnyValue_BoolValue:
		return fmt.Sprint(v.BoolValue)
	case *commonpb.AnyValue_ArrayValue:
		var parts []string
		for _, part := range v.ArrayValue.Values {
			parts = append(parts, text(part))
		}
		return strings.Join(parts, "; ")
	}
	return ""
}

// Spans returns the received spans of a trace, earliest first; an empty name selects all
// traces.
func (c *Collector) Spans(trace string) []Span {
	c.mu.Lock()
	defer c.mu.Unlock()
	found := slices.DeleteFunc(slices.Clone(c.spans), func(s Span) bool { return trace != "" && s.Trace != trace })
	slices.SortStableFunc(found, func(a, b Span) int { return cmp.Or(a.Start.Compare(b.Start), b.End.Compare(a.End)) })
	return found
}

// Tree formats spans: one line each, below its parent, with kind and names of events. A
// span without a known parent is the root of a tree. With details, it includes services,
// times and attributes.
func Tree(spans []Span, details bool) string {
	there := map[string]bool{}
	for _, s := range spans {
		there[s.ID] = true
	}
	var out strings.Builder
	var draw func(parent string, depth int)
	show := func(s Span, depth int) {
		indent := strings.Repeat("  ", depth)
		fmt.Fprintf(&out, "%s%s %s", indent, s.Name, s.Kind)
		if s.Failed {
			out.WriteString(" failed")
		}
		for _, e := range s.Events {
			out.WriteString(" [" + e + "]")
		}
		if details {
			fmt.Fprintf(&out, " (%s, at %.1f ms, %.1f ms) %s", s.Service, s.Start.Sub(spans[0].Start).Seconds()*1e3,
				s.End.Sub(s.Start).Seconds()*1e3, s.Why)
			keys := make([]string, 0, len(s.Attributes))
			for k := range s.Attributes {
				keys = append(keys, k)
			}
			slices.Sort(keys)
			for _, k := range keys {
				fmt.Fprintf(&out, "\n%s    %s = %s", indent, k, s.Attributes[k])
			}
		}
		out.WriteByte('\n')
		draw(s.ID, depth+1)
	}
	draw = func(parent string, depth int) {
		for _, s := range spans {
			if s.Parent == parent && s.Parent != s.ID {
				show(s, depth)
			}
		}
	}
	for _, s := range spans {
		if !there[s.Parent] {
			show(s, 0)
		}
	}
	return out.String()
}
