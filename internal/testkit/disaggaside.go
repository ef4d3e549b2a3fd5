package testkit

import (
	"kvrouter/internal/kv"
	"time"
)

// unobserved is told of what happens and keeps nothing.
type Unobserved struct{}

func (Unobserved) Retried(uint64) {}

func (Unobserved) EngineFailed() {}

func (Unobserved) InterToken(string, time.Duration, int) {}

func (Unobserved) StayedWhole(string) {}

func (Unobserved) Prefilled(kv.Kind, time.Duration) {}

func (Unobserved) HandedOver(kv.Kind, time.Duration) {}

func (Unobserved) SharedEnded(kv.Kind, string, time.Duration) {}
