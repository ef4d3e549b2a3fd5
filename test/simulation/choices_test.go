package simulation

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/zeebo/xxh3"

	"kvrouter/internal/base/fair"
	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/serve/proxy"
)

// Places of a client's legs: of the prefill worker, and of the one that answers.
const (
	prefills = iota
	answers
	legs
	besides = legs // of what begins beside them
)

// attempt is one leg of a request at a worker.
type attempt struct {
	ctx context.Context // ends with it; nil: it has not been sent
	try int             // the decision that it follows from
}

func (a attempt) underWay() bool { return a.ctx != nil && a.ctx.Err() == nil }

// begin notes that a decision is asked for: the last attempt is over, and its bookings
// must be. beside means that it is sent again at no cost.
func (c *client) begin(exclude []uint64, beside bool) router.Request {
	c.node.mu.Lock()
	aborted := c.aborted        // its worker is down or stuck: it may be sent again at no cost
	hedged := len(c.beside) > 0 // which of its workers has failed it last does not show
	c.aborted = false
	c.node.mu.Unlock()
	c.leave()
	if n := len(exclude); n > 0 && !beside && !aborted && !hedged {
		c.node.again(exclude[n-1])
	}
	return c.question(exclude)
}

// question is the request as the router gets it.
func (c *client) question(exclude []uint64) router.Request {
	request := router.Request{Tokens: c.prompt.tokens[:c.prompt.length], Exclude: exclude}
	if c.session != "" {
		request.Session, request.SessionID = c.node.router.SessionOf("", c.session), router.SessionID("", c.session)
	}
	if c.world.setup.Fair {
		request.Tenant, request.Class = fair.Tenant{Name: fmt.Sprint(c.prompt.length % 3)}, fair.Classes[c.output%len(fair.Classes)]
	}
	return request
}

// chosen notes the bookings of a decision.
func (c *client) chosen(exclude []uint64, decided ...router.Decision) {
	n := c.node
	n.mu.Lock()
	defer n.mu.Unlock()
	c.booked = [legs]*router.Booking{}
	for i, d := range decided {
		if d.Booking == nil {
			continue
		}
		if slices.Contains(exclude, d.Target.Key.Worker) {
			c.world.fail("%s goes to worker %d again, which has failed it", c.id, d.Target.Key.Worker)
		}
		c.world.sabotage.booked(d.Booking)
		c.booked[i] = d.Booking
	}
	c.routed, c.pairing = true, false
	c.tries++
}

// Route implements proxy.Chooser.
func (c *client) Route(exclude []uint64) (router.Decision, error) {
	request := c.begin(exclude, false)
	seen := c.node.calm(c.session)
	d, err := c.node.router.Route(c.ctx, request)
	if err != nil {
		return d, err
	}
	c.settled(seen, kv.LegWhole, exclude, d)
	c.chosen(exclude, router.Decision{}, d)
	return d, nil
}

// RoutePair implements proxy.Chooser.
func (c *client) RoutePair(exclude []uint64, why string) (router.Pair, error) {
	beside := why == proxy.WholePrefilled && !c.fellBack
	c.fellBack = c.fellBack || beside
	request := c.begin(exclude, beside)
	seen := c.node.calm(c.session)
	c.pairs(true)
	pair, err := c.node.router.RoutePair(c.ctx, request, router.PairRule{LeastUncached: c.world.setup.LeastUncached, Whole: why, Enforce: c.world.setup.Enforce})
	if err != nil {
		c.pairs(false)
		c.unpaired()
		return pair, err
	}
	if pair.Whole != "" {
		c.settled(seen, kv.LegWhole, exclude, pair.Decode)
	} else {
		c.settled(seen, kv.LegPrefill, exclude, pair.Prefill)
		c.settled(seen, kv.LegDecode, exclude, pair.Decode)
		if pair.Prefill.Target.Kind != pair.Decode.Target.Kind {
			c.world.fail("%s is shared by workers that do not understand each other", c.id)
		}
	}
	c.chosen(exclude, pair.Prefill, pair.Decode)
	return pair, nil
}

// pairs notes that a pair is asked for: its prefill leg is booked while its decode leg waits in
// a queue.
func (c *client) pairs(asked bool) {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.pairing = asked
}

// leave notes that the last attempt and those beside it are over: their bookings must be.
func (c *client) leave() {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.routed = false
	for _, b := range append(c.booked[:], c.beside...) {
		if b != nil && !b.Ended() {
			c.world.fail("%s: its attempt is over, and its booking on worker %d is not", c.id, b.Worker().Worker)
		}
	}
	c.booked, c.beside = [legs]*router.Booking{}, nil
}

