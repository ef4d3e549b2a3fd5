package workers

import (
	"strings"
	"testing"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/testkit"
)

// TestHowACacheIsKnown: exactly only while all events since the worker's start have been followed.
func TestHowACacheIsKnown(t *testing.T) {
	follows := Settings{KVEvents: true, Assumes: true}
	const late = time.Minute // longer than unheardAfter
	for name, c := range map[string]struct {
		settings Settings
		silent   bool          // no events are followed
		age      time.Duration // of the incarnation
		stats    func(*events.Stats)
		want     kv.Knowledge
		reason   string // its beginning
	}{
		"connected, with the whole history": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Batches.Store(3) }, want: kv.Exact},
		"connected, nothing published yet":  {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true) }, want: kv.Exact},
		"connecting":                        {settings: follows, want: kv.Exact},
		"not connected for long":            {settings: follows, age: late, want: kv.Approximate, reason: "no connection to its KV events at tcp://"},
		"the history is incomplete": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Cold.Store(true); s.Batches.Store(3) },
			want: kv.Approximate, reason: "its KV events do not go back"},
		"the history is not known yet": {settings: follows, age: late, stats: func(s *events.Stats) { s.Connected.Store(true); s.Cold.Store(true) }, want: kv.Exact},
		"blocks of another size": {settings: follows, age: late, stats: func(s *events.Stats) {
			s.Connected.Store(true)
			s.Cold.Store(true)
			s.Batches.Store(3)
			s.BlockSizeMismatch.Store(1)
		}, want: kv.Approximate, reason: "the blocks of its KV events"},
		"blocks of another size, known again": {settings: follows, age: late, stats: func(s *events.Stats) {
			s.Connected.Store(true)
			s.Batches.Store(3)
			s.BlockSizeMismatch.Store(1)
		}, want: kv.Exact},
		"no events":                      {settings: follows, silent: true, want: kv.Approximate, reason: "no KV events of it"},
		"events are off":                 {settings: Settings{Assumes: true}, want: kv.Approximate, reason: "the router does not follow KV events"},
		"the policy uses no prefixes":    {settings: Settings{}, want: kv.LoadOnly, reason: "the policy does not use"},
		"events without what is assumed": {settings: Settings{KVEvents: true}, silent: true, want: kv.Approximate, reason: "no KV events of it"},
	} {
		t.Run(name, func(t *testing.T) {
			var log testkit.LogBuffer
			f, key, _ := comparedFleet(t, &log)
			c.settings.BlockSize = testkit.BlockSize
			f.cfg = c.settings
			w := f.workers[0]
			if w.streams[key].Src.Endpoint = "tcp://127.0.0.1:1"; c.silent {
				clear(w.streams)
			} else if c.stats != nil {
				c.stats(w.streams[key].Stats())
			}
			in := &incarnation{f: f, w: w, began: time.Now().Add(-c.age), blockSize: 16, targets: []kv.Target{{Key: key}}}
			known, reason := in.knows(key)
			if known != c.want || !strings.HasPrefix(reason, c.reason) || (reason == "") != (c.want == kv.Exact) {
				t.Errorf("%s: %q; want %s: %q", known, reason, c.want, c.reason)
			}
			if changed := in.reviseTargets(); changed != (c.want != kv.Exact) || in.targets[0].Known != c.want {
				t.Errorf("target known %s, changed: %t", in.targets[0].Known, changed)
			}
			shown := f.Workers()[0].Cache
			if shown.Known != c.want || shown.Reason != reason || shown.BlockSize != 16 || (shown.Remedy != "") != (c.want == kv.Approximate && c.settings.KVEvents) {
				t.Errorf("status %+v", shown)
			}
			if in.reviseTargets() || f.Workers()[0].Cache != shown {
				t.Errorf("nothing has changed, but %+v", f.Workers()[0].Cache)
			}
		})
	}
}

// TestAWorkerIsKnownAsItsLeastKnownRank, while each rank is routed to as it is known itself.
func TestAWorkerIsKnownAsItsLeastKnownRank(t *testing.T) {
	var log testkit.LogBuffer
	f, key, _ := comparedFleet(t, &log)
	f.cfg.KVEvents, f.cfg.Assumes = true, true
	w := f.workers[0]
	w.streams[key].Stats().Connected.Store(true)
	other := kv.WorkerKey{Worker: key.Worker, Rank: 1} // of which no events are followed
	in := &incarnation{f: f, w: w, began: time.Now(), blockSize: 16, targets: []kv.Target{{Key: key}, {Key: other}}}
	in.reviseTargets()
	if in.targets[0].Known != kv.Exact || in.targets[1].Known != kv.Approximate || f.Workers()[0].Cache.Known != kv.Approximate {
		t.Errorf("%+v, %+v", in.targets, f.Workers()[0].Cache)
	}
}
