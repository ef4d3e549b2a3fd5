package envoy

import (
	"net"
	"text/template"
)

// settings are the parameters of the configuration.
type settings struct {
	Options
	Port      int // of the gateway
	AdminPort int
}

// configuration is an Envoy configuration like those of gateways: ext_proc streams both
// bodies to the picker, which selects the address. With Workers, the cluster contains
// them, tries the addresses of the header in turn, and reports the one that served to the
// picker. Without Workers, it uses the single address of the header. Only the former
// retries: with retries, Envoy 1.40 sends the body of a request with trailers twice
// (Envoy issue 45470).
var configuration = template.Must(template.New("envoy").Funcs(template.FuncMap{"address": address}).Parse(`
admin: {address: {socket_address: {address: 127.0.0.1, port_value: {{.AdminPort}}}}}
static_resources:
  listeners:
  - name: gateway
    address: {socket_address: {address: 127.0.0.1, port_value: {{.Port}}}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: gateway
          generate_request_id: true
          preserve_external_request_id: true
          http_protocol_options: {enable_trailers: true}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {prefix: "/"}
                route:
                  cluster: workers
                  timeout: 600s
{{- if .Workers}}
                  retry_policy: {retry_on: connect-failure, num_retries: 3, retry_back_off: {base_interval: 0.001s}}
{{- end}}
          http_filters:
          - name: envoy.filters.http.header_to_metadata
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config
              request_rules:
              - header: x-test-subset
                on_header_present: {metadata_namespace: envoy.lb.subset_hint, key: x-gateway-destination-endpoint-subset, type: PROTOBUF_VALUE, encode: BASE64}
                remove: true
{{- if .Picker}}
          - name: envoy.filters.http.ext_proc
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
              grpc_service: {envoy_grpc: {cluster_name: picker}, timeout: 10s}
              message_timeout: 10s
              failure_mode_allow: {{.Open}}
              processing_mode: {request_header_mode: SEND, response_header_mode: SEND, request_body_mode: FULL_DUPLEX_STREAMED, response_body_mode: FULL_DUPLEX_STREAMED, request_trailer_mode: SEND, response_trailer_mode: SEND}
              metadata_options:
                forwarding_namespaces: {untyped: ["envoy.lb", "envoy.lb.subset_hint"]}
                receiving_namespaces: {untyped: ["envoy.lb"]}
{{- end}}
          - name: envoy.filters.http.router
            typed_config: {"@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router, suppress_envoy_headers: true}
  clusters:
  - name: workers
    connect_timeout: 5s
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http_protocol_options: {enable_trailers: true}}
{{- if .Workers}}
    type: STATIC
    load_balancing_policy:
      policies:
      - typed_extension_config:
          name: envoy.load_balancing_policies.override_host
          typed_config:
            "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
            override_host_sources:
            - metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}
            - header: x-gateway-destination-endpoint
            selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}
            fallback_policy:
              policies:
              - typed_extension_config:
                  name: envoy.load_balancing_policies.round_robin
                  typed_config: {"@type": type.googleapis.com/envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin}
    load_assignment:
      cluster_name: workers
      endpoints:
      - lb_endpoints:
{{- range .Workers}}
        - endpoint: {address: {socket_address: {{address .}}}}
{{- end}}
{{- else}}
    type: ORIGINAL_DST
    lb_policy: CLUSTER_PROVIDED
    original_dst_lb_config: {use_http_header: true, http_header_name: x-gateway-destination-endpoint}
{{- end}}
{{- if .Picker}}
  - name: picker
    type: STATIC
    connect_timeout: 5s
    common_lb_config: {healthy_panic_threshold: {value: 0}}
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {http2_protocol_options: {}}
{{- if .TLS}}
    transport_socket:
      name: envoy.transport_sockets.tls
      typed_config: {"@type": type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext, common_tls_context: {alpn_protocols: [h2]}}
{{- end}}
    health_checks:
    - {timeout: 1s, interval: 0.2s, no_traffic_interval: 0.2s, unhealthy_interval: 0.2s, no_traffic_healthy_interval: 0.2s, healthy_threshold: 1, unhealthy_threshold: 2, grpc_health_check: {service_name: envoy.service.ext_proc.v3.ExternalProcessor}}
    load_assignment:
      cluster_name: picker
      endpoints: [{lb_endpoints: [{endpoint: {address: {socket_address: {{address .Picker}}}}}]}]
{{- end}}
`))

// address converts host:port to Envoy's format.
func address(hostPort string) (string, error) {
	host, port, err := net.SplitHostPort(hostPort)
	return "{address: \"" + host + "\", port_value: " + port + "}", err
}
