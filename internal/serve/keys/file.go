package keys

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/textfile"
)

// entry is one key of the file.
type entry struct {
	name   string
	sum    [sha256.Size]byte // of the key
	limits limits
	salt   bool
	trust  *bool // nil: as set by the flags
	terms  Terms
}

const (
	// mostKeys is the maximum number of keys of a file.
	mostKeys = 10_000
	// fieldsOfKey is the maximum number of YAML entries of a key, including its limits and
	// itself.
	fieldsOfKey = 16
	// mostObjective is the maximum objective of the time to the first token, and to each further
	// one.
	mostObjective = 24 * time.Hour
	// mostOf is the maximum value of a limit.
	mostOf = 1 << 31
)

// nameForm is the form of a name, which becomes a label of metrics.
var nameForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// place is the line and column that begin an error of the YAML library. The rest of
// such an error may show a key.
var place = regexp.MustCompile(`^\[(\d+):\d+\]`)

// parse reads a file of keys. Its errors name the entry and never show a key.
func parse(text []byte) (entries []entry, err error) {
	defer func() {
		if recover() != nil { // the library's text might show a key
			entries, err = nil, errors.New("not valid YAML")
		}
	}()
	if err := textfile.BoundYAML(text, fieldsOfKey*mostKeys); err != nil {
		return nil, err
	}
	var list []map[string]any
	if err := yaml.Unmarshal(text, &list); err != nil {
		at := ""
		if found := place.FindStringSubmatch(yaml.FormatError(err, false, false)); found != nil {
			at = "line " + found[1] + ": "
		}
		return nil, errors.New(at + "not a YAML list of keys with their names and values")
	}
	if len(list) > mostKeys {
		return nil, fmt.Errorf("%d keys; at most %d are allowed", len(list), mostKeys)
	}
	names, sums := map[string]int{}, map[[sha256.Size]byte]int{}
	for i, fields := range list {
		e, err := parseEntry(fields)
		if err != nil {
			return nil, fmt.Errorf("entry %d: %w", i+1, err)
		}
		if other := names[e.name]; other > 0 {
			return nil, fmt.Errorf("entry %d: entry %d has the same name %s", i+1, other, e.name)
		}
		if other := sums[e.sum]; other > 0 {
			return nil, fmt.Errorf("entry %d (%s): entry %d has the same key", i+1, e.name, other)
		}
		names[e.name], sums[e.sum] = i+1, i+1
		entries = append(entries, e)
	}
	return entries, nil
}

// parseEntry reads one key.
func parseEntry(fields map[string]any) (e entry, err error) {
	var ok, keyed bool
	if e.name, ok = fields["name"].(string); !ok || !nameForm.MatchString(e.name) || strings.HasPrefix(e.name, givenPrefix) {
		return e, fmt.Errorf("name: must be up to 64 letters, digits, dots, dashes and underscores, and must not start with %s", givenPrefix)
	}
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		value, bad := fields[field], ""
		switch field {
		case "name":
		case "key":
			key, ok := value.(string)
			if !ok || key == "" || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
				bad = "must be a quoted string of printable characters without spaces"
			}
			e.sum, keyed = sha256.Sum256([]byte(key)), true
		case "key-sha256":
			text, _ := value.(string)
			sum, err := hex.DecodeString(text)
			if err != nil || len(sum) != sha256.Size || fields["key"] != nil {
				bad = "must be the key's SHA-256 as 64 hexadecimal digits in quotes, without the field key"
			}
			keyed = copy(e.sum[:], sum) == sha256.Size
		case "salt":
			if e.salt, ok = value.(bool); !ok {
				bad = "must be true or false"
			}
		case "trust-hints":
			trust, ok := value.(bool)
			if e.trust = &trust; !ok {
				bad = "must be true or false"
			}
		case "limits":
			given, ok := value.(map[string]any)
			if !ok {
				bad = "must be a map of limits"
			} else if e.limits, err = parseLimits(given); err != nil {
				bad = err.Error()
			}
		case "weight":
			if e.terms.Weight, ok = number(value); !ok || e.terms.Weight < fair.LeastWeight || e.terms.Weight > fair.MostWeight {
				bad = fmt.Sprintf("must be a number from %v to %v", fair.LeastWeight, fair.MostWeight)
			}
		case "class":
			name, _ := value.(string)
			if e.terms.Class, ok = fair.ClassOf(name); !ok {
				bad = "must be interactive, standard or batch"
			}
		case "ttft-ms":
			ms, ok := number(value)
			if e.terms.TTFT = time.Duration(ms) * time.Millisecond; !ok || ms != math.Trunc(ms) || e.terms.TTFT > mostObjective {
				bad = fmt.Sprintf("must be a whole number of milliseconds above 0 and at most %d", mostObjective.Milliseconds())
			}
		case "tpot-ms":
			ms, ok := number(value)
			if e.terms.TPOT = time.Duration(ms * float64(time.Millisecond)); !ok || e.terms.TPOT <= 0 || e.terms.TPOT > mostObjective {
				bad = fmt.Sprintf("must be a number of milliseconds above 0 and at most %d", mostObjective.Milliseconds())
			}
		case "sheddable":
			if e.terms.Sheddable, ok = value.(bool); !ok {
				bad = "must be true or false"
			}
		default:
			// which may be a key
			return e, fmt.Errorf("%s: unknown field; the fields are name, key, key-sha256, limits, salt, trust-hints, weight, class, ttft-ms, "+
				"tpot-ms and sheddable", e.name)
		}
		if bad != "" {
			return e, fmt.Errorf("%s: %s: %s", e.name, field, bad)
		}
	}
	if !keyed {
		return e, fmt.Errorf("%s: key or key-sha256 is required", e.name)
	}
	return e, nil
}

// parseLimits reads the limits of one key.
func parseLimits(given map[string]any) (l limits, err error) {
	for _, field := range slices.Sorted(maps.Keys(given)) {
		n, ok := number(given[field])
		whole := n == math.Trunc(n)
		switch field {
		case "requests-per-second":
			l.requests, whole = n, true
		case "burst":
			l.burst = int(n)
		case "concurrent-requests":
			l.concurrent = int(n)
		case "prompt-tokens-per-minute":
			l.promptTokens = int(n)
		default:
			return l, errors.New("unknown limit; the limits are requests-per-second, burst, concurrent-requests and prompt-tokens-per-minute")
		}
		if !ok || !whole {
			return l, fmt.Errorf("%s: must be a number above 0 and at most %d, and a whole number except for requests-per-second", field,
				int64(mostOf))
		}
	}
	switch {
	case l.requests == 0 && l.burst > 0:
		return l, errors.New("burst: requires requests-per-second")
	case l.requests > 0 && l.burst == 0:
		l.burst = max(1, int(math.Ceil(l.requests)))
	}
	return l, nil
}

// number reads a number above 0 and at most mostOf; otherwise ok is false.
func number(value any) (n float64, ok bool) {
	switch v := value.(type) {
	case uint64:
		n = float64(v)
	case int64:
		n = float64(v)
	case int:
		n = float64(v)
	case float64:
		n = v
	}
	if !(n > 0 && n <= mostOf) {
		return 0, false
	}
	return n, true
}
