package policy

import "kvrouter/internal/base/kv"

// assumedRecord compares the prompt tokens that count as cached without an event with the engine's
// counter of cached ones, where answers do not report them.
type assumedRecord struct {
	reports   bool    // answers report them
	expecting float64 // tokens of requests without a first token
	expected  float64 // those of requests that got it since the counter was read
	ahead     float64 // tokens that the counter had then, of requests without a first token
	behind    float64 // tokens that it did not have then, of requests with one
	hits      float64 // the counter, as last read
	known     bool    // it has been
	found, of float64 // tokens that it showed of those expected, of late
}

// leastAssumed is the number of expected tokens from which on the counter says something.
const leastAssumed = 4096

// Assumed notes the share of the blocks expected on the device that an answer reports.
func (t *Tiers) Assumed(share float64) {
	if !t.assumed.reports {
		t.assumed.reports, t.missing[kv.Device] = true, 0
	}
	t.came(kv.Device, share)
}

// Expect notes a request that is expected to find that many tokens on the device.
func (t *Tiers) Expect(tokens int) { t.assumed.expecting += float64(tokens) }

// Expected ends Expect of the same tokens. computed: the request has its first token.
func (t *Tiers) Expected(tokens int, computed bool) {
	t.assumed.expecting -= float64(tokens)
	if computed {
		t.assumed.expected += float64(tokens)
	}
}

// countHits takes over the engine's counter of cached tokens; less than 0: there is none. Engines count
// before or just after the first token, and for other clients, too. So what the counter shows is the most
// that can have been right.
func (t *Tiers) countHits(hits float64) {
	a := &t.assumed
	if hits < 0 {
		return
	}
	came := hits - a.hits + a.ahead
	first := !a.known || hits < a.hits // of a new process
	a.known, a.hits = true, hits
	if first {
		a.expected, a.ahead, a.behind = 0, a.expecting, 0
		return
	}
	due := a.expected + a.behind
	if due > 0 {
		a.found, a.of = a.found*(1-tierForgetRate)+min(came, due), a.of*(1-tierForgetRate)+a.expected
	}
	a.ahead, a.behind, a.expected = min(max(0, came-due), a.expecting), min(max(0, due-came), a.expected), 0
	if !a.reports && a.of >= leastAssumed {
		t.asked[kv.Device] = true
		t.missing[kv.Device] = max(0, 1-a.found/a.of)
	}
}
