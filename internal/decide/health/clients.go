package health

import (
	"slices"
	"time"

	"kvrouter/internal/base/kv"
)

// A request that no worker can serve fails wherever it is sent, and says nothing about the
// workers. A client that sends such requests is recognized by the workers on which others
// are served. The rule:
//
// A client that fails on a worker is tracked there for followedFor, on the last
// followedWorkers workers on which it failed. From its first failure there, its successful
// and failed requests are counted, and those of all other clients that are not discredited.
// A request to pause counts as a failure here. The worker is a witness if a request of
// those others has succeeded there. With at least witnesses such workers, the shares of
// failed requests on them are compared at each further failure: the client is discredited
// for discreditedFor if its share is at least discreditedBy above that of the others,
// otherwise it is no longer discredited. With fewer witnesses nothing changes.
//
// Requests of a discredited client count against no worker: neither failures, nor silence,
// nor requested pauses. They are no trials. When a client becomes discredited, ejections,
// pauses and consecutive failures that it alone caused are undone. Another client that
// failed there within the same windowSeconds is a cause, too.
//
// A client is therefore not discredited by one failing worker: it fails on that worker
// only, or others fail there, too. A single client has no witnesses and is never
// discredited. Refused connections always count against the worker, which has not seen the
// request, and so do requests that another worker accepts (Misconfigured).
const (
	followedClients = 256
	followedWorkers = 8
	followedFor     = 30 * time.Second
	witnesses       = 2
	discreditedBy   = 0.1
	discreditedFor  = 30 * time.Second
	// tidyEvery is the minimum time between two searches for clients that are no longer
	// tracked.
	tidyEvery = 5 * time.Second
)

// tally counts finished requests.
type tally struct{ well, failed int }

func (t tally) minus(other tally) tally { return tally{t.well - other.well, t.failed - other.failed} }

func (t *tally) add(other tally) { t.well, t.failed = t.well+other.well, t.failed+other.failed }

// failedShare is the share of requests that failed; t has at least one.
func (t tally) failedShare() float64 { return float64(t.failed) / float64(t.well+t.failed) }

// visit is the results of a client on one worker since its first failure there.
type visit struct {
	key     kv.WorkerKey
	worker  *worker // the incarnation
	since   time.Time
	before  tally // worker.seen when it began
	own     tally // the client's requests
	counted tally // those of them that are in worker.seen
}

// client is a client with recently failed requests.
type client struct {
	failed      time.Time // when last
	discredited time.Time // until then
	visits      []visit   // at most followedWorkers, the oldest first
}

// at returns the client's visit of a worker, or nil.
func (c *client) at(w *worker, now time.Time) *visit {
	for i := range c.visits {
		if v := &c.visits[i]; v.worker == w && now.Sub(v.since) < followedFor {
			return v
		}
	}
	return nil
}

// begin begins a visit.
func (c *client) begin(key kv.WorkerKey, w *worker, now time.Time) *visit {
	c.visits = slices.DeleteFunc(c.visits, func(v visit) bool { return v.worker == w })
	if len(c.visits) == followedWorkers {
		c.visits = slices.Delete(c.visits, 0, 1)
	}
	c.visits = append(c.visits, visit{key: key, worker: w, since: now, before: w.seen})
	return &c.visits[len(c.visits)-1]
}

// Discredited reports whether a client's failures are not counted against workers.
func (d *Detector) Discredited(name string, now time.Time) bool {
	c := d.clients[name]
	return c != nil && now.Before(c.discredited)
}

// CountDiscredited returns the number of such clients.
func (d *Detector) CountDiscredited(now time.Time) (n int) {
	for _, c := range d.clients {
		if now.Before(c.discredited) {
			n++
		}
	}
	return n
}

// servedWell records a successful attempt on w.
func (d *Detector) servedWell(a Attempt, w *worker, now time.Time) {
	if len(d.clients) > 0 {
		d.tidy(now)
		if c := d.clients[a.Client]; c != nil {
			discredited := now.Before(c.discredited)
			if v := c.at(w, now); v != nil {
				if v.own.well++; !discredited {
					v.counted.well++
				}
			}
			if discredited {
				return
			}
		}
	}
	w.seen.well++
}

