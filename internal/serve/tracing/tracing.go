// Package tracing sends the spans of requests to an OpenTelemetry collector: the
// tokenization, each decision and attempt, and the answer.
//
// The standard variables (such as OTEL_EXPORTER_OTLP_ENDPOINT) enable it. Without
// them Open returns nil. All methods accept a nil receiver; they then do nothing,
// allocate nothing, and return nil.
package tracing

import (
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Variables that are read here; the SDK and its exporters read the other standard ones.
const (
	envEndpoint       = "OTEL_EXPORTER_OTLP_ENDPOINT"
	envTracesEndpoint = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	envProtocol       = "OTEL_EXPORTER_OTLP_PROTOCOL"
	envTracesProtocol = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
	envExporter       = "OTEL_TRACES_EXPORTER"
	envSampler        = "OTEL_TRACES_SAMPLER"
	envSamplerArg     = "OTEL_TRACES_SAMPLER_ARG"
	envDisabled       = "OTEL_SDK_DISABLED"
)

// Protocols of the collector.
const (
	protocolGRPC = "grpc"
	protocolHTTP = "http/protobuf"
)

const (
	serviceName = "kvrouter" // without OTEL_SERVICE_NAME
	// maxText bounds each text in a span, bytes, unless the standard variables do.
	maxText = 512
	// flushLimit bounds how long Close sends the rest, and endLimit how long it
	// then waits for the exporter to stop.
	flushLimit = 3 * time.Second
	endLimit   = time.Second
)

// Tracer creates spans of requests and exports them in the background. Its methods
// are safe for concurrent use.
type Tracer struct {
	tracer   trace.Tracer
	provider *sdk.TracerProvider
	sender   *sender
	ended    atomic.Uint64 // spans
}

// Counts are the ended spans, and of these the exported ones and those that the
// collector did not accept. The remaining ones are queued, or were dropped because
// the queue was full.
type Counts struct{ Ended, Sent, Failed uint64 }

// Open returns a tracer configured by the environment; nil: tracing is not enabled.
// An error names the invalid variable. Open does not connect to the collector. The
// caller calls Close.
func Open(version string, log *slog.Logger) (*Tracer, error) {
	protocol, err := wanted()
	if err != nil || protocol == "" {
		return nil, err
	}
	var client otlptrace.Client
	if protocol == protocolGRPC {
		client = otlptracegrpc.NewClient()
	} else {
		client = otlptracehttp.NewClient()
	}
	exporter, err := otlptrace.New(context.Background(), client)
	if err != nil {
		return nil, fmt.Errorf("traces by %s: %w", protocol, err)
	}
	about, err := resource.New(context.Background(), resource.WithAttributes(attribute.String("service.name", serviceName),
		attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithFromEnv())
	if err != nil {
		log.Warn("traces: invalid attributes in OTEL_RESOURCE_ATTRIBUTES", "error", err)
	}
	t := &Tracer{sender: newSender(exporter, log)}
	limits := sdk.NewSpanLimits()
	if limits.AttributeValueLengthLimit < 0 {
		limits.AttributeValueLengthLimit = maxText
	}
	t.provider = sdk.NewTracerProvider(sdk.WithResource(about), sdk.WithRawSpanLimits(limits),
		sdk.WithSpanProcessor(counting{sdk.NewBatchSpanProcessor(t.sender), &t.ended}))
	t.tracer = t.provider.Tracer("kvrouter", trace.WithInstrumentationVersion(version))
	log.Info("request tracing enabled", "protocol", protocol, "endpoint", endpoint())
	return t, nil
}

// endpoint is where the collector is, as the environment gives it; its host alone, as
// a URL may hold a password.
func endpoint() string {
	_, text := given(envTracesEndpoint, envEndpoint)
	if u, err := url.Parse(text); err == nil && text != "" {
		return u.Host
	}
	return "default"
}

// given returns the first of the variables that is not empty, and its value.
func given(names ...string) (name, value string) {
	for _, name := range names {
		if value := strings.TrimSpace(os.Getenv(name)); value != "" {
			return name, value
		}
	}
	return "", ""
}

// wanted returns the protocol by which the environment enables traces; empty: it does
// not ask.
func wanted() (protocol string, err error) {
	name, endpoint := given(envTracesEndpoint, envEndpoint)
	_, exporter := given(envExporter)
	_, disabled := given(envDisabled)
	switch exporter = strings.ToLower(exporter); {
	case strings.EqualFold(disabled, "true"), exporter == "none", exporter == "" && endpoint == "":
		return "", nil
	case exporter != "" && exporter != "otlp":
		return "", fmt.Errorf("%s=%s: give otlp or none", envExporter, exporter)
	}
	if u, err := url.Parse(endpoint); endpoint != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		return "", fmt.Errorf("%s: give the collector's URL, such as http://localhost:4318", name)
	}
	name, protocol = given(envTracesProtocol, envProtocol)
	switch protocol {
	case "":
		protocol = protocolHTTP
	case protocolGRPC, protocolHTTP:
	default:
		return "", fmt.Errorf("%s=%s: give %s or %s", name, protocol, protocolGRPC, protocolHTTP)
	}
	return protocol, checkSampler()
}

// checkSampler refuses values that the SDK would read as sampling everything.
func checkSampler() error {
	_, sampler := given(envSampler)
	switch sampler = strings.ToLower(sampler); sampler {
	case "", "always_on", "always_off", "parentbased_always_on", "parentbased_always_off":
		return nil
	case "traceidratio", "parentbased_traceidratio":
		_, text := given(envSamplerArg)
		if share, err := strconv.ParseFloat(text, 64); text != "" && (err != nil || !(share >= 0 && share <= 1)) {
			return fmt.Errorf("%s=%s: give a share from 0 to 1", envSamplerArg, text)
		}
		return nil
	}
	return fmt.Errorf("%s=%s: give always_on, always_off, traceidratio, or one of them after parentbased_", envSampler, sampler)
}

// Counts returns the counts of spans so far.
func (t *Tracer) Counts() Counts {
	sent, failed := t.sender.sent.Load(), t.sender.failed.Load()
	return Counts{Ended: t.ended.Load(), Sent: sent, Failed: failed}
}

// Close exports the queued spans within flushLimit and ends the export.
func (t *Tracer) Close() {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), flushLimit)
	defer cancel()
	if err := t.provider.Shutdown(ctx); err != nil {
		t.sender.log.Warn("some of the last spans were not sent", "error", err)
	}
	t.sender.cut() // what still runs ends at once
	select {
	case <-t.sender.closed:
	case <-time.After(endLimit):
	}
}

