package test

import (
	"testing"
	"time"
)

// TestOneKeysFailuresStayWithThatKey: the requests of one of two keys fail at every worker.
// With KVROUTER_CHAOS every policy meets every poison, else a sample does.
func TestOneKeysFailuresStayWithThatKey(t *testing.T) {
	t.Parallel()
	if chaosAll() {
		RunPoisons(t, PlainProgram, PoisonCases(true), 8*time.Second, nil)
		return
	}
	RunPoisons(t, Program, PoisonCases(false), 2500*time.Millisecond, nil)
}
