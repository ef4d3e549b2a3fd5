package fair

import "time"

// Charge is the cost charged to a tenant for one running request. It must end once. A nil
// Charge charges nothing.
type Charge[T any] struct {
	queue    *Queue[T]
	flow     *flow[T]
	contends bool    // it counts for the share of class Batch
	weight   float64 // the tenant's when it began
	cost     float64 // charged so far, ms
	owed     float64 // its part of the service owed to class Batch, ms
}

// Begin charges a tenant the predicted cost of a request, ms, that begins now: an item that
// Walk offers, or a request that does not wait.
func (q *Queue[T]) Begin(t Tenant, c Class, predicted float64, now time.Time) *Charge[T] {
	f := q.flow(t, c)
	if len(f.items) == 0 {
		f.served = max(f.served, f.lane.floor())
	}
	f.running++
	f.lane.running++
	f.began, f.lane.began = now, now
	q.unreported[f] = true
	charge := &Charge[T]{queue: q, flow: f, contends: q.contends(f.lane), weight: f.weight}
	charge.Set(predicted)
	return charge
}

// Set changes the charge to that cost, ms.
func (c *Charge[T]) Set(ms float64) {
	if c == nil || c.flow == nil {
		return
	}
	ms = cost(ms)
	c.flow.pending += (ms - c.cost) / c.weight
	c.cost = ms
	if c.contends {
		c.queue.share(c)
	}
}

// Cost returns the charge, ms.
func (c *Charge[T]) Cost() float64 {
	if c == nil {
		return 0
	}
	return c.cost
}

// End ends the charge with the cost of the request, ms, and returns that. While no request
// of its class waits the tenant is charged nothing. Later calls have no effect.
func (c *Charge[T]) End(ms float64) float64 {
	if c == nil || c.flow == nil {
		return 0
	}
	f := c.flow
	c.Set(ms)
	f.pending -= c.cost / c.weight
	f.received += c.cost / c.weight
	if len(f.lane.backlogged) > 0 {
		f.served += c.cost / c.weight
	}
	f.lane.running--
	if f.running--; f.running == 0 {
		f.pending = 0 // rounding errors
	}
	c.flow = nil
	return c.cost
}
