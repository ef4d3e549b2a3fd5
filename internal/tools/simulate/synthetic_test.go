package simulate

import (
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

func syntheticSettings() SyntheticSettings {
	return SyntheticSettings{
		Conversations: 300, Turns: 4, ThinkTime: 5 * time.Second, Groups: 5, Skew: 1,
		PrefixTokens: 1000, UserTokens: 100, OutputTokens: 150,
	}
}

func mustChat(t *testing.T, settings SyntheticSettings, seed uint64) []TraceRequest {
	t.Helper()
	requests, err := SyntheticChat(settings, seed, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	return requests
}

func TestSyntheticTurnsRepeatAllThatWasSaid(t *testing.T) {
	for _, r := range mustChat(t, syntheticSettings(), 1) {
		for turn := &r; turn.Next != nil; turn = turn.Next {
			_, said := turn.Blocks(64)
			prompt, all := turn.Next.Blocks(64)
			if want := (turn.Prompt + turn.Output) / 64; len(said) != want || turn.Next.Prompt <= turn.Prompt+turn.Output {
				t.Fatalf("%d blocks of %d + %d tokens, then a prompt of %d", len(said), turn.Prompt, turn.Output, turn.Next.Prompt)
			}
			if len(prompt) != turn.Next.Prompt/64 || !slices.Equal(all[:len(said)], said) {
				t.Fatalf("a turn of %d blocks does not begin with the %d before", len(prompt), len(said))
			}
		}
	}
}

func TestSyntheticConversationsShareTheirGroupsPrefix(t *testing.T) {
	requests := mustChat(t, syntheticSettings(), 1)
	prefixes, after := map[uint64]bool{}, map[uint64]bool{}
	long := 0
	for _, r := range requests {
		const inside = 1000 / 64
		_, blocks := r.Blocks(64)
		prefixes[blocks[inside-1].Engine] = true
		if len(blocks) > inside {
			long++
			after[blocks[inside].Engine] = true
		}
	}
	if len(prefixes) != 5 || len(after) != long || long < 100 {
		t.Errorf("%d prefixes for 5 groups, %d blocks after them for %d conversations", len(prefixes), len(after), long)
	}
}

func TestSyntheticSizesHaveTheirMeans(t *testing.T) {
	settings := syntheticSettings()
	settings.Conversations, settings.Rate = 20_000, 4
	requests := mustChat(t, settings, 1)
	var turns, user, output, think float64
	groups := make([]float64, settings.Groups)
	for _, r := range requests {
		groups[r.Hashes[0]>>32]++
		before := settings.PrefixTokens
		for turn := &r; turn != nil; turn = turn.Next {
			turns++
			user += float64(turn.Prompt - before)
			output += float64(turn.Output)
			think += turn.Think.Seconds()
			before = turn.Prompt + turn.Output
		}
	}
	within := func(what string, got, want float64) {
		if math.Abs(got/want-1) > 0.03 {
			t.Errorf("%s: mean %v, want %v", what, got, want)
		}
	}
	n := float64(len(requests))
	within("turns", turns/n, 4)
	within("user tokens", user/turns, 100)
	within("output tokens", output/turns, 150)
	within("think time, s", think/turns, 5)
	within("conversations a second", n/requests[len(requests)-1].Arrival.Seconds(), 4)
	for i, count := range groups {
		within("share of a group", count/n, 1/float64(i+1)/(1+1/2.+1/3.+1/4.+1/5.))
	}
}

func TestSyntheticConversationsFollowFromTheSeed(t *testing.T) {
	settings := syntheticSettings()
	first := mustChat(t, settings, 1)
	if !reflect.DeepEqual(first, mustChat(t, settings, 1)) || reflect.DeepEqual(first, mustChat(t, settings, 2)) {
		t.Error("conversations do not follow from the seed")
	}
	settings.Rate = 3
	timed := mustChat(t, settings, 1)
	for i := range timed {
		if i > 0 && timed[i].Arrival < timed[i-1].Arrival {
			t.Fatalf("conversation %d begins before the one before", i)
		}
		timed[i].Arrival = 0
	}
	if !reflect.DeepEqual(first, timed) {
		t.Error("conversations change with their rate")
	}
}

func TestSyntheticConversationsFitTheCache(t *testing.T) {
	settings := syntheticSettings()
	requests, err := SyntheticChat(settings, 1, 3000)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range requests {
		for turn := &r; turn != nil; turn = turn.Next {
			if turn.Prompt+turn.Output > 3000 {
				t.Fatalf("a turn of %d + %d tokens", turn.Prompt, turn.Output)
			}
		}
	}
	if _, err := SyntheticChat(settings, 1, 999); err == nil || !strings.Contains(err.Error(), "--synthetic-prefix-tokens") {
		t.Errorf("no turn fits: error %v", err)
	}
}

func TestATurnIsSentWhenItsUserHasReadAndThought(t *testing.T) {
	s := simulation(mustChat(t, syntheticSettings(), 1), "kv", 0)
	s.Workers, s.Concurrency = 2, 20
	run := finishedRun(t, s)
	flights := map[*TraceRequest]*flight{}
	for _, f := range run.ledger {
		flights[f.simulated.request] = f
	}
	type change struct {
		at   time.Duration
		open int
	}
	var changes []change
	stayed := 0
	for i := range s.Requests {
		f := flights[&s.Requests[i]]
		changes = append(changes, change{f.sent, 1})
		for f.simulated.request.Next != nil {
			next := flights[f.simulated.request.Next]
			if next.sent != f.end+f.simulated.request.Think {
				t.Fatalf("answer ended at %v, %v of thought, next turn at %v", f.end, f.simulated.request.Think, next.sent)
			}
			if next.worker == f.worker {
				stayed++
				// The last token of an answer has never been computed.
				if want := (f.Prompt + f.Output - 1) / 64 * 64; next.Cached != want {
					t.Errorf("a turn found %d tokens of %d that its worker had computed", next.Cached, want)
				}
			}
			f = next
		}
		changes = append(changes, change{f.end, -1})
	}
	slices.SortFunc(changes, func(a, b change) int {
		if a.at != b.at {
			return int(a.at - b.at)
		}
		return a.open - b.open
	})
	open, most := 0, 0
	for _, c := range changes {
		open += c.open
		most = max(most, open)
	}
	if most != s.Concurrency || run.open != 0 {
		t.Errorf("up to %d conversations in flight, %d left", most, run.open)
	}
	if stayed == 0 {
		t.Error("no turn went to the worker of the one before")
	}
}

func TestGroupsMakePlaceForNewOnes(t *testing.T) {
	settings := syntheticSettings()
	settings.Shifts = 2
	requests := mustChat(t, settings, 1)
	owners := map[uint64]bool{}
	for i, r := range requests {
		group := r.Hashes[0] >> 32
		owners[group] = true
		if part := uint64(i * 3 / len(requests)); group/uint64(settings.Groups) != part {
			t.Fatalf("conversation %d of %d is of group %d", i, len(requests), group)
		}
		if own := r.Hashes[len(r.Hashes)-1] >> 32; own < uint64(3*settings.Groups) {
			t.Fatalf("the end of conversation %d is that of group %d", i, own)
		}
	}
	if len(owners) != 3*settings.Groups {
		t.Errorf("%d groups, three times %d are right", len(owners), settings.Groups)
	}
}

func TestABurstBeginsAtOnceAndBeyondTheConcurrency(t *testing.T) {
	for _, rate := range []float64{0, 2} {
		settings := syntheticSettings()
		settings.Burst, settings.Rate = 40, rate
		s := simulation(mustChat(t, settings, 1), "kv", 0)
		s.Workers, s.Speedup = 2, 1
		if rate == 0 {
			s.Concurrency = 10
		}
		run := finishedRun(t, s)
		sent := map[uint64][]time.Duration{} // first turns, by group
		for i := range s.Requests {
			at := slices.IndexFunc(run.ledger, func(f *flight) bool { return f.simulated.request == &s.Requests[i] })
			group := s.Requests[i].Hashes[0] >> 32
			sent[group] = append(sent[group], run.ledger[at].sent)
		}
		burst := sent[uint64(settings.Groups+settings.Conversations)]
		if len(burst) != settings.Burst || burst[0] == 0 || slices.Max(burst) != slices.Min(burst) {
			t.Errorf("rate %v: %d began at %v to %v", rate, len(burst), slices.Min(burst), slices.Max(burst))
		}
	}
}
