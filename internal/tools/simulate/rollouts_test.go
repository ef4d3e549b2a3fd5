package simulate

import (
	"reflect"
	"testing"

	"kvrouter/internal/testkit"
)

// stepOf is a simulation of a step of a few long trajectories over workers whose caches are too small for all.
func stepOf(t *testing.T, policy string, change func(*Simulation)) *Report {
	t.Helper()
	settings := testkit.Defaults[RolloutSettings]()
	settings.Prompts, settings.Samples, settings.MinTurns, settings.MaxTurns = 12, 6, 10, 60
	requests, err := rolloutStep(settings, 1, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	s := simulation(requests, policy, 0)
	s.Workers, s.Concurrency = 4, len(requests)
	s.Engine.Blocks = 4096
	if change != nil {
		change(&s)
	}
	report, err := s.Run()
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func TestTrajectoriesOfAPromptShareIt(t *testing.T) {
	settings := testkit.Defaults[RolloutSettings]()
	settings.Prompts, settings.Samples, settings.MinTurns, settings.MaxTurns = 3, 4, 2, 20
	first, err := rolloutStep(settings, 7, 1<<20)
	if err != nil || len(first) != 12 {
		t.Fatalf("%d trajectories, %v", len(first), err)
	}
	again, _ := rolloutStep(settings, 7, 1<<20)
	if !reflect.DeepEqual(first, again) {
		t.Error("one seed gave two steps")
	}
	ids := map[string]bool{}
	for i := range first {
		ids[first[i].Hints.ID] = true
		whole := first[i].Prompt / syntheticPart
		of := &first[i-i%4]
		if first[i].Prompt != of.Prompt || !reflect.DeepEqual(first[i].Hashes[:whole], of.Hashes[:whole]) {
			t.Errorf("trajectory %d does not have the prompt of trajectory %d", i, i-i%4)
		}
		if rest := len(first[i].Hashes); i%4 > 0 && rest > whole && len(of.Hashes) > whole && first[i].Hashes[rest-1] == of.Hashes[len(of.Hashes)-1] {
			t.Errorf("trajectories %d and %d end alike", i-i%4, i)
		}
		turns := 0
		for turn := &first[i]; turn != nil; turn = turn.Next {
			if next := turn.Next; next != nil && next.Prompt <= turn.Prompt+turn.Output {
				t.Errorf("trajectory %d: a turn of %d and %d tokens, then a prompt of %d", i, turn.Prompt, turn.Output, next.Prompt)
			}
			turns++
		}
		if turns < 2 || turns > 20 {
			t.Errorf("trajectory %d has %d turns", i, turns)
		}
	}
	if len(ids) != 12 {
		t.Errorf("%d ids", len(ids))
	}
	if _, err := rolloutStep(settings, 7, 10); err == nil {
		t.Error("a prompt that does not fit was taken")
	}
}

// TestASeriesStaysWithPoliciesOfTrainers compares how much of the prompts each finds, with room for all.
func TestASeriesStaysWithPoliciesOfTrainers(t *testing.T) {
	room := func(s *Simulation) { s.Engine.Blocks = 1 << 16 }
	spread := stepOf(t, "round-robin", room)
	for _, name := range []string{StickyLeastLoaded, ConsistentHash, "work"} {
		if got := stepOf(t, name, room); got.Reuse < 0.9 || got.Reuse <= spread.Reuse {
			t.Errorf("%s finds %.3f of the prompts, round robin %.3f", name, got.Reuse, spread.Reuse)
		}
	}
}

func TestAStepIsShorterThanWithStickinessByCount(t *testing.T) {
	work, sticky := stepOf(t, "work", nil), stepOf(t, StickyLeastLoaded, nil)
	if work.MakespanS > sticky.MakespanS {
		t.Errorf("%.1f s, with sticky-least-loaded %.1f s", work.MakespanS, sticky.MakespanS)
	}
}

// TestUpdatesOfWeightsAreNoFaults pauses the workers one after the other, or all together, and empties their caches.
func TestUpdatesOfWeightsAreNoFaults(t *testing.T) {
	for name, faults := range map[string][]string{
		"rolling":   {"worker=0 at=20s for=5s kind=update", "worker=1 at=25s for=5s kind=update", "worker=2 at=30s for=5s kind=update", "worker=3 at=35s for=5s kind=update"},
		"colocated": {"worker=0 at=20s for=5s kind=update", "worker=1 at=20s for=5s kind=update", "worker=2 at=20s for=5s kind=update", "worker=3 at=20s for=5s kind=update"},
		"paused":    {"worker=0 at=20s for=90s kind=pause", "worker=1 at=20s for=90s kind=pause"},
	} {
		t.Run(name, func(t *testing.T) {
			room := func(s *Simulation) { s.Engine.Blocks, s.Faults = 1<<16, faults }
			got, without := stepOf(t, "work", room), stepOf(t, "work", func(s *Simulation) { s.Engine.Blocks = 1 << 16 })
			if len(got.Lost) > 0 || got.Requests != without.Requests {
				t.Errorf("%d of %d requests, lost %v", got.Requests, without.Requests, got.Lost)
			}
			if got.PredictionError > without.PredictionError+1 {
				t.Errorf("predictions are wrong by %.1f tokens, without by %.1f", got.PredictionError, without.PredictionError)
			}
			for _, f := range got.Faults {
				if f.KnownS != nil {
					t.Errorf("worker %d was ejected", f.Worker)
				}
			}
		})
	}
}
