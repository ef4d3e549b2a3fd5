package kv

import (
	"slices"
	"strings"
)

// Target is one destination of requests: a worker, or one rank of it.
type Target struct {
	// What each decision reads of each worker is its first 64 bytes, a line of the processor's cache,
	// of three.
	Key         WorkerKey
	Models      []string
	TotalBlocks int       // of its KV cache; 0: unknown
	Cordoned    bool      // gets no new requests
	Unanswered  bool      // registered, and its URL has never answered: the router itself sends it nothing
	Engine      Engine    // that it runs
	Known       Knowledge // of its KV cache
	FirstRank   uint32    // of the worker: a server of some of the ranks of a deployment numbers them as the deployment does
	Disagg

	URL              string   // without a slash at the end
	Ranks            int      // data-parallel ranks of the worker; with several, a request names its own
	Generation       int      // counts the worker's incarnations, from 1
	Adapters         []string // those of Models that are LoRA adapters
	BlockSize        int32    // tokens of a block of its KV cache; 0: that of the router
	MaxBatchedTokens int32    // most tokens that its engine computes in a pass; 0: unknown
	Bearer           Secret   // goes to the worker as Authorization: Bearer, in place of the client's; empty: none does
}

// Address returns the host and the port of the target's URL, such as 10.0.0.7:8000.
func (t *Target) Address() string {
	_, rest, found := strings.Cut(t.URL, "://")
	if !found {
		rest = t.URL
	}
	address, _, _ := strings.Cut(rest, "/")
	return address
}

// Pulls reports whether requests can have the target pull blocks from others, and others
// from it.
func (t *Target) Pulls() bool { return t.P2P.Known() && !t.RunsSGLang() }

// PeerAddress returns where others pull blocks of the target's rank from: vLLM adds the
// number of the rank to the port.
func (t *Target) PeerAddress() Bootstrap {
	return Bootstrap{Host: t.P2P.Host, Port: t.P2P.Port + uint16(t.Key.Rank)}
}

// ServerRank returns the number under which a request names the target's rank. A vLLM
// server counts from its own first rank there, also where its events, their ports and its
// metrics count the ranks of the whole deployment (--data-parallel-hybrid-lb).
func (t *Target) ServerRank() uint32 { return t.Key.Rank - min(t.FirstRank, t.Key.Rank) }

// Serves reports whether the target serves the model; an empty name means its
// default, and a target that names no models takes any.
func (t *Target) Serves(model string) bool {
	return model == "" || len(t.Models) == 0 || slices.Contains(t.Models, model)
}

// RunsSGLang reports whether the target runs SGLang, as reported by itself or configured
// by its KV connector.
func (t *Target) RunsSGLang() bool { return t.Engine == EngineSGLang || t.Kind == KindSGLang }

// OnePerWorker keeps the first target of each worker that the router may ask: the ranks
// of a worker share a server, and one that is Unanswered is left out. targets must be
// sorted by key; the slice is reused.
func OnePerWorker(targets []Target) []Target {
	targets = slices.DeleteFunc(targets, func(t Target) bool { return t.Unanswered })
	return slices.CompactFunc(targets, func(a, b Target) bool { return a.Key.Worker == b.Key.Worker })
}
