package main

import (
	"kvrouter/internal/serve/keys"
	"kvrouter/internal/serve/openai"
	"kvrouter/internal/serve/page"
	"kvrouter/internal/serve/proxy"
)

// openAISettings are those of the OpenAI port. pageURL is the dashboard's port.
func (c *Config) openAISettings(pageURL string) openai.Settings {
	ttft, tpot := c.Routing.Objectives()
	places, _ := c.Shares(c.Page.PagePort != 0)
	return openai.Settings{
		Host: c.Host, RouterKeys: c.RouterKeys, ServedModelName: c.ServedModelName, AllowEngineAdmin: c.AllowEngineAdmin, Rollouts: c.Rollouts,
		CollectUsage: c.CollectUsage, PageURL: page.URL(pageURL), CORSOrigins: c.CORSOrigins, Places: places, GatewayPlaces: c.Gateway.Streams(),
		RequestTimeout: c.RequestTimeout, ClassTTFT: ttft, ClassTPOT: tpot, HoldWhenEmpty: c.Routing.HoldWhenEmpty,
		SessionHeader: c.Routing.SessionHeader, SessionCookie: c.Routing.SessionCookie,
		MinUncachedTokens: c.Proxy.DisaggMinUncachedTokens, EnforceDisagg: c.Proxy.EnforceDisagg, Retries: c.Proxy.Retries,
	}
}

// proxySettings say how requests are sent to workers.
func (c *Config) proxySettings() proxy.Settings {
	s := c.Proxy
	s.RequestTimeout, s.OutputBlocks, s.PassAborts = c.RequestTimeout, c.Routing.RouterTrackOutputBlocks, c.Rollouts
	return s
}

// openAI makes the OpenAI port. pageURL is the dashboard's port.
func (r *app) openAI(pageURL string) *openai.API {
	observers := []openai.Observer{openai.Traced(r.tracer), r.journal, r.telemetry, r.tenants}
	if r.recorder != nil {
		observers = append(observers, r.recorder)
	}
	deps := openai.Deps{
		Keys: r.keys, Bodies: r.bodies, Models: r.models, Proxy: r.proxy, Metrics: r.telemetry.Anonymous(), Hop: r.config.Hop, Cell: r.reporter,
		Workers:   r.selection.TrainerRoutes(),
		Observers: observers, Stored: r.stored, Log: r.log,
	}
	if r.replicas != nil {
		deps.ShareStored = func(id string, worker uint64, owner keys.Owner) { r.replicas.Store(id, worker, uint64(owner)) }
	}
	return openai.New(r.config.openAISettings(pageURL), deps)
}
