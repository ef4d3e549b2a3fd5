package extproc

import (
	"context"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"
)

// Services of health checks: the process is alive; it can serve requests.
const (
	serviceLiveness  = "liveness"
	serviceReadiness = "readiness"
)

// watchPoll is the interval at which the state of a watched service is read. watchLimit is
// the maximum duration of a watch: clients then open another one.
const (
	watchPoll  = time.Second
	watchLimit = time.Hour
)

// health answers gRPC health checks.
type health struct {
	grpc_health_v1.UnimplementedHealthServer
	ready   func() bool
	leaving <-chan struct{} // closed when watches are to end
}

// now returns the state of a service. known is false if there is no service of that name.
func (h *health) now(service string) (state grpc_health_v1.HealthCheckResponse_ServingStatus, known bool) {
	switch service {
	case serviceLiveness:
		return grpc_health_v1.HealthCheckResponse_SERVING, true
	case "", serviceReadiness, extprocv3.ExternalProcessor_ServiceDesc.ServiceName:
		if h.ready() {
			return grpc_health_v1.HealthCheckResponse_SERVING, true
		}
		return grpc_health_v1.HealthCheckResponse_NOT_SERVING, true
	}
	return grpc_health_v1.HealthCheckResponse_SERVICE_UNKNOWN, false
}

// Check answers one check.
func (h *health) Check(ctx context.Context, request *grpc_health_v1.HealthCheckRequest) (*grpc_health_v1.HealthCheckResponse, error) {
	heard(ctx)
	state, known := h.now(request.GetService())
	if !known {
		return nil, status.Errorf(codes.NotFound, "unknown service %.100q: use %q, %q or %q", request.GetService(), serviceLiveness,
			serviceReadiness, extprocv3.ExternalProcessor_ServiceDesc.ServiceName)
	}
	return &grpc_health_v1.HealthCheckResponse{Status: state}, nil
}

// Watch reports every change of a service's state.
func (h *health) Watch(request *grpc_health_v1.HealthCheckRequest,
	stream grpc.ServerStreamingServer[grpc_health_v1.HealthCheckResponse]) error {
	heard(stream.Context())
	poll := time.NewTicker(watchPoll)
	defer poll.Stop()
	limit := time.NewTimer(watchLimit)
	defer limit.Stop()
	for last := grpc_health_v1.HealthCheckResponse_UNKNOWN; ; {
		if state, _ := h.now(request.GetService()); state != last {
			if err := stream.Send(&grpc_health_v1.HealthCheckResponse{Status: state}); err != nil {
				return err
			}
			last = state
		}
		select {
		case <-stream.Context().Done():
			return stream.Context().Err()
		case <-h.leaving:
			return status.Error(codes.Unavailable, "the router is shutting down")
		case <-limit.C:
			return status.Error(codes.DeadlineExceeded, "watch expired: open another one")
		case <-poll.C:
		}
	}
}
