package health

import (
	"slices"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
)

const (
	// baselineSize is the number of values from which the baseline is computed, and ownSize the
	// same of one worker.
	baselineSize, ownSize = 128, 8
	// slowFactor and longestFactor bound a wait far above the baseline: multiples
	// of the 95th percentile of the waits, and of the longest.
	slowFactor, longestFactor = 8, 2
	// waitsLeast is the number of known waits from which one can be too long.
	waitsLeast = 5
	// paceFactor is the allowed multiple of the baseline time of a prompt token, for each
	// token to be computed first. paceDefault is that time while fewer than paceLeast are
	// known: a slow engine on a CPU.
	paceFactor  = 4
	paceDefault = 2 * time.Millisecond
	paceLeast   = 8
	// paceTokens is the minimum number of tokens from which a time per prompt token is
	// computed, and writtenTokens the same of the tokens of an answer.
	paceTokens, writtenTokens = 256, 16
	// writeDefault is the time for a token of an answer while fewer than paceLeast are known,
	// and writeFloor its lower bound.
	writeDefault, writeFloor = 50 * time.Millisecond, 25 * time.Millisecond
)

// Task is the kind of work of a request.
type Task uint8

// The tasks. The time of those after Embed does not depend on tokens.
const (
	Generate Task = iota
	Embed         // or score, rerank, classify
	Hear          // transcribe or translate a recording
	Speak         // make sound
	Draw          // make images or videos
	Other
	tasks
)

// taskOf are the tasks of routes that generate no text.
var taskOf = [...]struct {
	part string // of the path
	task Task
}{
	{"/embed", Embed}, {"/pooling", Embed}, {"/score", Embed}, {"/rerank", Embed}, {"/classify", Embed}, {"/encode", Embed},
	{"/audio/trans", Hear}, {"/audio/", Speak}, {"/images/", Draw}, {"/videos", Draw},
}

// TaskOf returns the task of a route with a prompt, or of one of which no prompt is known.
func TaskOf(route string, prompt bool) Task {
	for _, t := range taskOf {
		if strings.Contains(route, t.part) {
			return t.task
		}
	}
	if prompt {
		return Generate
	}
	return Other
}

// Class groups requests by the work that precedes their first byte.
type Class uint8

// ClassOf returns the class of a leg with a streamed or a non-streamed answer of at most so many
// tokens; 0: no limit is known.
func ClassOf(leg kv.Leg, whole bool, output int, task Task) Class {
	c := Class(leg) * forms
	switch {
	case task != Generate:
		return Class(generating) + Class(task) - 1
	case whole && output > 0:
		return c + limitedForm
	case whole:
		return c + wholeForm
	default:
		return c + streamForm
	}
}

// The forms of the answers that generate text: streamed, whole without a limit, whole with one.
const (
	streamForm = iota
	wholeForm
	limitedForm
	forms
)

// is reports whether c is of answers of that form.
func (c Class) is(form Class) bool { return int(c) < generating && c%forms == form }

// generating is the number of the classes of requests that generate text.
const generating = forms * (int(kv.LegDecode) + 1)

const classes = generating + int(tasks) - 1

// baseline is the recent times of requests, on all workers.
type baseline struct {
	waits [classes]ring // for the first byte
	pace  ring          // of a prompt token, where known
	write ring          // of a token of an answer, where known
}

// ring holds the last values.
type ring struct {
	values, sorted [baselineSize]time.Duration
	count          int // values added so far
}

func (r *ring) add(d time.Duration) {
	oldest := &r.values[r.count%baselineSize]
	rest := r.sorted[:min(r.count, baselineSize)]
	if r.count >= baselineSize {
		at, _ := slices.BinarySearch(rest, *oldest)
		rest = slices.Delete(rest, at, at+1)
	}
	at, _ := slices.BinarySearch(rest, d)
	_ = slices.Insert(rest, at, d) // within r.sorted
	*oldest = d
	r.count++
}

// high returns the 95th percentile of the values, and the highest.
func (r *ring) high() (most, all time.Duration) {
	n := min(r.count, baselineSize)
	if n == 0 {
		return 0, 0
	}
	return r.sorted[(n-1)*95/100], r.sorted[n-1]
}

// usual returns the 95th percentile of the values; other, while too few are known.
func (r *ring) usual(other time.Duration) time.Duration {
	if r.count >= paceLeast {
		other, _ = r.high()
	}
	return other
}

// own is the same of one worker, of its last requests.
type own struct {
	pace, write [ownSize]time.Duration
	paces       int // values of pace so far
	writes      int
}

// Waited records the time to the first byte of a request of that class, with the
// uncached prompt tokens on its worker when it was sent, including its own, and the tokens of
// the answer; 0: unknown. The usual time for what is allowed for separately is no part of the
// baseline: for the prompts before a stream, for both before a whole answer with a limit.
func (d *Detector) Waited(a Attempt, c Class, wait time.Duration, tokens, output int) {
	streams, limited := c.is(streamForm), c.is(limitedForm)
	rest := wait
	if streams || limited {
		rest -= d.baseline.reads() * time.Duration(max(0, tokens))
	}
	if limited {
		rest -= d.baseline.writes() * time.Duration(max(0, output))
	}
	d.baseline.waits[c].add(max(0, rest))
	if !streams || tokens < paceTokens {
		return
	}
	pace := wait / time.Duration(tokens)
	d.baseline.pace.add(pace)
	if w := d.of(a); w != nil {
		w.own.pace[w.own.paces%ownSize] = pace
		w.own.paces++
	}
}

// Wrote records the time that a worker took for the tokens of an answer.
func (d *Detector) Wrote(a Attempt, tokens int, took time.Duration) {
	if tokens < writtenTokens {
		return
	}
	each := took / time.Duration(tokens)
	d.baseline.write.add(each)
	if w := d.of(a); w != nil {
		w.own.write[w.own.writes%ownSize] = each
		w.own.writes++
	}
}

// allowed returns the longest wait of a class within the baseline. not ok: too few are known.
func (u *baseline) allowed(c Class) (wait time.Duration, ok bool) {
	r := &u.waits[c]
	if r.count < waitsLeast {
		return 0, false
	}
	most, all := r.high()
	return max(slowFactor*most, longestFactor*all), true
}

// reads returns the time that most workers take for a token of a prompt.
func (u *baseline) reads() time.Duration { return u.pace.usual(paceDefault) }

// writes returns the same of an answer.
func (u *baseline) writes() time.Duration { return u.write.usual(writeDefault) }
