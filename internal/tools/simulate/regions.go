package simulate

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// region is a place where users are, and cells may be.
type region struct {
	name   string
	offset float64         // hours by which its local time is ahead of UTC
	rtts   []time.Duration // of a round trip to each region
}

// Bounds of a matrix of round trips.
const (
	maxRegions = 256
	maxMatrix  = 1 << 20 // bytes of the file
	maxRTT     = 10_000. // ms
	maxOffset  = 14.     // hours
)

// readRegions reads a file of parseRegions.
func readRegions(name string) ([]region, error) {
	file, err := os.Open(name)
	if err != nil {
		return nil, fmt.Errorf("--rtt-matrix: %w", err)
	}
	defer file.Close()
	regions, err := parseRegions(file)
	if err != nil {
		return nil, fmt.Errorf("--rtt-matrix %s: %w", name, err)
	}
	return regions, nil
}

// parseRegions reads a matrix of round trips. Each line is a region: its name, the hours by which
// its local time is ahead of UTC, and the ms of a round trip to each region, in the order of the
// lines. Fields are separated by blanks or commas; a # begins a comment.
func parseRegions(from io.Reader) (regions []region, err error) {
	text, err := io.ReadAll(io.LimitReader(from, maxMatrix+1))
	switch {
	case err != nil:
		return nil, err
	case len(text) > maxMatrix:
		return nil, fmt.Errorf("more than %d bytes", maxMatrix)
	}
	for number, line := range strings.Split(string(text), "\n") {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.FieldsFunc(line, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
		if len(fields) == 0 {
			continue
		}
		r, err := parseRegion(fields)
		if err != nil {
			return nil, fmt.Errorf("line %d: %w", number+1, err)
		}
		if regions = append(regions, r); len(regions) > maxRegions {
			return nil, fmt.Errorf("more than %d regions", maxRegions)
		}
	}
	if len(regions) == 0 {
		return nil, errors.New("it has no regions; a line is a name, hours ahead of UTC, and the ms to each region")
	}
	for _, r := range regions {
		if len(r.rtts) != len(regions) {
			return nil, fmt.Errorf("region %s has %d round trips: give one to each of the %d regions, itself included", r.name, len(r.rtts),
				len(regions))
		}
	}
	return regions, nil
}

func parseRegion(fields []string) (r region, err error) {
	if len(fields) < 3 {
		return r, fmt.Errorf("%d fields; a line is a name, hours ahead of UTC, and the ms to each region", len(fields))
	}
	r.name = fields[0]
	if r.offset, err = strconv.ParseFloat(fields[1], 64); err != nil || !(math.Abs(r.offset) <= maxOffset) {
		return r, fmt.Errorf("region %q is %q hours ahead of UTC: give %v to %v", r.name, fields[1], -maxOffset, maxOffset)
	}
	for _, field := range fields[2:] {
		ms, err := strconv.ParseFloat(field, 64)
		if err != nil || !(ms >= 0 && ms <= maxRTT) {
			return r, fmt.Errorf("region %q has a round trip of %q: give 0 to %v ms", r.name, field, maxRTT)
		}
		r.rtts = append(r.rtts, time.Duration(ms*float64(time.Millisecond)))
	}
	return r, nil
}

// dayRequest is a request of a day's traffic. Its Next is not used.
type dayRequest struct {
	TraceRequest
	origin int         // region of its client
	next   *dayRequest // next turn of the conversation; nil: none
}

const (
	// busiestHour is the local time at which a region has most requests.
	busiestHour = 15
	// localShare is the share of the conversations whose prefix only their region uses.
	localShare = 0.5
)

// activity returns the rate of a region's requests, where 1 is the mean of the day: swing is how
// far it rises above and falls below that, and at which share of the day it is in UTC.
func (r *region) activity(at, swing float64) float64 {
	return 1 + swing*math.Cos(2*math.Pi*(at+(r.offset-busiestHour)/24))
}

// traffic makes up the conversations of a day in the regions: their first turns in the order of
// their start. One seed always gives the same. rate is the mean of the conversations that start
// in a second. A conversation ends before a turn whose prompt and answer are more than longest
// tokens; it fails if that is the first one.
func (s *CellSettings) traffic(shape SyntheticSettings, regions []region, rate float64, seed uint64, longest int) ([]dayRequest, error) {
	random := rand.New(rand.NewPCG(seed, 8))
	popularity := zipfShares(shape.Groups, shape.Skew)
	owners := shape.Groups * (1 + len(regions)) // of hashes: groups of all regions, of each one, and then the conversations
	var starts []dayRequest
	most := rate * (1 + s.DaySwing)
	for at := random.ExpFloat64() / most; at < s.Day.Seconds(); at += random.ExpFloat64() / most {
		origin := random.IntN(len(regions))
		if random.Float64()*(1+s.DaySwing) >= regions[origin].activity(at/s.Day.Seconds(), s.DaySwing) {
			continue
		}
		group, _ := slices.BinarySearch(popularity, random.Float64())
		if random.Float64() < localShare {
			group += shape.Groups * (1 + origin)
		}
		turns := shape.turns(random, longest)
		if len(turns) == 0 {
			return nil, errors.New("a conversation of prefix, user message and answer does not fit the KV cache; give less " +
				"--synthetic-prefix-tokens, -user-tokens or -output-tokens, or more --mock num-gpu-blocks")
		}
		hashes := syntheticHashes(group, owners+len(starts), shape.PrefixTokens, turns[len(turns)-1].known)
		leaves, to := len(turns), origin // the turn from which on it is sent from another region
		if random.Float64() < s.Travel && len(turns) > 1 && len(regions) > 1 {
			leaves, to = 1+random.IntN(len(turns)-1), (origin+1+random.IntN(len(regions)-1))%len(regions)
		}
		requests := make([]dayRequest, len(turns))
		for i := range turns {
			requests[i] = dayRequest{TraceRequest: turns[i], origin: origin}
			requests[i].Hashes, requests[i].Part = hashes, syntheticPart
			if i >= leaves {
				requests[i].origin = to
			}
			if i > 0 {
				requests[i-1].next = &requests[i]
			}
		}
		requests[0].Arrival = time.Duration(at * float64(time.Second))
		starts = append(starts, requests[0])
	}
	if len(starts) == 0 {
		return nil, errors.New("the day has no request: give more --day or --day-load")
	}
	return starts, nil
}
