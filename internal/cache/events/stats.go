package events

import (
	"sync/atomic"

	"kvrouter/internal/base/kv"
)

// Stats counts the events of one stream. It may be read at any time.
type Stats struct {
	Connected atomic.Bool // subscribed right now
	// Cold: blocks of the worker may be missing in the index, because its history
	// since its start or last reset is incomplete.
	Cold atomic.Bool

	layout atomic.Pointer[kv.Layout]

	Lagged atomic.Bool  // Lag has been measured
	Lag    atomic.Int64 // age of the last live batch when it was applied, ns

	Batches           atomic.Uint64 // applied, replayed ones included
	ReplayedBatches   atomic.Uint64 // applied out of a replay
	LastSeq           atomic.Uint64 // of the last applied batch; 0 before the first
	Stored            atomic.Uint64 // store events applied
	StoredBlocks      atomic.Uint64 // blocks in them
	Removed           atomic.Uint64 // remove events applied
	RemovedBlocks     atomic.Uint64 // blocks in them that were in the index
	Cleared           atomic.Uint64 // AllBlocksCleared events
	Gaps              atomic.Uint64 // times a live batch was not the next one
	Duplicates        atomic.Uint64 // live batches already known from a replay
	PeerEvents        atomic.Uint64 // events taken over from another router after a gap
	PeerDumps         atomic.Uint64 // times all blocks were taken over from another router
	Replays           atomic.Uint64 // replays requested
	ReplayFailures    atomic.Uint64 // unanswered, or without the requested batches
	Restarts          atomic.Uint64 // detected restarts of the publisher
	Reconnects        atomic.Uint64 // connections after the first
	DecodeErrors      atomic.Uint64 // invalid events or batches
	UnknownParent     atomic.Uint64 // store events with an unknown parent: dropped
	UnknownRemoved    atomic.Uint64 // removed blocks that were not in the index
	RemovedIncomplete atomic.Uint64 // remove events with such blocks
	InvalidStored     atomic.Uint64 // invalid store events: skipped
	Ignored           atomic.Uint64 // events of another medium, group, kind or type
	UnknownMedia      atomic.Uint64 // of them, those of a medium that is not known
	BlockSizeMismatch atomic.Uint64 // store events whose block size is no multiple of the index's: dropped
	UnknownGroups     atomic.Uint64 // KV-cache groups that are passed over
	Misplaced         atomic.Uint64 // store events of sliding windows whose blocks have no known place: skipped
	Ambiguous         atomic.Uint64 // the same with two possible places: the likely one is taken
	PartBlocks        atomic.Uint64 // store events of a part of a block of full attention: skipped
	Overflows         atomic.Uint64 // times the rank would have exceeded its cache: cleared

	LowerLost atomic.Uint64 // blocks of lower tiers that the index had to drop for its bounds
	// Lower counts the blocks of events by kv.Tier; the device's place is unused.
	Lower [1 + len(kv.LowerTiers)]LowerCounts
}

// LowerCounts counts the blocks of one lower tier in events.
type LowerCounts struct {
	Stored         atomic.Uint64
	Removed        atomic.Uint64 // those that were in the index
	UnknownRemoved atomic.Uint64 // those that were not
}

// Layout returns the KV-cache groups of the rank, as far as events have shown them.
func (s *Stats) Layout() kv.Layout {
	if layout := s.layout.Load(); layout != nil {
		return *layout
	}
	return kv.Layout{}
}

func (s *Stats) setLayout(layout kv.Layout) { s.layout.Store(&layout) }

// Counts returns the counters by their name on the metrics page.
func (s *Stats) Counts() map[string]uint64 {
	return map[string]uint64{
		"batches": s.Batches.Load(), "replayed_batches": s.ReplayedBatches.Load(), "stored": s.Stored.Load(),
		"stored_blocks": s.StoredBlocks.Load(),
		"removed":       s.Removed.Load(), "removed_blocks": s.RemovedBlocks.Load(), "cleared": s.Cleared.Load(), "gaps": s.Gaps.Load(),
		"duplicates": s.Duplicates.Load(), "replays": s.Replays.Load(), "replay_failures": s.ReplayFailures.Load(), "restarts": s.Restarts.Load(),
		"reconnects": s.Reconnects.Load(), "decode_errors": s.DecodeErrors.Load(), "unknown_parent": s.UnknownParent.Load(),
		"unknown_removed": s.UnknownRemoved.Load(),
		"peer_events":     s.PeerEvents.Load(), "peer_dumps": s.PeerDumps.Load(), "removed_incomplete": s.RemovedIncomplete.Load(),
		"invalid_stored": s.InvalidStored.Load(),
		"ignored":        s.Ignored.Load(), "block_size_mismatch": s.BlockSizeMismatch.Load(), "unknown_groups": s.UnknownGroups.Load(),
		"misplaced": s.Misplaced.Load(),
		"ambiguous": s.Ambiguous.Load(), "part_blocks": s.PartBlocks.Load(), "overflows": s.Overflows.Load(),
		"unknown_media": s.UnknownMedia.Load(),
		"lower_lost":    s.LowerLost.Load(),
	}
}
