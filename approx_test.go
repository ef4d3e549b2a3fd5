package main

import (
	"kvrouter/internal/policy"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/testkit"
	"testing"
	"time"
)

func TestWithoutOverlapWeightThereIsNoIndex(t *testing.T) {
	zero := 0.0
	knobs := policy.DefaultSettings()
	knobs.OverlapScoreWeight = &zero
	x := router.NewIndex(router.DefaultIndexSettings(), "kv", knobs, testkit.TestBlock, time.Now)
	if err := x.Store(testkit.W0, 0, false, testkit.Chain(testkit.Prompt(1, 3))); err != nil {
		t.Fatal(err)
	}
	if got := x.Match(testkit.Prompt(1, 3), nil); got != nil {
		t.Errorf("matches %v", got)
	}
	if _, exact := router.NewIndex(router.DefaultIndexSettings(), "work", knobs, testkit.TestBlock, time.Now).(*radix.Tree); !exact {
		t.Error("policy work, which has no such weight, has no index")
	}
	config := Config{Policy: "kv", Scoring: knobs}
	if config.KVEvents() {
		t.Error("events are followed that nothing uses")
	}
}
