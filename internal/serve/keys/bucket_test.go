package keys

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// ledger is what a bucket should be, in fractions.
type ledger struct {
	limit, left *big.Rat
	at          time.Time
}

func (l *ledger) refill(now time.Time) {
	came := new(big.Rat).SetFrac64(now.Sub(l.at).Nanoseconds(), time.Minute.Nanoseconds())
	l.left.Add(l.left, came.Mul(came, l.limit))
	l.cap()
	l.at = now
}

func (l *ledger) cap() {
	if l.left.Cmp(l.limit) > 0 {
		l.left.Set(l.limit)
	}
}

func (l *ledger) add(n int64) {
	l.left.Add(l.left, new(big.Rat).SetInt64(n))
	l.cap()
}

// lacks is what n is more than what is left.
func (l *ledger) lacks(n int64) float64 {
	lack, _ := new(big.Rat).Sub(new(big.Rat).SetInt64(n), l.left).Float64()
	return lack
}

// TestChargesAreWhatWasComputed: any order of charges, settlements and pauses leaves the
// bucket as if each request had been charged what it computed; nothing is taken while
// there is a debt; and what is refused is taken after the time that is named.
func TestChargesAreWhatWasComputed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.SampledFrom([]int{1, 7, 60, 3000, 1_000_000, mostOf}).Draw(t, "limit")
		now := time.Unix(1_000_000, 0)
		b := new(bucket)
		b.set(limit, now)
		model := &ledger{limit: big.NewRat(int64(limit), 1), left: big.NewRat(int64(limit), 1), at: now}
		tokens := rapid.OneOf(rapid.IntRange(0, limit+1), rapid.IntRange(0, 100*limit), rapid.IntRange(0, 1<<30))
		var open []*Charge
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				n := tokens.Draw(t, "n")
				lack := model.lacks(int64(n))
				wait, ok := b.take(n, now)
				switch {
				case n > limit:
					if ok || wait >= 0 {
						t.Fatalf("%d of %d: %v, %v", n, limit, ok, wait)
					}
				case ok != (lack <= 0) && math.Abs(lack) > .01:
					t.Fatalf("%d with %v missing: %v", n, lack, ok)
				case ok:
					model.add(-int64(n))
					open = append(open, &Charge{prompt: b, now: func() time.Time { return now }, tokens: n})
				default:
					if want := lack / float64(limit) * 60; math.Abs(wait.Seconds()-min(want, mostWait.Seconds())) > .01+want/1e6 {
						t.Fatalf("%d with %v missing: wait %v, want %v s", n, lack, wait, want)
					}
					if wait < mostWait {
						later := now.Add(wait + time.Millisecond + wait/1e6)
						if b.now(later)+rounding < float64(n) {
							t.Fatalf("%d are not there %v later: %v", n, wait, b.now(later))
						}
					}
				}
			},
			"settle": func(t *rapid.T) {
				if len(open) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
				n := rapid.OneOf(tokens, rapid.Just(0), rapid.Just(open[i].Tokens())).Draw(t, "computed")
				model.add(int64(open[i].Tokens() - n))
				open[i].Settle(n)
				if open[i].Tokens() != n {
					t.Fatalf("%d, want %d", open[i].Tokens(), n)
				}
			},
			"pause": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.Int64Range(0, int64(10*time.Minute)).Draw(t, "ns")))
				model.refill(now)
			},
			"": func(t *rapid.T) {
				left, _ := model.left.Float64()
				if got := b.now(now); math.Abs(got-left) > .01+math.Abs(left)/1e9 {
					t.Fatalf("%v are left, want %v", got, left)
				}
				if _, shown, full := b.state(now); shown < 0 || shown > limit || full < 0 {
					t.Fatalf("%d are shown, all in %v", shown, full)
				}
			},
		})
	})
}

// TestRefundLeavesNoTrace: a charge that is given back leaves the bucket as if it had
// never been made, whatever came between.
func TestRefundLeavesNoTrace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(1, 10_000).Draw(t, "limit")
		now := time.Unix(1_000_000, 0)
		with, without := new(bucket), new(bucket)
		with.set(limit, now)
		without.set(limit, now)
		n := rapid.IntRange(0, limit).Draw(t, "n")
		if _, ok := with.take(n, now); !ok {
			t.Fatal("a full bucket refuses")
		}
		now = now.Add(time.Duration(rapid.Int64Range(0, int64(time.Minute)).Draw(t, "ns")))
		with.give(n, now)
		if a, b := with.now(now), without.now(now); math.Abs(a-b) > .001 {
			t.Fatalf("%v, want %v", a, b)
		}
	})
}

// TestDebtIsPaidInFull: 240,500 tokens at 3,000 a minute take 80 minutes, however often the
// key sends requests in between.
func TestDebtIsPaidInFull(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	b := new(bucket)
	b.set(3000, now)
	b.give(-240_500, now)
	wait, ok := b.take(1, now)
	if want := 237_501 * 20 * time.Millisecond; ok || wait < want-time.Second || wait > want+time.Second {
		t.Fatalf("%v, %v; want %v", wait, ok, want)
	}
	for end := now.Add(wait - time.Second); now.Before(end); now = now.Add(100 * time.Millisecond) {
		if _, ok := b.take(0, now); ok && now.Before(end.Add(-time.Second)) {
			t.Fatalf("let in %v early", end.Sub(now))
		}
	}
	if _, ok := b.take(1, now.Add(2*time.Second)); !ok {
		t.Error("not let in after the debt was paid")
	}
	b.give(-math.MaxInt, now)
	b.give(-math.MaxInt, now)
	if wait, ok := b.take(0, now); ok || wait != mostWait {
		t.Errorf("an endless debt: %v, %v", wait, ok)
	}
}

func TestDebtOutlivesAnotherLimit(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	b := new(bucket)
	b.set(600, now)
	b.give(-1800, now)
	b.set(1200, now)
	if _, left, full := b.state(now); left != 0 || full != 2*time.Minute {
		t.Errorf("%d are left, all in %v", left, full)
	}
	b.set(0, now)
	b.set(600, now)
	if _, left, _ := b.state(now); left != 600 {
		t.Errorf("after a time without a limit %d are left", left)
	}
	b.take(600, now)
	b.set(1200, now)
	if _, left, _ := b.state(now); left != 1200 {
		t.Errorf("with another limit %d are left", left)
	}
}
