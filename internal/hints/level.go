package hints

// PrefixHints is what a client says of the series of requests that this one
// belongs to: those of one agent or conversation, which share a prefix.
type Prefix struct {
	ID     string // of the series; empty: none
	Total  int    // requests of the series, this one included; 0: not said
	Budget *int   // requests still to come after this one, where the caller counts them itself
	OSL    Level  // length of the answers
	IAT    Level  // time from one request to the next
}

// Level is a rough size.
type Level uint8

// The levels; what nobody told of is medium.
const (
	LevelMedium Level = iota
	LevelLow
	LevelHigh
)
