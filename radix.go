package main

import (
	"context"

	"kvrouter/internal/events"
)

// KVEvents reports whether the router subscribes to the workers' KV events.
func (c *Config) KVEvents() bool { return c.Index.Follows(c.Policy, c.Scoring.Settings) }

// peerKey is what to show to other routers' router ports: those that are each
// other's peers share a key.
func peerKey(config Config) string {
	if len(config.RouterAPIKey) == 0 {
		return ""
	}
	return config.RouterAPIKey[0]
}

// recoverIndex fills the index from the first peer that has one.
func (r *app) recoverIndex(ctx context.Context) {
	if len(r.config.IndexerPeers) == 0 {
		return
	}
	recovered, err := events.RecoverIndex(ctx, r.changed, r.config.BlockSize, peerKey(r.config), r.config.IndexerPeers, r.log)
	if err != nil {
		r.log.Warn("no peer of --indexer-peers returned its index: starting with an empty index", "error", err)
		return
	}
	r.partitions.SetRecovered(recovered)
	r.log.Info("loaded the index from a peer", "peer", recovered.Peer, "workers", len(recovered.Partition), "blocks", recovered.Blocks, "left_out", recovered.LeftOut)
}
