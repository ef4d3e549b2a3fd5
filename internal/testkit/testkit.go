// Package testkit contains the helpers that tests of several packages share. Only tests
// import it.
package testkit

import "kvrouter/internal/base/kv"

// BlockSize is the block size of routers and event streams in tests, in tokens.
const BlockSize = 4

// W0, W1 and W2 are workers with one rank.
var (
	W0 = kv.WorkerKey{Worker: 0}
	W1 = kv.WorkerKey{Worker: 1}
	W2 = kv.WorkerKey{Worker: 2}
)