// Beside implements proxy.Chooser. Its decisions move no session.
func (c *client) Beside(ctx context.Context, exclude []uint64) (router.Pair, error) {
	c.yield(besides) // several requests may begin elsewhere at one instant
	c.node.spend()
	request := router.Request{Tokens: c.prompt.tokens[:c.prompt.length], Exclude: exclude, Beside: true}
	c.node.mu.Lock()
	c.hedging++
	c.node.mu.Unlock()
	var pair router.Pair
	var err error
	if c.node.router.Paired() || c.world.setup.Enforce {
		pair, err = c.node.router.RoutePair(ctx, request, router.PairRule{LeastUncached: c.world.setup.LeastUncached, Enforce: c.world.setup.Enforce})
	} else {
		pair.Whole = router.WholeNoPair
		pair.Decode, err = c.node.router.Route(ctx, request)
	}
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.hedging--
	c.tries++
	for _, d := range []router.Decision{pair.Prefill, pair.Decode} {
		if err != nil || d.Booking == nil {
			continue
		}
		if slices.Contains(exclude, d.Target.Key.Worker) {
			c.world.fail("%s goes to worker %d, too, which has it", c.id, d.Target.Key.Worker)
		}
		c.beside = append(c.beside, d.Booking)
	}
	return pair, err
}

// Answers implements proxy.Chooser.
func (c *client) Answers(router.Pair) {}

// checkBookings holds a client's bookings against what is under way, and returns how many
// have not ended, and whether one more may be booked already. node.mu and world.mu are held.
func (c *client) checkBookings() (open int, pairing bool) {
	for i, b := range c.booked {
		switch {
		case b == nil:
		case !b.Ended():
			open++
		case len(c.beside) > 0: // of two attempts that run, one ends first
		case i == answers && c.routed && c.booked[prefills] == nil: // of a pair the decode leg may end first
			c.world.failLocked("%s: its booking on worker %d has ended, and its attempt has not", c.id, b.Worker().Worker)
		case c.attempts[i].underWay():
			c.world.failLocked("%s: its booking on worker %d has ended, and the request there has not", c.id, b.Worker().Worker)
		}
	}
	for _, b := range c.beside {
		if !b.Ended() {
			open++
		}
	}
	return open, c.pairing && c.world.setup.Fair || c.hedging > 0
}

// watched is the transport of a node to workers. It holds that each leg of a request is at
// one worker at a time. Where many requests fail at once, the seed says in which order
// that is seen.
type watched struct{ node *node }

// RoundTrip implements http.RoundTripper.
func (t watched) RoundTrip(r *http.Request) (*http.Response, error) {
	w := t.node.world
	id := r.Header.Get(web.HeaderRequest)
	if id == "" {
		t.apart(r)
		return t.node.http.RoundTrip(r)
	}
	w.mu.Lock()
	c := w.clients[id]
	w.mu.Unlock()
	leg := c.sent(r)
	response, err := t.node.http.RoundTrip(r)
	if err != nil {
		c.ends(r.Context())
		c.yield(leg)
		return nil, err
	}
	t.node.mu.Lock()
	t.node.refused[r.URL.Host] = response.StatusCode/100 == 4
	t.node.mu.Unlock()
	response.Body = failing{response.Body, r.Context(), c, leg}
	return response, nil
}

// inquirer is the key of the client in the context of a question about its request.
type inquirer struct{}

// apart keeps a question to a worker apart from what is sent at the same instant, as the
// seed says.
func (t watched) apart(r *http.Request) {
	text := r.URL.String()
	if c, ok := r.Context().Value(inquirer{}).(*client); ok {
		text += c.id
	} else if body, err := r.GetBody(); err == nil { // to abort a request: its name begins with that of the client's
		named, _ := io.ReadAll(body)
		before, _, _ := strings.Cut(string(named), "-")
		text += before
	}
	time.Sleep(time.Duration(1 + 1e6*t.node.world.net.chance(xxh3.HashString(text), uint64(time.Since(t.node.world.began)))))
}

// sent notes that a leg is sent to a worker, and returns its place.
func (c *client) sent(r *http.Request) (leg int) {
	w := c.world
	c.node.mu.Lock()
	leg = answers
	if b := c.booked[prefills]; b != nil && strings.HasPrefix(r.URL.Host, workerHost(int(b.Worker().Worker))+":") {
		leg = prefills
	}
	try := c.tries
	hedged := len(c.beside) > 0
	c.node.mu.Unlock()
	w.mu.Lock()
	defer w.mu.Unlock()
	for i, other := range c.attempts {
		if other.underWay() && !hedged && !(i != leg && other.try == try && w.setup.Kind == kv.KindSGLang) { // whose legs wait for each other
			w.failLocked("%s is sent to %s while it is under way elsewhere", c.id, r.URL.Host)
		}
	}
	c.attempts[leg] = attempt{r.Context(), try}
	return leg
}

// failing is the body of an answer.
type failing struct {
	io.ReadCloser
	ctx context.Context // of the attempt
	c   *client
	leg int
}

// Read implements io.Reader.
func (f failing) Read(b []byte) (int, error) {
	n, err := f.ReadCloser.Read(b)
	if err != nil && err != io.EOF {
		f.c.ends(f.ctx)
		f.c.yield(f.leg)
	}
	return n, err
}

// ends notes whether the router has ended an attempt, which its worker has not failed.
func (c *client) ends(attempt context.Context) {
	c.node.mu.Lock()
	defer c.node.mu.Unlock()
	c.aborted = c.aborted || attempt.Err() != nil && c.ctx.Err() == nil
}

// yield waits for up to a millisecond, as the seed says.
func (c *client) yield(leg int) {
	c.yields[leg]++
	time.Sleep(time.Duration(1e6 * c.world.net.chance(xxh3.HashString(c.id), c.yields[leg], uint64(leg))))
}
