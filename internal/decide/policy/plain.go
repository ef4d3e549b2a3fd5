package policy

import "kvrouter/internal/base/kv"

// A router decides among up to thousands of workers, of which most differ in a few numbers only.
// For these, plainCost is the cost of setTerms in fewer steps: to the last bit, but where the
// processor rounds a product and a sum at once, as arm64 does.

// workSame is what all candidates of a decision have in common that have as much of the prompt:
// mostly those that come one after the other.
type workSame struct {
	overlap int // -1: of none yet
	held    int32

	uncached     int     // tokens
	own          float64 // to compute them, ms
	copied, rest float64 // the part of it that later requests save, and what is left of it
	copy, late   float64 // their parts of the terms copy and later

	passes, begun int     // that they fill alone, and that they begin, in a queue without prompts
	last          float64 // prefill part of the last of these, ms
}

// plain reports whether the candidate is a worker that neither loads nor pulls for the request,
// and as far away as the others.
func (c *Candidate) plain() bool {
	return c.Load.Cell == nil && c.Lower == (kv.LowerBlocks{}) && c.Pull.Blocks == 0 && c.Network <= 0
}

// setSame sets s for all that have as much of the prompt as the candidate.
func (p *Work) setSame(s *workSame, q *Query, c *Candidate, u *workUsual) {
	*s = workSame{overlap: c.Overlap, held: c.Held, uncached: uncachedTokens(q, c)}
	s.own = p.Timing.Prefill(s.uncached)
	if s.uncached > 0 {
		s.copied = p.copied(q, c, u, c.Overlap, s.own)
	}
	s.rest = s.own - s.copied
	s.copy, s.late = u.f*p.Timing.withoutPasses(s.copied), u.f*u.delayed*s.rest
	s.passes = wholePasses(s.uncached)
	s.begun = s.passes
	if step := s.uncached - s.passes*workPass; step > 0 {
		s.begun++
		s.last = p.passTime(step)
	}
}

// plainCost returns the cost of a plain candidate for a request without an adapter. It is that of
// setTerms: the same operations in the same order, without those that add nothing.
func (p *Work) plainCost(q *Query, c *Candidate, u *workUsual, s *workSame) float64 {
	if c.Overlap != s.overlap || c.Held != s.held {
		p.setSame(s, q, c, u)
	}
	load := c.Load
	first, pushed, begun := p.plainComing(q, load, s)
	cost := u.f*first - s.copy
	if pushed != 0 {
		cost += u.f * pushed
	}
	if load.Foreign != 0 {
		cost += u.f * foreignWait(load) * u.decoding
	}
	cost += s.late * (first + q.Backlog - s.own/2)
	if q.Leg == kv.LegPrefill {
		return cost
	}
	n := float64(load.requests())
	cost += u.output * p.Timing.context * float64(load.Context())
	cost += n * (s.rest + p.Timing.Pass*float64(begun))
	return cost + n*u.output/2*p.Timing.context*float64(max(1, q.Tokens))
}

// plainComing is coming for a prompt that loads nothing. Most workers have no other prompt, or one
// that they compute now and that ends with the running pass: then the passes need not be played
// through.
func (p *Work) plainComing(q *Query, load *Load, s *workSame) (first, pushed float64, begun int) {
	decode := p.Timing.Decoding(load.ContextTokens)
	at := decode / 2
	if len(load.Prefills) > 0 {
		running := &load.Prefills[0]
		at = milliseconds(running.Sent.Sub(q.Now))
		if !load.FirstToken.IsZero() {
			at = later(at, milliseconds(load.FirstToken.Sub(q.Now)))
		}
		if len(load.Prefills) > 1 || load.Fetching > 0 || running.Tokens <= 0 || running.Tokens > workPass || !(at < 0) {
			first, pushed, begun, _ = p.coming(q.Now, load, s.uncached, 0)
			return first, pushed, begun
		}
		if at += p.passTime(running.Tokens) + decode; at < 0 {
			if at = 0; running.AnsweredWhole {
				at = decode / 2
			}
		}
	}
	if s.passes > 0 {
		at += float64(s.passes) * (p.passTime(workPass) + decode)
	}
	return at + (s.last + decode), 0, s.begun
}
