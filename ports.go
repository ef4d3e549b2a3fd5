package main

import (
	"cmp"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/base/web"
)

// replicaHost is the listen host of --replica-sync.
func (c *Config) replicaHost() string { return cmp.Or(c.Dynamo.ReplicaSyncHost, c.Host) }

// clusterHost is the listen host of --cluster.
func (c *Config) clusterHost() string { return cmp.Or(c.Cluster.ClusterHost, c.Host) }

// gatewayHost is the listen host of the endpoint picker's ports.
func (c *Config) gatewayHost() string { return cmp.Or(c.Gateway.ExtProcHost, c.Host) }

// exposures lists the router's own ports with the credentials they require.
func (c *Config) exposures() []web.Exposure {
	certified := c.Web.TLS.TLSClientCA != ""
	keyed := len(c.APIKey) > 0 || c.Keys.APIKeysFile != ""
	all := []web.Exposure{
		{
			Flag: "--host", Host: c.Host, Name: "OpenAI port",
			Keyed: keyed || certified, Keys: "--api-key, --api-keys-file or --tls-client-ca",
		},
		{
			Flag: "--router-host", Host: c.Web.RouterHost, Name: "router port",
			Keyed: len(c.RouterAPIKey) > 0 || certified, Keys: "--router-api-key or --tls-client-ca",
		},
	}
	if c.Gateway.ExtProcPort != 0 {
		all = append(all, web.Exposure{
			Flag: "--ext-proc-host", Host: c.gatewayHost(), Name: "port of --ext-proc-port",
			Keyed: keyed || certified && c.Gateway.ExtProcTLS, Keys: "--api-key or --api-keys-file",
		})
	}
	if c.Dynamo.ReplicaSync {
		all = append(all, web.Exposure{
			Flag: "--replica-sync-host", Host: c.replicaHost(), Name: "port of --replica-sync",
			Keys: "--replica-sync-host 127.0.0.1",
		})
	}
	if c.Cluster.Own() {
		all = append(all, web.Exposure{
			Flag: "--cluster-host", Host: c.clusterHost(), Name: "port of --cluster",
			Keyed: c.Cluster.ClusterKey != "", Keys: "--cluster-key",
		})
	}
	return all
}

// ports lists every port that will be listened on; 0 (any) is left out.
func (c *Config) ports() []settings.PortUse {
	const loopback = "127.0.0.1"
	var uses []settings.PortUse
	own := func(flag string, port int, host string) {
		if port != 0 {
			uses = append(uses, settings.PortUse{Flag: flag, Base: port, Port: port, Host: host})
		}
	}
	own("--http-port", c.HTTPPort, c.Host)
	own("--router-port", c.RouterPort, c.Web.RouterHost)
	own("--page-port", c.Page.PagePort, c.Web.RouterHost)
	own("--metrics-port", c.Metrics.MetricsPort, c.Metrics.MetricsHost)
	own("--ext-proc-port", c.Gateway.ExtProcPort, c.gatewayHost())
	own("--ext-proc-health-port", c.Gateway.ExtProcHealthPort, c.gatewayHost())
	if c.Dynamo.ReplicaSync {
		own("--replica-sync-port", c.Dynamo.ReplicaSyncPort, c.replicaHost())
	}
	if c.Cluster.Own() {
		own("--cluster-port", c.Cluster.ClusterPort, c.clusterHost())
	}
	if c.Engine == EngineNone {
		return uses
	}
	for i := range c.NumWorkers {
		workers := func(flag string, base, at int) {
			uses = append(uses, settings.PortUse{Flag: flag, Base: base, Port: base + at, Host: loopback, Worker: i})
		}
		workers("--base-worker-port", c.BaseWorkerPort, i)
		if c.Engine == EngineSGLang && i < c.PrefillWorkers {
			workers("--base-bootstrap-port", c.BaseBootstrapPort, i)
		}
		for at := i * c.Ranks(); at < (i+1)*c.Ranks(); at++ {
			if c.KVEvents() {
				workers("--base-kv-events-port", c.BaseKVEventsPort, at)
				workers("--base-kv-replay-port", c.BaseKVReplayPort, at)
			}
			workers("--base-metrics-port", c.BaseMetricsPort, at)
			if c.nixl() {
				workers("--base-nixl-port", c.BaseNIXLPort, at)
			}
			if c.KVP2P {
				workers("--base-p2p-port", c.BaseP2PPort, at)
			}
		}
	}
	return uses
}
