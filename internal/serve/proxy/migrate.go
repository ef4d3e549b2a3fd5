package proxy

import (
	"context"
	"errors"
	"net/http"

	"kvrouter/internal/decide/router"
)

// Results of a stream whose worker failed during the answer, for
// kvrouter_migrations_total.
const (
	MigratedOK       = "ok"        // it was continued to its end
	MigratedFailed   = "failed"    // it was continued, and ended with an error
	MigratedRefused  = "refused"   // its request or its worker does not allow it
	MigratedLimited  = "limited"   // by --migration-limit or the retry budget
	MigratedNoWorker = "no_worker" // no other worker was ready
)

// begin notes that the client has the headers of the answer.
func (s *Migration) begin(d *router.Decision) {
	if s != nil {
		s.begun, s.cached = true, d.OverlapTokens
	}
}

// migrate continues a stream that broke off with err on other workers, to its end. If that
// is not possible, the stream ends with an error event.
func (p *Proxy) migrate(ctx context.Context, w http.ResponseWriter, u *sending, x *Exchange, t *tries, err error) error {
	s, decided := u.Migration, x.Decision
	for {
		worker, failed, ok := blamed(err)
		if !ok || ctx.Err() != nil { // the client has left, or its sender has ended it
			if s.moves > 0 {
				p.observer.Migrated(MigratedFailed)
			}
			return p.breakOff(w, x, err, s.why)
		}
		x.tried = true
		if failed.abort != nil && failed.abort.drain {
			s.drained++ // it is no failure, and the worker is welcome again when it is back
		} else {
			t.exclude = append(t.exclude, worker)
		}
		if failed.abort == nil && !failed.refusal.pressed {
			p.failed(worker)
		}
		s.rewind()
		result, why := t.mayMigrate(failed)
		if why != "" {
			if s.moves > 0 {
				result = MigratedFailed
			}
			p.observer.Migrated(result)
			return p.breakOff(w, x, err, why)
		}
		if s.complete(u.Body) {
			w.Write(s.dialect.close(s, nil))
			http.NewResponseController(w).Flush()
			x.Usage.Known = true // the worker may have died before it
			break
		}
		began := x.Trace.Now()
		decision, none := t.next()
		x.Trace.Decided(began, none, &decision)
		if none != nil {
			p.observer.Migrated(MigratedNoWorker)
			return p.breakOff(w, x, err, whyNoWorker)
		}
		x.Receipts = append(x.Receipts, decision.Receipts...)
		rest := *u
		s.rest(&rest.edits)
		x.Usage = Usage{} // that of the worker that failed
		if err = p.send(ctx, w, &rest, x, decision, true); err == nil {
			break
		}
	}
	p.observer.Migrated(MigratedOK)
	if s.moves > 0 {
		x.last = &judged{x.Decision, x.Usage}
	}
	s.merge(&x.Usage)
	x.Decision.Tokens, x.Decision.OverlapTokens = decided.Tokens, min(x.Decision.OverlapTokens, decided.Tokens)
	return nil
}

// next chooses the worker that continues the answer. Workers that failed it long ago may be
// back: they are asked where no other is ready.
func (t *tries) next() (router.Decision, error) {
	decision, err := t.unlike()
	if n := len(t.exclude); errors.Is(err, router.ErrNoWorker) && n > 1 {
		t.exclude = t.exclude[n-1:]
		decision, err = t.unlike()
	}
	return decision, err
}

// unlike chooses a worker that has not failed the answer, and whose answer has the same dialect.
func (t *tries) unlike() (router.Decision, error) {
	for {
		decision, err := t.u.chooser.Continue(t.exclude, t.u.Migration.tokens)
		if err != nil || t.u.Migration.dialect.continues(&decision.Target) {
			return decision, err
		}
		decision.Booking.End()
		t.exclude = append(t.exclude, decision.Target.Key.Worker)
	}
}

// mayMigrate returns why a stream may not be continued after a failure, and the result then;
// empty: it may.
func (t *tries) mayMigrate(failed *workerError) (result, why string) {
	s := t.u.Migration
	switch {
	case s.why != "":
		return MigratedRefused, s.why
	case s.reasoning:
		return MigratedRefused, whyReasoning
	case s.moves-s.drained >= t.proxy.settings.MigrationLimit:
		return MigratedLimited, whyLimit
	case failed.abort != nil || failed.out: // the budget is not for workers that are gone
		return "", ""
	}
	if !t.proxy.takeRetry(t.u.Client) {
		return MigratedLimited, whyBudget
	}
	return "", ""
}

// breakOff ends a stream with an error event.
func (p *Proxy) breakOff(w http.ResponseWriter, x *Exchange, err error, why string) error {
	if errors.Is(err, ErrAnswered) { // it cannot be written
		return err
	}
	new(eventScanner).tell(w, x.Route, failure(x.Worker, err, why))
	return errors.Join(ErrAnswered, err)
}