// ownFault records that w failed an attempt or requested a pause, and reports whether the
// client is the cause.
func (d *Detector) ownFault(a Attempt, now time.Time) bool {
	w := d.of(a)
	if w == nil {
		return false
	}
	if a.Client == "" {
		w.seen.failed++
		return false
	}
	c := d.follow(a.Client, now)
	v := c.at(w, now)
	if v == nil {
		v = c.begin(a.Worker, w, now)
	}
	v.own.failed++
	was := now.Before(c.discredited)
	if own, others, known := d.compare(c, now); known {
		if c.discredited = (time.Time{}); own.failedShare() >= others.failedShare()+discreditedBy {
			c.discredited = now.Add(discreditedFor)
		}
	}
	if !now.Before(c.discredited) {
		v.counted.failed++
		w.seen.failed++
		return false
	}
	if !was {
		d.announce(News{Client: a.Client, For: discreditedFor})
		d.undo(a.Client, now)
	}
	return true
}

// compare sums up the results of a client and of others on the witnesses. known is false if
// there are too few.
func (d *Detector) compare(c *client, now time.Time) (own, others tally, known bool) {
	var servers [followedWorkers]uint64 // the witnesses: their ranks are one
	n := 0
	for i := range c.visits {
		v := &c.visits[i]
		if now.Sub(v.since) >= followedFor || d.workers[v.key] != v.worker {
			continue
		}
		if rest := v.worker.seen.minus(v.before).minus(v.counted); rest.well > 0 {
			if !slices.Contains(servers[:n], v.key.Worker) {
				servers[n] = v.key.Worker
				n++
			}
			own.add(v.own)
			others.add(rest)
		}
	}
	return own, others, n >= witnesses
}

// follow returns the record of a client that fails.
func (d *Detector) follow(name string, now time.Time) *client {
	c := d.clients[name]
	if c == nil {
		if d.tidy(now); len(d.clients) >= followedClients {
			d.forgetOldest()
		}
		c = new(client)
		d.clients[name] = c
	}
	c.failed = now
	return c
}

// tidy removes the clients that are no longer tracked.
func (d *Detector) tidy(now time.Time) {
	if now.Sub(d.tidied) < tidyEvery {
		return
	}
	d.tidied = now
	for name, c := range d.clients {
		if now.Sub(c.failed) >= followedFor && !now.Before(c.discredited) {
			delete(d.clients, name)
		}
	}
}

// forgetOldest removes the client with the oldest last failure.
func (d *Detector) forgetOldest() {
	oldest, at := "", time.Time{}
	for name, c := range d.clients {
		if at.IsZero() || c.failed.Before(at) {
			oldest, at = name, c.failed
		}
	}
	delete(d.clients, oldest)
}

// undo reverts the ejections, pauses and failure counts that a client alone caused.
func (d *Detector) undo(name string, now time.Time) {
	for key, w := range d.workers {
		if w.gone {
			continue
		}
		if w.heldBy == name {
			w.unhold()
		}
		if w.phase != phaseIn && w.outBy == name {
			if w.phase == phaseOut {
				d.bringBack(key, w, now)
			}
			w.phase, w.outBy, w.times = phaseIn, "", max(0, w.times-1)
		}
		if w.only(name, now) {
			w.row, w.broken, w.spared = 0, 0, time.Time{}
		}
	}
	d.recount()
}

// blame is a client's last failure on a worker.
type blame struct {
	client string
	at     time.Time
}

// blamed records that a client's request failed on w.
func (w *worker) blamed(name string, now time.Time) {
	if w.blames[0].client != name {
		w.blames[1] = w.blames[0]
	}
	w.blames[0] = blame{name, now}
}

// only reports whether all failures on w within windowSeconds are of the client name.
func (w *worker) only(name string, now time.Time) bool {
	return name != "" && w.blames[0].client == name && now.Sub(w.blames[1].at) >= windowSeconds*time.Second
}
