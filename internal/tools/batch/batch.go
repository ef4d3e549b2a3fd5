// Package batch sends a file of requests through an OpenAI endpoint, beside other traffic,
// and resumes an interrupted run.
package batch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"time"

	"golang.org/x/sync/semaphore"
)

// Command is kvrouter batch.
type Command struct {
	File          string        `arg:"" help:"JSONL file of requests in the form of OpenAI's batch API: custom_id, method, url, body."`
	URL           string        `group:"Batch" name:"url" default:"http://127.0.0.1:8000" help:"OpenAI endpoint to send the requests to."`
	Output        string        `group:"Batch" placeholder:"FILE" help:"File for the results, one JSON line per answered request. The file for the errors is beside it. Default: the name of the input with .results.jsonl."`
	Concurrency   int           `group:"Batch" default:"64" help:"Maximum number of requests in flight. Fewer are in flight while the endpoint answers 429 or 503."`
	Attempts      int           `group:"Batch" default:"6" help:"Maximum number of attempts at a request that end with a broken connection, a timeout or a status of 500 and up. Those that are refused (429, 503, 529) do not count."`
	AnswerTimeout time.Duration `group:"Batch" default:"1h" help:"Maximum time to wait for a whole answer."`
	GiveUpAfter   time.Duration `group:"Batch" default:"10m" help:"Time after which the run ends if the endpoint only refuses (429, 503, 529, no connection); a later run resumes. A single request that is refused for that time, while others are answered, becomes an error."`
	APIKey        []string      `group:"Batch" name:"api-key" placeholder:"KEY" help:"Bearer key of the endpoint. Of several, separated by commas, the first is sent."`
	DrainTimeout  time.Duration `group:"Batch" default:"30s" help:"Maximum time for requests in flight to finish after SIGTERM or SIGINT."`
}

const (
	// maxConcurrency bounds --concurrency.
	maxConcurrency = 4096
	// maxBodies bounds the memory of the bodies of open requests, bytes.
	maxBodies = 4 * maxLine
	// syncEvery is the maximum time until a result is on the disk. It survives this process
	// at once.
	syncEvery = time.Second
)

// Validate checks the settings.
func (c *Command) Validate() error {
	switch {
	case c.Concurrency < 1 || c.Concurrency > maxConcurrency:
		return fmt.Errorf("--concurrency %d: give 1 to %d", c.Concurrency, maxConcurrency)
	case c.Attempts < 1:
		return fmt.Errorf("--attempts %d: give at least 1", c.Attempts)
	case c.AnswerTimeout <= 0 || c.GiveUpAfter <= 0:
		return errors.New("--answer-timeout and --give-up-after must be more than 0")
	}
	return nil
}

// run is one run of a batch.
type run struct {
	Command
	sender   *sender
	pace     *pace
	book     *book
	bodies   *semaphore.Weighted // bytes of the open requests
	open     *semaphore.Weighted // requests in flight or waiting to be retried
	progress progress

	stop   context.Context // done: nothing more is sent
	flight context.Context // of the requests in flight; ends after stop
	fail   func(error)     // ends the run
}

// firstBackoff is the time between a broken attempt and the next one; each further time is
// twice as long, at most longestPause.
const firstBackoff = time.Second

// errStopped means that a request was not sent, or not to the end, because the run ends.
var errStopped = errors.New("stopped")

// Run sends the requests that have neither a result nor an error yet, and writes what
// becomes of them. It writes the progress to status and statistics to out. When ctx is done,
// no further request is sent, and those in flight may take --drain-timeout to finish. An error means that requests remain, or that
// some have errors.
func (c Command) Run(ctx context.Context, out, status io.Writer) error {
	key := ""
	if len(c.APIKey) > 0 {
		key = c.APIKey[0]
	}
	sender, err := newSender(c.URL, key, c.AnswerTimeout, c.Concurrency)
	if err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	defer sender.client.CloseIdleConnections()
	if err := c.run(ctx, sender, c.DrainTimeout, out, status); err != nil {
		return fmt.Errorf("batch: %w", err)
	}
	return nil
}

// names returns the names of the files of the results and of the errors.
func (c *Command) names() (results, errors string) {
	results = c.Output
	if results == "" {
		results = c.File + ".results.jsonl"
	}
	return results, errorsBeside(results)
}

