package health

import "time"

const (
	// avoidMisses is the number of health checks in a row without an answer, and avoidAfter the time
	// of a longer one, from which new requests avoid a worker. downMisses is the number from which
	// it is down if its connections break, or nothing has ever answered.
	avoidMisses, downMisses = 2, 3
	avoidAfter              = 4 * time.Second
	// checkFactor is the allowed multiple of the time of the last answer to a check.
	checkFactor = 3
)

// Misses are the health checks in a row that a worker has not answered well.
type Misses struct {
	Count int
	Since time.Time // when the first was sent; meaningless if there is none
}

// Add adds one that was sent at that time.
func (m *Misses) Add(sent time.Time) {
	if m.Count++; m.Count == 1 {
		m.Since = sent
	}
}

// Avoid reports whether new requests avoid the worker, if others are there.
func (m *Misses) Avoid(now time.Time) bool {
	return m.Count >= avoidMisses || m.Count > 0 && now.Sub(m.Since) >= avoidAfter
}

// Down reports whether the worker is down. late means that the last check was not answered in time:
// that proves nothing, since a busy server takes seconds for any answer, and the worker is down
// after silence without any sign of life, of which lived is the last one (0: never). Until busy its
// requests explain the silence. One whose connections break is down after some checks, unless it
// lives. One of which nothing has ever answered (not met) cannot be busy with answers.
func (m *Misses) Down(late, met bool, lived, busy time.Time, silence time.Duration, now time.Time) bool {
	switch {
	case !met:
		return m.Count >= downMisses || late && m.Count >= avoidMisses
	case !late:
		return m.Count >= downMisses && !lived.After(m.Since)
	}
	silent := min(now.Sub(lived), now.Sub(m.Since), now.Sub(busy))
	return silence > 0 && silent >= silence
}

// NextLimit returns the time that a worker gets for its next health check, at most most: double the
// last one if that was not answered in time, otherwise a multiple of what the answer took.
func NextLimit(last, took time.Duration, late bool, most time.Duration) time.Duration {
	if late {
		return min(2*last, most)
	}
	return min(checkFactor*took, most)
}
