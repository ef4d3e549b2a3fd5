// Package doctor looks at what a router is about to use, and says what to mend.
package doctor

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	"kvrouter/internal/kv"
	"kvrouter/internal/process"
	"kvrouter/internal/settings"
	"kvrouter/internal/workers"
)

// Command is the command that looks.
type Command struct {
	JSON bool          `group:"Doctor" name:"json" help:"Print the findings as one JSON object: ok, and findings with level (ok, note, mend), about, text and remedy."`
	Wait time.Duration `group:"Doctor" default:"5s" help:"Longest wait for each answer of a worker."`

	Unusable error `kong:"-"` // why the settings cannot be used on this machine; nil: they can
}

// Setup is what the router would start with.
type Setup struct {
	Engine   process.Engine   // whose workers are started
	Starts   bool             // there are such
	Attached bool             // there are none but those that run already
	Settings process.Settings // of these
	Ports    []settings.PortUse

	Workers   []workers.Attached
	Key       kv.Secret   // of those without one of their own
	TLS       *tls.Config // to workers; nil: the system's roots
	BlockSize int         // tokens
	KVEvents  bool        // the index is kept by them
}

// Level says how bad a finding is.
type Level string

// Levels of findings.
const (
	OK   Level = "ok"   // as it should be
	Note Level = "note" // works, and could be better or is worth to know
	Mend Level = "mend" // does not work, or gives wrong predictions
)

// Finding is one thing that was looked at.
type Finding struct {
	Level  Level  `json:"level"`
	About  string `json:"about"`            // set-up, ports, or a worker
	Text   string `json:"text"`             // what was found
	Remedy string `json:"remedy,omitempty"` // what to change, with the flag
}

// Run looks at everything and prints the findings. An error says how many there are to
// mend, or is why ctx is done.
func (c Command) Run(ctx context.Context, s Setup, out io.Writer) error {
	if c.Wait <= 0 {
		return fmt.Errorf("--wait %v must be more than 0", c.Wait)
	}
	findings := c.look(ctx, s)
	if ctx.Err() != nil { // what was cut short would be told as found
		return context.Cause(ctx)
	}
	mend := 0
	for _, f := range findings {
		if f.Level == Mend {
			mend++
		}
	}
	var err error
	if c.JSON {
		encoder := json.NewEncoder(out)
		encoder.SetEscapeHTML(false)
		encoder.SetIndent("", " ")
		err = encoder.Encode(struct {
			OK       bool      `json:"ok"`
			Findings []Finding `json:"findings"`
		}{mend == 0, findings})
	} else {
		err = printText(out, findings)
	}
	if err != nil {
		return fmt.Errorf("printing: %w", err)
	}
	switch {
	case mend == 1:
		return errors.New("doctor: 1 thing to mend")
	case mend > 1:
		return fmt.Errorf("doctor: %d things to mend", mend)
	}
	return nil
}

// printText prints one line for each finding.
func printText(out io.Writer, findings []Finding) error {
	for _, f := range findings {
		line := fmt.Sprintf("%-5s %s: %s", f.Level, f.About, f.Text)
		if f.Remedy != "" {
			line += "; " + f.Remedy
		}
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
	}
	return nil
}

// atOnce bounds the workers that are looked at side by side.
const atOnce = 32

// look returns all findings: of this machine, then of each worker, then of what they
// have in common.
func (c Command) look(ctx context.Context, s Setup) []Finding {
	all := &report{about: "set-up"}
	c.lookAtMachine(ctx, s, all)
	lookAtPorts(s.Ports, all)

	seen := make([]patient, len(s.Workers))
	room := make(chan struct{}, atOnce)
	var looks sync.WaitGroup
	for i, at := range s.Workers {
		looks.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			seen[i] = c.lookAtWorker(ctx, s, at)
		})
	}
	looks.Wait()
	for _, p := range seen {
		all.findings = append(all.findings, p.report.findings...)
	}
	all.about = "workers"
	if len(s.Workers) == 0 && s.Attached {
		all.note("none is named", "name those that run by --worker url=http://host:8100, or by POST /workers later")
	}
	compare(seen, all)
	return all.findings
}

// report gathers findings about one thing.
type report struct {
	about    string
	findings []Finding
}

func (r *report) add(level Level, text, remedy string) {
	r.findings = append(r.findings, Finding{level, r.about, text, remedy})
}

func (r *report) ok(format string, args ...any)   { r.add(OK, fmt.Sprintf(format, args...), "") }
func (r *report) note(text, remedy string)        { r.add(Note, text, remedy) }
func (r *report) mend(text string, remedy string) { r.add(Mend, text, remedy) }

// silent is where libraries log that want to.
func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }
