package main

import (
	"strings"
	"testing"
	"time"

	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/testkit"
	"kvrouter/internal/testkit/radixtest"
)

func TestCacheFlagsAreChecked(t *testing.T) {
	for _, test := range []struct{ args, want string }{
		{"--policy cache-threshold", ""},
		{"--policy variance --prefix-source approx --max-tree-size 1000 --eviction-interval 0.5 --no-cache-correction", ""},
		{"--policy variance --no-kv-events --prefix-source approx", ""},
		{"--policy cache-threshold --prefix-source events --router-predicted-ttl-secs 5", ""},
		{"--policy cache-threshold --cache-threshold 1.5", "--cache-threshold 1.5: give a share"},
		{"--policy cache-threshold --cache-threshold NaN", "--cache-threshold NaN: give a share"},
		{"--policy variance --variance-k=-1", "--variance-k -1: give a number"},
		{"--policy variance --balance-abs-threshold=-1", "--balance-abs-threshold -1"},
		{"--policy variance --balance-rel-threshold Inf", "--balance-rel-threshold"},
		{"--policy variance --prefix-source tree", "--prefix-source tree: give events or approx"},
		{"--policy kv --prefix-source approx", "requires --policy cache-threshold or variance"},
		{"--policy variance --no-kv-events --prefix-source events", "mutually exclusive"},
		{"--policy variance --router-predicted-ttl-secs 5 --prefix-source approx", "requires KV events"},
		{"--policy variance --no-kv-events --router-predicted-ttl-secs 5", "requires KV events"},
		{"--policy variance --max-tree-size 0", "--max-tree-size 0: give 1 to"},
		{"--policy variance --eviction-interval 0", "--eviction-interval 0: give more than 0"},
	} {
		_, err := parseServe(append([]string{"--engine=mocker"}, strings.Fields(test.args)...))
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.args, err, test.want)
		}
	}
	if _, err := parse(strings.Fields("simulate --trace t --concurrency 1 --policy round-robin,variance --prefix-source approx"), testMachine(t)); err != nil {
		t.Error(err)
	}
}

func TestThePrefixSourceDecidesWhetherEventsAreFollowed(t *testing.T) {
	for _, test := range []struct {
		policy, source string
		noEvents       bool
		trees, follows bool
	}{
		{"cache-threshold", "", false, false, true},
		{"cache-threshold", router.PrefixEvents, false, false, true},
		{"variance", router.PrefixApprox, false, true, false},
		{"variance", "", true, true, false},
		{"variance", router.PrefixApprox, true, true, false},
		{"kv", router.PrefixApprox, false, false, true}, // beside one of the two in a simulation
	} {
		config := Config{Scheduling: Scheduling{Policy: test.policy, Scoring: testkit.Defaults[policies.Settings](), Index: testkit.Defaults[router.IndexSettings]()}}
		config.Index.PrefixSource, config.Index.NoKVEvents = test.source, test.noEvents
		config.Index.MaxTreeSize = 1000
		index, _ := router.NewIndex(config.Index, config.Policy, config.Scoring.Settings, 64, time.Now)
		trees, is := index.(*radix.Trees)
		if is != test.trees || config.KVEvents() != test.follows {
			t.Errorf("%+v: trees %v, follows %v", test, is, config.KVEvents())
		}
		if !is {
			continue
		}
		if blocks, every := trees.Limits(); blocks != 15 || every != time.Minute {
			t.Errorf("trees of %d blocks, evicted every %v", blocks, every)
		}
	}
}

func TestWithoutOverlapWeightThereIsNoIndex(t *testing.T) {
	zero := 0.0
	knobs := testkit.Defaults[policies.Settings]()
	knobs.OverlapScoreWeight = &zero
	x, _ := router.NewIndex(testkit.Defaults[router.IndexSettings](), "kv", knobs.Settings, testkit.BlockSize, time.Now)
	if err := radixtest.Store(x, testkit.W0, 0, false, testkit.Chain(testkit.Prompt(1, 3))); err != nil {
		t.Fatal(err)
	}
	if got := x.Match(testkit.Prompt(1, 3), 3, 0, nil); got != nil {
		t.Errorf("matches %v", got)
	}
	y, _ := router.NewIndex(testkit.Defaults[router.IndexSettings](), "work", knobs.Settings, testkit.BlockSize, time.Now)
	if !y.CanMatch() {
		t.Error("policy work, which has no such weight, has no index")
	}
	config := Config{Scheduling: Scheduling{Policy: "kv", Scoring: knobs}}
	if config.KVEvents() {
		t.Error("events are followed that nothing uses")
	}
}

func TestReplicaSettingsAreChecked(t *testing.T) {
	for _, c := range []struct {
		args []string
		ok   bool
	}{
		{[]string{"--replica-sync", "--replica-peers=a:7100,[::1]:7101"}, true},
		{[]string{"--replica-sync"}, true},
		{[]string{"--replica-peers=a:7100"}, false},
		{[]string{"--replica-sync", "--replica-peers=a"}, false},
		{[]string{"--replica-sync", "--replica-peers=a:0"}, false},
		{[]string{"--replica-sync", "--replica-peers=:7100"}, false},
		{[]string{"--replica-sync", "--replica-sync-port=8000"}, false}, // the OpenAI port
	} {
		if _, err := parseServe(append([]string{"--engine=mocker"}, c.args...)); (err == nil) != c.ok {
			t.Errorf("%v: %v", c.args, err)
		}
	}
}
