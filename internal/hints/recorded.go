package hints

import (
	"fmt"
	"kvrouter/internal/kv"
	"slices"

	"github.com/zeebo/xxh3"
)

// recordedHints are PrefixHints in a file. The id, in which a client may have
// put anything, is a hash of it: only which ids are equal matters later.
type Recorded struct {
	ID     string `json:"prefix_id"`
	Total  int    `json:"total_requests,omitempty"`
	Budget *int   `json:"reuse_budget,omitempty"`
	OSL    Level  `json:"osl"`
	IAT    Level  `json:"iat"`
}

// recordHints returns what a record will tell of hints, nil if there are none.
func Record(hints Prefix) *Recorded {
	if hints == (Prefix{}) {
		return nil
	}
	recorded := Recorded(hints)
	if hints.ID != "" {
		recorded.ID = fmt.Sprintf("%016x", xxh3.HashStringSeed(hints.ID, kv.HashSeed))
	}
	return &recorded
}

// LevelNames are the levels in a file.
var LevelNames = [...]string{LevelLow: "LOW", LevelMedium: "MEDIUM", LevelHigh: "HIGH"}

// MarshalText returns the level's name in a file.
func (l Level) MarshalText() ([]byte, error) { return []byte(LevelNames[l]), nil }

// UnmarshalText reads a level's name. It refuses all that is none.
func (l *Level) UnmarshalText(text []byte) error {
	at := slices.Index(LevelNames[:], string(text))
	if at < 0 {
		return fmt.Errorf("level %.40q: it is LOW, MEDIUM or HIGH", text)
	}
	*l = Level(at)
	return nil
}
