package main

import (
	"context"
	"path/filepath"
	"slices"

	"kvrouter/internal/base/settings"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/cache/summary"
	"kvrouter/internal/peers/cells"
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
	recovered, err := events.RecoverIndex(ctx, r.index, peerKey(r.config), r.config.IndexerPeers, r.log)
	if err != nil {
		r.log.Warn("no peer of --indexer-peers returned its index: starting with an empty index", "error", err)
		return
	}
	r.partitions.SetRecovered(recovered)
	r.log.Info("loaded the index from a peer", "peer", recovered.Peer, "workers", len(recovered.Partition), "blocks", recovered.Blocks,
		"left_out", recovered.LeftOut)
}

// book returns a new book of the prefixes that the workers have, for the routers above; nil: none is reported.
func (c *Config) book() *summary.Book {
	if !c.Cells.Cell {
		return nil
	}
	return summary.NewBook()
}

// reportToRoutersAbove returns what reports the default model to the routers above: the book that exact
// keeps.
func (r *app) reportToRoutersAbove(book *summary.Book, exact *radix.Tree) *cells.Reporter {
	deps := cells.Deps{
		Hello: cells.Hello{Router: r.config.Hop.Name(), Version: settings.Version(), BlockSize: r.config.BlockSize}, Info: r.cellInfo,
		State: r.cellState, Log: r.log,
	}
	if book != nil {
		deps.Book, deps.Tidy = book, exact.Tidy
	}
	return cells.NewReporter(r.config.Cells, deps)
}

// cellInfo returns what the router serves.
func (r *app) cellInfo() (info cells.Info) {
	for _, t := range r.router.Targets() {
		for _, name := range t.Models {
			if !slices.Contains(info.Models, name) {
				info.Models = append(info.Models, name)
			}
		}
		for _, name := range t.Adapters {
			if !slices.Contains(info.Adapters, name) {
				info.Adapters = append(info.Adapters, name)
			}
		}
		info.Engine = t.Engine
	}
	info.BlockSize = r.router.Unit()
	if r.config.Model != "" {
		info.Root = filepath.Base(r.config.Model)
	}
	info.Lookaheads = r.index.Lookaheads()
	for _, w := range r.fleet.Workers() {
		if w.Cell != nil {
			info.Below = append(append(info.Below, w.Cell.Router), w.Cell.Below...)
		}
	}
	return info
}

// cellState returns how the router is.
func (r *app) cellState() cells.State {
	sum := r.router.Sum()
	waits, up := r.router.Admission.Waits()
	_, draining := r.api.Ready()
	return cells.State{
		Ready: up && !draining && r.router.Schedulable() > 0, Workers: sum.Workers, Waits: cells.Waits(waits), Running: sum.Running,
		Waiting: sum.Waiting, Usage: sum.Usage, Blocks: sum.Blocks,
		Context: sum.Context,
	}
}
