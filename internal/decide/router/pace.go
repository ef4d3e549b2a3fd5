package router

import (
	"math"
	"time"

	"kvrouter/internal/base/fair"
)

const (
	// mostPaced is the maximum share of the time of all seats that counts as kept free by the pace: one seat for
	// each tenant that waits for its next start.
	mostPaced = 0.02
	// pacedOver is the time over which that share is counted, s.
	pacedOver = 30.0
	// pacedFor is the time for which a tenant counts after its last request.
	pacedFor = time.Minute
	// pacedMean is the number of answers over which their mean time is taken.
	pacedMean = 64
)

// pace spreads the starts of requests of tenants that have their share of the seats, where others use
// less. Answers that begin together end together, so that a tenant which comes in between waits for a
// whole answer. Starts follow each other in the mean time between two ends, and a little slower: a seat is
// then mostly about to be free. Two may begin at once, and mostPaced limits how long seats are kept.
//
// The router's lock guards it.
type pace struct {
	answer float64 // mean time of an answer, s
	count  int
	next   time.Time // the next start is due

	at    time.Time // until then, in seat seconds of late:
	kept  float64   // seats kept free
	seats float64   // all
	all   int       // seats since then
	keeps int       // those kept free since then
	spent bool      // the share was reached, and half of it is not yet free again
}

// answered notes the time of an answer on a seat.
func (p *pace) answered(took time.Duration) {
	p.count = min(p.count+1, pacedMean)
	p.answer += (took.Seconds() - p.answer) / float64(p.count)
}

// gap is the time between two starts; 0: it is not known.
func (p *pace) gap() time.Duration {
	if p.all == 0 {
		return 0
	}
	return time.Duration(p.answer / float64(p.all) / (1 - mostPaced/2) * float64(time.Second))
}

// starts notes that a request begins.
func (p *pace) starts(now time.Time) {
	if p.next.Before(now) {
		p.next = now
	}
	p.next = p.next.Add(p.gap())
}

// wait returns the time until the next start is due.
func (p *pace) wait(now time.Time) time.Duration {
	if p.spent {
		return 0
	}
	return p.next.Sub(now) - p.gap()
}

// keep notes how many of all seats are kept free from now on.
func (p *pace) keep(free, all int, now time.Time) {
	if past := now.Sub(p.at).Seconds(); past > 0 && !p.at.IsZero() {
		left := math.Exp(-past / pacedOver)
		p.kept = p.kept*left + float64(p.keeps)*past
		p.seats = p.seats*left + float64(p.all)*past
	}
	switch most := mostPaced * p.seats; {
	case p.kept > most:
		p.spent = true
	case p.kept < most/2:
		p.spent = false
	}
	p.at, p.keeps, p.all = now, free, all
}

// paced returns the time until a request of the tenant may take a free seat; at most 0: now.
func (a *Admission) paced(t fair.Tenant, c fair.Class, now time.Time) time.Duration {
	wait := a.pace.wait(now)
	if wait <= 0 || !a.fair.Presses(t, c, a.pace.all, now.Add(-pacedFor)) {
		return 0
	}
	if _, _, idle := a.seats(now); idle {
		return 0
	}
	return wait
}