// files opens the files.
func (c *Command) files() (in *os.File, size int64, b *book, err error) {
	if in, err = os.Open(c.File); err != nil {
		return nil, 0, nil, err
	}
	info, err := in.Stat()
	switch {
	case err != nil:
	case !info.Mode().IsRegular():
		err = fmt.Errorf("%s is not a regular file: it is read twice", c.File)
	default:
		results, errors := c.names()
		for _, name := range []string{results, errors} {
			if other, missing := os.Stat(name); missing == nil && os.SameFile(info, other) {
				err = fmt.Errorf("%s has the requests: give another --output", name)
			}
		}
		if err == nil {
			b, err = openBook(results, errors)
		}
	}
	if err != nil {
		_ = in.Close()
		return nil, 0, nil, err
	}
	return in, info.Size(), b, nil
}

func (c Command) run(ctx context.Context, sender *sender, drain time.Duration, out, status io.Writer) (err error) {
	in, size, book, err := c.files()
	if err != nil {
		return err
	}
	defer in.Close()
	defer func() { err = errors.Join(err, book.close()) }()
	b := &run{Command: c, sender: sender, book: book, bodies: semaphore.NewWeighted(maxBodies),
		open: semaphore.NewWeighted(int64(c.Concurrency))}
	if b.progress.counts, err = b.scan(io.NewSectionReader(in, 0, size)); err != nil {
		return err
	}
	if book.torn > 0 {
		fmt.Fprintf(status, "a half-written line of %d bytes was cut off: its request is sent again\n", book.torn)
	}
	b.pace = newPace(c.Concurrency)
	defer b.pace.stop()

	stop, end := context.WithCancel(ctx)
	defer end()
	flight, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	defer context.AfterFunc(stop, func() { time.AfterFunc(drain, cut) })()
	failure := make(chan error, 1) // the first one
	b.stop, b.flight = stop, flight
	b.fail = func(err error) {
		select {
		case failure <- err:
		default:
		}
		end()
		if !errors.Is(err, errEnd) {
			cut() // results in flight could not be written
		}
	}

	done := make(chan struct{})
	var beside sync.WaitGroup
	beside.Go(func() { b.progress.show(status, b.pace.flying, done) })
	beside.Go(func() { b.syncFiles(done) })
	var inFlight sync.WaitGroup
	if err := b.dispatch(io.NewSectionReader(in, 0, size), &inFlight); err != nil && !errors.Is(err, errStopped) {
		b.fail(fmt.Errorf("%s: %w", c.File, err))
	}
	inFlight.Wait()
	close(done)
	beside.Wait()
	if err := b.book.sync(); err != nil {
		b.fail(err)
	}

	b.progress.update(func(c *counts) { c.ended = time.Now() })
	counts := b.progress.now()
	fmt.Fprint(out, counts.summary())
	results, failures := c.names()
	fmt.Fprintf(out, "%-18s %s\n", "results", results)
	if counts.failed > 0 {
		fmt.Fprintf(out, "%-18s %s\n", "errors", failures)
	}
	left := counts.total - counts.done()
	const resume = "%d of %d requests remain: run the same command to resume"
	select {
	case err := <-failure:
		return fmt.Errorf("%w; "+resume, err, left, counts.total)
	default:
	}
	switch {
	case left > 0:
		return fmt.Errorf("stopped; "+resume, left, counts.total)
	case counts.failed > 0:
		return fmt.Errorf("%d of %d requests have errors: see %s", counts.failed, counts.total, failures)
	}
	return nil
}

// mostNamed bounds the duplicates that an error names.
const mostNamed = 10

// scan reads the file once, before anything is sent: what is done, and that no custom_id
// stands for two requests, whose results could not be distinguished.
func (b *run) scan(file io.Reader) (counts, error) {
	c := counts{started: time.Now()}
	lines := map[identity]int{}
	var twice []error
	err := requests(file, func(r request, bad error) error {
		if bad == nil {
			id := identityOf(r.id)
			if first, found := lines[id]; found {
				if twice = append(twice, fmt.Errorf("lines %d and %d have the same custom_id %.100q", first, r.number, r.id)); len(twice) == mostNamed {
					return errors.New("and maybe more")
				}
				return nil
			}
			lines[id] = r.number
		}
		c.total++
		if done, failed := b.book.has(&r, bad != nil); done {
			c.before++
			if failed {
				c.failed++
			}
		}
		return nil
	})
	if len(twice) > 0 {
		return c, fmt.Errorf("%s: nothing was sent: %w", b.File, errors.Join(append(twice, err)...))
	}
	if err != nil {
		return c, fmt.Errorf("%s: %w", b.File, err)
	}
	return c, nil
}

