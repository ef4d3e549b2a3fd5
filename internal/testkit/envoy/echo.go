package envoy

import (
	"net"
	"sync"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extproc "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/protobuf/types/known/structpb"
)

// Names of the picker's protocol.
const (
	Destination = "x-gateway-destination-endpoint"        // header, and key in the metadata
	Served      = "x-gateway-destination-endpoint-served" // key in the metadata of an answer
	Namespace   = "envoy.lb"                              // of the metadata
)

// Echo is a minimal picker: it sends every request to the same addresses and returns all
// body chunks unchanged.
type Echo struct {
	Addresses string // host:port, or several with commas between

	extproc.UnimplementedExternalProcessorServer
	mu     sync.Mutex // guards served
	served []string
}

// Serve serves on listener. stop stops the server and waits for its end.
func (e *Echo) Serve(listener net.Listener) (stop func()) {
	server, healthy := grpc.NewServer(), health.NewServer()
	healthy.SetServingStatus(extproc.ExternalProcessor_ServiceDesc.ServiceName, grpc_health_v1.HealthCheckResponse_SERVING)
	grpc_health_v1.RegisterHealthServer(server, healthy)
	extproc.RegisterExternalProcessorServer(server, e)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	return func() {
		server.Stop()
		serving.Wait()
	}
}

// Served returns the addresses that the gateway reported as having answered.
func (e *Echo) Served() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]string(nil), e.served...)
}

// Process implements the service of ext_proc.
func (e *Echo) Process(stream extproc.ExternalProcessor_ProcessServer) error {
	for {
		request, err := stream.Recv()
		if err != nil {
			return nil // the request has ended
		}
		if err := stream.Send(e.answer(request)); err != nil {
			return err
		}
	}
}

func (e *Echo) answer(request *extproc.ProcessingRequest) *extproc.ProcessingResponse {
	back := func(body *extproc.HttpBody) *extproc.BodyResponse {
		piece := &extproc.StreamedBodyResponse{Body: body.Body, EndOfStream: body.EndOfStream}
		return &extproc.BodyResponse{Response: &extproc.CommonResponse{BodyMutation: &extproc.BodyMutation{
			Mutation: &extproc.BodyMutation_StreamedResponse{StreamedResponse: piece},
		}}}
	}
	answer := &extproc.ProcessingResponse{}
	switch r := request.Request.(type) {
	case *extproc.ProcessingRequest_RequestHeaders:
		answer.Response = &extproc.ProcessingResponse_RequestHeaders{RequestHeaders: &extproc.HeadersResponse{Response: &extproc.CommonResponse{
			ClearRouteCache: true,
			HeaderMutation: &extproc.HeaderMutation{SetHeaders: []*core.HeaderValueOption{{
				Header:       &core.HeaderValue{Key: Destination, RawValue: []byte(e.Addresses)},
				AppendAction: core.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
			}}},
		}}}
		destination := structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			Destination: structpb.NewStringValue(e.Addresses),
		}})
		answer.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{Namespace: destination}}
	case *extproc.ProcessingRequest_RequestBody:
		answer.Response = &extproc.ProcessingResponse_RequestBody{RequestBody: back(r.RequestBody)}
	case *extproc.ProcessingRequest_RequestTrailers:
		answer.Response = &extproc.ProcessingResponse_RequestTrailers{RequestTrailers: &extproc.TrailersResponse{}}
	case *extproc.ProcessingRequest_ResponseHeaders:
		served := request.GetMetadataContext().GetFilterMetadata()[Namespace].GetFields()[Served].GetStringValue()
		e.mu.Lock()
		e.served = append(e.served, served)
		e.mu.Unlock()
		answer.Response = &extproc.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extproc.HeadersResponse{}}
	case *extproc.ProcessingRequest_ResponseBody:
		answer.Response = &extproc.ProcessingResponse_ResponseBody{ResponseBody: back(r.ResponseBody)}
	case *extproc.ProcessingRequest_ResponseTrailers:
		answer.Response = &extproc.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extproc.TrailersResponse{}}
	}
	return answer
}
