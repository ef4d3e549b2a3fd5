package process

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// Stages of a worker's start, as shown to users.
const (
	StageProcess = "starting process"
	StageReady   = "ready"
)

// Signs map the output of an engine to the progress of its start and the cause of its
// end. The zero value, for workers that print nothing, maps nothing.
type Signs struct {
	Engine   string // its display name
	Stages   []Stage
	Failures []Failure

	// Error is part of every line that reports an error of a ready worker. Routine
	// are parts of lines that never explain the end of a process.
	Error   string
	Routine []string
}

// Stage is a later stage of a start with the engine's log text at its begin.
type Stage struct {
	Name  string
	Signs []string
}

// Failure maps the message of an engine that cannot start to a remedy. A lasting one is
// not cured by another attempt.
type Failure struct {
	Sign, Advice string
	Lasting      bool
}

// StartLog reads the output of a worker process: the stage of its start, and the
// lines that explain an early end. It is safe for concurrent use.
type StartLog struct {
	signs Signs

	mu     sync.Mutex // guards the rest
	stage  int        // index into signs.Stages, -1 before the first
	ready  bool       // the start is over
	ending bool       // it has been asked to end
	recent []string   // last lines that may explain an end, oldest first
}

// tailLines is how much of a dead worker's output is shown.
const tailLines = 20

// NewStartLog returns the log of a worker that is about to start.
func NewStartLog(signs Signs) *StartLog { return &StartLog{signs: signs, stage: -1} }

// Line reads one line of output and returns the stage that begins with it, if any,
// and whether the line is an error of a ready worker. The stage never goes back:
// some signs appear more than once.
func (s *StartLog) Line(text string) (stage string, failure bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	failure = s.ready && !s.ending && s.signs.Error != "" && strings.Contains(text, s.signs.Error)
	if !failure && !s.signs.isRoutine(text) {
		if len(s.recent) == tailLines {
			s.recent = s.recent[1:]
		}
		s.recent = append(s.recent, text)
	}
	for i := s.stage + 1; i < len(s.signs.Stages) && !s.ready; i++ {
		for _, sign := range s.signs.Stages[i].Signs {
			if strings.Contains(text, sign) {
				s.stage = i
				return s.signs.Stages[i].Name, failure
			}
		}
	}
	return "", failure
}

// isRoutine reports lines that never explain why a process ended: among them those
// of the long list of flags that goes before an error about one.
func (s *Signs) isRoutine(text string) bool {
	const usage = "[--"
	return strings.HasPrefix(strings.TrimSpace(text), usage) ||
		slices.ContainsFunc(s.Routine, func(sign string) bool { return strings.Contains(text, sign) })
}

// SetReady ends the start: earlier output does not explain a later end.
func (s *StartLog) SetReady() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ready, s.recent = true, nil
}

// SetEnding records that the worker is being stopped, which an API server may
// report as the death of its engine.
func (s *StartLog) SetEnding() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ending = true
}

// Tail returns the last lines that may explain an end, without the errors that
// Line has reported.
func (s *StartLog) Tail() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.recent...)
}

// EndError is the cause of the unexpected end of a worker's process, with a remedy.
type EndError struct {
	engine  string
	reason  string
	line    string // of its output, that explains it; may be empty
	advice  string
	Lasting bool // a restart will not help
}

func (e *EndError) Error() string {
	if e.line == "" {
		return fmt.Sprintf("%s ended (%s): %s", e.engine, e.reason, e.advice)
	}
	return fmt.Sprintf("%s ended (%s): %s [%s]", e.engine, e.reason, e.advice, strings.TrimSpace(e.line))
}

// Explain returns the cause of a process's end, with a remedy found in its last
// lines.
func (s *Signs) Explain(reason string, lines []string) *EndError {
	end := &EndError{engine: s.Engine, reason: reason}
	for _, known := range s.Failures {
		for _, line := range lines {
			if strings.Contains(line, known.Sign) {
				end.line, end.advice, end.Lasting = line, known.Advice, known.Lasting
				return end
			}
		}
	}
	switch {
	case reason == "signal: killed":
		end.advice = "it was killed by a user, or by the system for lack of memory (see dmesg)"
	case len(lines) == 0:
		end.advice = "--log-level debug shows its output"
	default:
		end.advice = "its last lines are above; --log-level debug shows all of them"
	}
	return end
}