// counting counts the spans that a processor is given.
type counting struct {
	sdk.SpanProcessor
	ended *atomic.Uint64
}

// OnEnd implements sdk.SpanProcessor.
func (c counting) OnEnd(s sdk.ReadOnlySpan) {
	c.ended.Add(1)
	c.SpanProcessor.OnEnd(s)
}

// sender is an exporter that counts, writes its errors to the log, and can be cut off.
type sender struct {
	sdk.SpanExporter
	log          *slog.Logger
	cutOff       context.Context // ends with cut
	cut          context.CancelFunc
	closed       chan struct{} // is closed when the exporter has been shut down
	sent, failed atomic.Uint64
}

func newSender(exporter sdk.SpanExporter, log *slog.Logger) *sender {
	s := &sender{SpanExporter: exporter, log: log, closed: make(chan struct{})}
	s.cutOff, s.cut = context.WithCancel(context.Background())
	return s
}

// ExportSpans implements sdk.SpanExporter. It returns no errors, because the SDK
// would print them.
func (s *sender) ExportSpans(ctx context.Context, spans []sdk.ReadOnlySpan) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.cutOff, cancel)()
	if err := s.SpanExporter.ExportSpans(ctx, spans); err != nil {
		s.failed.Add(uint64(len(spans)))
		if s.cutOff.Err() == nil {
			s.log.Warn("the collector did not accept spans", "spans", len(spans), "error", err)
		}
		return nil
	}
	s.sent.Add(uint64(len(spans)))
	return nil
}

// Shutdown implements sdk.SpanExporter.
func (s *sender) Shutdown(context.Context) error {
	defer close(s.closed)
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	return s.SpanExporter.Shutdown(ctx)
}