// dispatch sends the requests that are not done in the order of the file.
func (b *run) dispatch(file io.Reader, inFlight *sync.WaitGroup) error {
	seen := map[identity]bool{} // of this run
	return requests(file, func(r request, bad error) error {
		if b.stop.Err() != nil {
			return errStopped
		}
		if done, _ := b.book.has(&r, bad != nil); done {
			return nil
		}
		if bad != nil {
			return b.record(&r, &attempt{failure: &failure{Code: codeLine, Message: fmt.Sprintf("line %d: %v", r.number, bad), Line: r.number}})
		}
		id := identityOf(r.id)
		if seen[id] {
			return fmt.Errorf("line %d: duplicate custom_id %.100q: the file has changed since the start", r.number, r.id)
		}
		seen[id] = true
		size := int64(len(r.body))
		if b.open.Acquire(b.stop, 1) != nil || b.bodies.Acquire(b.stop, size) != nil || !b.pace.enter(b.stop) {
			return errStopped // and nothing more is sent
		}
		inFlight.Go(func() { // until the request has ended, or the run
			defer b.open.Release(1)
			defer b.bodies.Release(size)
			if err := b.serve(&r); err != nil && !errors.Is(err, errStopped) {
				b.fail(err)
			}
		})
		return nil
	})
}

// serve sends a request, which has entered the pace, until it has a final answer, and writes
// that.
func (b *run) serve(r *request) error {
	var refusedAt time.Time // the first time
	for tries := 1; ; {
		a, err := b.sender.send(b.flight, r)
		again := false
		switch {
		case err != nil:
		case a.response == nil && b.flight.Err() != nil:
			err = errStopped
		case a.verdict == broken && tries < b.Attempts:
			b.progress.update(func(c *counts) { c.again, c.last = c.again+1, a.problem() })
			if err = rest(b.stop, min(firstBackoff<<min(tries-1, 10), longestPause)); err == nil {
				tries++
				continue
			}
		case a.verdict == refused:
			b.progress.update(func(c *counts) { c.refused, c.last = c.refused+1, a.problem() })
			if refusedAt.IsZero() {
				refusedAt = time.Now()
			}
			switch again = time.Since(refusedAt) <= b.GiveUpAfter; {
			case b.pace.idle() > b.GiveUpAfter:
				err = fmt.Errorf("%w: no answer for %s (--give-up-after), the last problem: %s", errEnd, b.GiveUpAfter, a.problem())
			case !again:
				err = b.record(r, &a)
			}
		default:
			err = b.record(r, &a)
		}
		b.pace.leave(a.verdict, a.sent, a.asked)
		if err != nil || !again {
			return err
		}
		if !b.pace.enter(b.stop) {
			return errStopped
		}
		b.progress.update(func(c *counts) { c.again++ })
	}
}

// rest waits, unless stop is done.
func rest(stop context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-stop.Done():
		return errStopped
	}
}

// record writes the result of a request.
func (b *run) record(r *request, a *attempt) error {
	o := output{ID: newID(), Response: a.response, Error: a.failure}
	if r.id != "" {
		o.CustomID = &r.id
	}
	ok := a.ok()
	if err := b.book.write(&o, !ok); err != nil {
		return err
	}
	b.progress.update(func(c *counts) {
		if !ok {
			c.errors++
			c.failed++
			return
		}
		c.ok++
		u := usageOf(a.response.Body)
		c.usage.prompt += u.prompt
		c.usage.cached += u.cached
		c.usage.output += u.output
	})
	return nil
}

// syncFiles writes the files to the disk every syncEvery, until done is closed.
func (b *run) syncFiles(done <-chan struct{}) {
	ticker := time.NewTicker(syncEvery)
	defer ticker.Stop()
	for {
		select {
		case <-done:
			return
		case <-ticker.C:
			if err := b.book.sync(); err != nil {
				b.fail(err)
			}
		}
	}
}
