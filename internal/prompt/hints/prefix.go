package hints

import (
	"fmt"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/tidwall/gjson"
	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/kv"
)

// Prefix describes the series of requests that a request belongs to: those of one agent
// or conversation, which share a prefix.
type Prefix struct {
	ID     string // of the series; empty: none
	Total  int    // requests of the series, this one included; 0: not said
	Budget *int   // remaining requests after this one, if the caller counts them itself
	OSL    Level  // length of the answers
	IAT    Level  // time from one request to the next
}

// Level is a rough size.
type Level uint8

// The levels. LevelMedium also stands for unknown.
const (
	LevelMedium Level = iota
	LevelLow
	LevelHigh
)

// prefixHeaders are the headers by which a client describes the series of
// requests that one belongs to, and the names under which it does so in
// annotations ("name:value") and agent hints. Headers go before agent hints,
// which go before annotations.
var prefixHeaders = []struct{ header, field string }{
	{"X-Prefix-Id", "prefix_id"},
	{"X-Prefix-Total-Requests", "total_requests"},
	{"X-Prefix-Osl", "osl"},
	{"X-Prefix-Iat", "iat"},
}

// MaxPrefixID is the maximum length of a series' id, in bytes, because policies
// store ids.
const MaxPrefixID = 256

// levelBounds are the least medium and the least high number of a Level, as the
// NeMo Agent Toolkit's router has them.
type levelBounds struct{ medium, high float64 }

// OSLBounds and IATBounds are the bounds of Prefix.OSL, in tokens, and of
// Prefix.IAT, in ms.
var (
	OSLBounds = levelBounds{256, 1024}
	IATBounds = levelBounds{100, 500}
)

// Level returns the level of a number.
func (b levelBounds) Level(n float64) Level {
	switch {
	case n < b.medium:
		return LevelLow
	case n < b.high:
		return LevelMedium
	}
	return LevelHigh
}

// Parse reads a level's name in any case, or a number; anything else is medium.
func (b levelBounds) Parse(text string) Level {
	text = strings.ToUpper(strings.TrimSpace(text))
	n, err := strconv.ParseFloat(text, 64)
	switch {
	case text == "LOW":
		return LevelLow
	case text == "HIGH":
		return LevelHigh
	case err != nil || math.IsNaN(n):
		return LevelMedium
	}
	return b.Level(n)
}

// prefixAnnotations reads a series' hints from annotations; of several that say
// the same the first counts.
func (r *hintReader) prefixAnnotations(list []gjson.Result, into *Prefix) {
	for _, entry := range slices.Backward(list) {
		field, value, found := strings.Cut(entry.Str, ":")
		if found {
			r.prefixText(hint{"nvext.annotations", value}, field, into)
		}
	}
}

func (r *hintReader) prefixHeaders(header http.Header, into *Prefix) {
	for _, h := range prefixHeaders {
		if value := header.Get(h.header); value != "" {
			r.prefixText(hint{h.header, value}, h.field, into)
		}
	}
}

// prefixText takes the valid parts of a text, as that router does: a number of
// requests that is none is 1, a level that is none medium.
func (r *hintReader) prefixText(h hint, field string, into *Prefix) {
	switch field {
	case "prefix_id":
		into.ID = r.prefixID(h, h.text)
	case "total_requests":
		into.Total = 1
		if n, err := strconv.ParseInt(strings.TrimSpace(h.text), 10, 32); err == nil {
			into.Total = max(1, int(n))
		}
	case "osl":
		into.OSL = OSLBounds.Parse(h.text)
	case "iat":
		into.IAT = IATBounds.Parse(h.text)
	}
}

// prefixAgentHints reads a series' hints from agent hints, whose types must be
// right.
func (r *hintReader) prefixAgentHints(hints gjson.Result, into *Prefix) {
	for _, h := range prefixHeaders {
		value := hints.Get(h.field)
		given := hint{"nvext.agent_hints." + h.field, rawOf(value)}
		if given.text == "" {
			continue
		}
		switch h.field {
		case "prefix_id":
			if value.Type != gjson.String {
				r.fail(given, "a string")
			}
			into.ID = r.prefixID(given, value.Str)
		case "total_requests":
			into.Total = max(1, int(r.whole(given, 31)))
		case "osl":
			into.OSL = OSLBounds.Level(float64(r.whole(given, 31)))
		case "iat":
			into.IAT = IATBounds.Level(float64(r.whole(given, 31)))
		}
	}
}

func (r *hintReader) prefixID(h hint, id string) string {
	if len(id) > MaxPrefixID {
		r.fail(h, fmt.Sprintf("at most %d bytes long", MaxPrefixID))
	}
	return id
}

// Recorded is a Prefix in a file. Its id is a hash, because the client's id may
// contain anything and only equality matters later.
type Recorded struct {
	ID     string `json:"prefix_id"`
	Total  int    `json:"total_requests,omitempty"`
	Budget *int   `json:"reuse_budget,omitempty"`
	OSL    Level  `json:"osl"`
	IAT    Level  `json:"iat"`
}

// Record returns the hints of a record; nil if there are none.
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

// LevelNames are the names of the levels in a file.
var LevelNames = [...]string{LevelLow: "LOW", LevelMedium: "MEDIUM", LevelHigh: "HIGH"}

// MarshalText returns the level's name in a file.
func (l Level) MarshalText() ([]byte, error) { return []byte(LevelNames[l]), nil }

// UnmarshalText reads a level's name and refuses any other text.
func (l *Level) UnmarshalText(text []byte) error {
	at := slices.Index(LevelNames[:], string(text))
	if at < 0 {
		return fmt.Errorf("level %.40q: must be LOW, MEDIUM or HIGH", text)
	}
	*l = Level(at)
	return nil
}
