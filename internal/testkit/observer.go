package testkit

import (
	"time"

	"kvrouter/internal/base/kv"
)

// SilentObserver is a proxy.Observer that records nothing.
type SilentObserver struct{}

// Retried does nothing.
func (SilentObserver) Retried(uint64) {}

// Migrated does nothing.
func (SilentObserver) Migrated(string) {}

// Hedged implements proxy.Observer.
func (SilentObserver) Hedged(string) {}

// RetryDenied does nothing.
func (SilentObserver) RetryDenied(string) {}

// InterToken does nothing.
func (SilentObserver) InterToken(string, time.Duration, int) {}

// StayedWhole does nothing.
func (SilentObserver) StayedWhole(string) {}

// Prefilled does nothing.
func (SilentObserver) Prefilled(kv.Kind, time.Duration) {}

// HandedOver does nothing.
func (SilentObserver) HandedOver(kv.Kind, time.Duration) {}

// SharedEnded does nothing.
func (SilentObserver) SharedEnded(kv.Kind, string, time.Duration) {}
