package doctor

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"kvrouter/internal/fleet/probe"
)

// leastLookedUp is the number of tokens that requests must have looked for in lower tiers
// before it is noted that they found none.
const leastLookedUp = 100_000

// checkVLLMTiers checks the tiers below the cache of a vLLM server, by its metrics page.
func (v visitor) checkVLLMTiers(ctx context.Context, s Setup, page []byte, r *report) {
	t := probe.ParseVLLMTiers(page)
	if !t.Any() {
		return
	}
	if a, err := v.ask(ctx, http.MethodGet, "/server_info?config_format=json"); err == nil && a.status == http.StatusOK {
		t.AddVLLMConfig(a.body)
	}
	const set = `in kv_connector_extra_config of its --kv-transfer-config`
	if t.Host {
		r.ok("keeps blocks in %s", tierNames(t))
	}
	switch {
	case !s.KVEvents:
	case t.LMCache && !t.Host:
		r.note("keeps blocks in LMCache: vLLM's LMCacheConnectorV1 publishes no evictions, and hashes of its own, so that hits in LMCache are "+
			"not predicted",
			"use LMCacheMPConnector of the package lmcache, or vLLM's OffloadingConnector")
	case t.Connector != "" && t.Host && !t.Described:
		r.note("its KV events of host memory have no tokens and parents: a router that has missed the first event of a block cannot place it",
			`set "self_describing_kv_events":true `+set)
	case t.Connector == "" && t.Host:
		r.note("does not report whether its KV events of host memory have tokens and parents",
			`make sure that "self_describing_kv_events":true is set `+set)
	}
	switch names := strings.Join(t.Storage, ", "); {
	case !s.KVEvents || len(t.Storage) == 0:
	case t.Connector == "":
		r.note(fmt.Sprintf("does not report whether its tiers %s publish KV events; without, hits there are not predicted", shorten(names)),
			`make sure that "enable_kv_events":true is set for each of its secondary_tiers`)
	case !t.Told:
		r.note(fmt.Sprintf("a tier of %s publishes no KV events: hits there are not predicted", shorten(names)),
			`set "enable_kv_events":true for each of its secondary_tiers`)
	}
	switch known := v.at.P2P.Known(); {
	case t.Pulls && !known:
		address := "HOST:PORT"
		if t.PullPort != 0 {
			address = fmt.Sprintf("HOST:%d", t.PullPort)
		}
		r.note("can pull blocks from other workers (its tier p2p), and the router does not know its address for that",
			"add p2p="+address+" to its --worker")
	case t.Connector != "" && !t.Pulls && known:
		r.note("has no tier p2p: blocks cannot be pulled", `add {"type":"p2p"} to the secondary_tiers `+set+", or remove p2p= from its --worker")
	}
	if t.LookedUp >= leastLookedUp && t.Found == 0 {
		r.note(fmt.Sprintf("has found nothing of %.0f tokens in its lower tiers", t.LookedUp),
			"see its log: the connector may have no device, or another hash seed")
	}
}

// checkSGLangTiers checks the tiers below the cache of an SGLang server.
func (r *report) checkSGLangTiers(server *probe.ServerInfo) {
	if t := server.Tiers(); t.Any() {
		r.ok("keeps blocks in %s", tierNames(t))
	}
}

// tierNames lists tiers for a finding.
func tierNames(t probe.Tiers) string {
	names := []string{"host memory"}
	for _, name := range t.Storage {
		names = append(names, shorten(name))
	}
	last := len(names) - 1
	if last == 0 {
		return names[0]
	}
	return strings.Join(names[:last], ", ") + " and " + names[last]
}
