package kv

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Attention is the kind of a KV-cache group, which decides the blocks of a prefix
// that a request needs of it.
type Attention uint8

const (
	// FullAttention needs every block of the prefix. It also stands for multi-head
	// latent attention and for full attention with sinks.
	FullAttention Attention = iota
	// SlidingWindow needs the blocks of the last Window - 1 tokens.
	SlidingWindow
	// ChunkedLocal needs the blocks from the last multiple of Window tokens on.
	ChunkedLocal
	// State needs the last block only, which holds a recurrent state.
	State
)

// attentionNames are the names in the text of a Layout: those of vLLM's
// kv_cache_spec_kind.
var attentionNames = [...]string{
	FullAttention: "full_attention", SlidingWindow: "sliding_window",
	ChunkedLocal: "chunked_local_attention", State: "mamba",
}

// String returns the kind's name.
func (a Attention) String() string { return attentionNames[a] }

// AttentionOf returns the kind that vLLM's kv_cache_spec_kind names; known is false for
// one whose rule is not known.
func AttentionOf(specKind string) (a Attention, known bool) {
	switch specKind {
	case "full_attention", "mla_attention", "sink_full_attention":
		return FullAttention, true
	case "sliding_window", "sliding_window_mla":
		return SlidingWindow, true
	}
	for i, name := range attentionNames {
		if name == specKind {
			return Attention(i), true
		}
	}
	return 0, false
}

// CacheGroup is one KV-cache group of an engine.
type CacheGroup struct {
	Index     int // the engine's number of the group
	Attention Attention
	Window    int // tokens of a sliding window or of a chunk; 0 for other kinds
	Block     int // tokens a block
}

// Limits of a layout.
const (
	MaxCacheGroups = 64
	maxGroupIndex  = 1 << 16
	MaxBlock       = 1 << 20 // tokens of a block
)

// Layout is the KV-cache groups of an engine: a request finds the longest prefix that
// all of them hold. The zero value is one group of full attention.
type Layout struct {
	// Groups begins with the group whose blocks give all others their place in the
	// index: the first one of full attention if there is one.
	Groups []CacheGroup
	// DropsLast means that the engine computes the last block of a match again, as
	// vLLM up to 0.32 does with an EAGLE or MTP drafter.
	DropsLast bool
}

// Traits are what an engine's KV-cache events do not say of it.
type Traits struct {
	DropsLast      bool // see Layout
	DropsSome      bool // the drafter is known to need the last block again in some groups only, as MTP does
	AttentionChunk int  // tokens of a chunk of its chunked local attention; 0: unknown
	Block          int  // tokens a block by its own account; 0: unknown
	Retention      int  // vLLM's --prefix-cache-retention-interval, tokens; 0: none, or unknown
}

// CommonBlock returns the largest size of a block that divides both, tokens. Either may be 0.
func CommonBlock(a, b int) int {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

// Plain reports whether a match is the leading blocks held, in blocks of that many tokens.
func (l Layout) Plain(block int) bool {
	return !l.DropsLast && (len(l.Groups) == 0 ||
		len(l.Groups) == 1 && l.Groups[0].Attention == FullAttention && l.Groups[0].Block == block)
}

// Equal reports whether both are the same.
func (l Layout) Equal(other Layout) bool { return l.String() == other.String() }

// String returns the layout as text that ParseLayout reads, for example
// "1:full_attention/32 0:sliding_window=256/32 drops_last"; empty for the zero value.
func (l Layout) String() string {
	var text strings.Builder
	for i, g := range l.Groups {
		if i > 0 {
			text.WriteByte(' ')
		}
		fmt.Fprintf(&text, "%d:%s", g.Index, g.Attention)
		if g.Window > 0 {
			fmt.Fprintf(&text, "=%d", g.Window)
		}
		fmt.Fprintf(&text, "/%d", g.Block)
	}
	if l.DropsLast {
		if text.Len() > 0 {
			text.WriteByte(' ')
		}
		text.WriteString(dropsLast)
	}
	return text.String()
}

const dropsLast = "drops_last"

// ParseLayout reads what String returns. The text may come from a file or from
// another router.
func ParseLayout(text string) (Layout, error) {
	var l Layout
	for _, field := range strings.Fields(text) {
		if field == dropsLast {
			l.DropsLast = true
			continue
		}
		g, err := parseGroup(field)
		if err != nil {
			return Layout{}, fmt.Errorf("layout: %.60q: %w", field, err)
		}
		l.Groups = append(l.Groups, g)
		if len(l.Groups) > MaxCacheGroups {
			return Layout{}, fmt.Errorf("layout: more than %d groups", MaxCacheGroups)
		}
	}
	return l, l.Validate()
}

func parseGroup(field string) (g CacheGroup, err error) {
	index, rest, found := strings.Cut(field, ":")
	kind, block, foundBlock := strings.Cut(rest, "/")
	if !found || !foundBlock {
		return g, errors.New("want INDEX:KIND[=WINDOW]/BLOCK")
	}
	kind, window, hasWindow := strings.Cut(kind, "=")
	var known bool
	if g.Attention, known = AttentionOf(kind); !known {
		return g, fmt.Errorf("unknown kind %q", kind)
	}
	if g.Index, err = strconv.Atoi(index); err != nil {
		return g, err
	}
	if hasWindow {
		if g.Window, err = strconv.Atoi(window); err != nil {
			return g, err
		}
	}
	g.Block, err = strconv.Atoi(block)
	return g, err
}

// Validate checks the ranges of all numbers.
func (l Layout) Validate() error {
	seen := make(map[int]bool, len(l.Groups))
	for _, g := range l.Groups {
		windowed := g.Attention == SlidingWindow || g.Attention == ChunkedLocal
		switch {
		case g.Index < 0 || g.Index > maxGroupIndex || seen[g.Index]:
			return fmt.Errorf("layout: group %d is out of range or listed twice", g.Index)
		case g.Block < 1 || g.Block > MaxBlock:
			return fmt.Errorf("layout: group %d has a block size of %d, want 1 to %d tokens", g.Index, g.Block, MaxBlock)
		case windowed && (g.Window < 1 || g.Window > MaxTokens), !windowed && g.Window != 0:
			return fmt.Errorf("layout: group %d, %s, has a window of %d tokens", g.Index, g.Attention, g.Window)
		}
		seen[g.Index] = true
	}
	return nil
}
