// Package doctor checks the machine, settings and workers of a router before a start.
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

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/settings"
	"kvrouter/internal/fleet/probe"
	"kvrouter/internal/fleet/process"
	"kvrouter/internal/prompt/tokens"
)

// Command is the command doctor.
type Command struct {
	JSON bool          `group:"Doctor" name:"json" help:"Print the findings as one JSON object: ok, and findings with level (ok, note, fail), about, text and remedy."`
	Wait time.Duration `group:"Doctor" default:"5s" help:"Maximum time to wait for each answer of a worker."`

	Unusable error             `kong:"-"` // why the settings cannot be used on this machine; nil: they can
	Misspelt map[string]string `kong:"-"` // environment variables that no flag has, with the one that is like them
}

// Setup is the configuration with which the router would start.
type Setup struct {
	Engine   process.Engine   // whose workers are started
	Starts   bool             // Engine is used
	Attached bool             // the router starts no workers; neither Starts nor Attached: it simulates them
	Settings process.Settings // of started workers
	Ports    []settings.PortUse

	ModelsDir string         // folders of further models; empty: none
	Opening   tokens.Opening // of their tokenizers and that of --model, but for the name and Python

	Workers   []probe.Server
	Key       kv.Secret   // of those without one of their own
	TLS       *tls.Config // to workers; nil: the system's roots
	BlockSize int         // tokens
	KVEvents  bool        // the index is built from KV events

	SendTokens bool // workers get the tokens of long prompts
}

// Level is the severity of a finding.
type Level string

// Levels of findings.
const (
	OK   Level = "ok"   // as it should be
	Note Level = "note" // works, but could be improved
	Fail Level = "fail" // does not work, or causes wrong predictions
)

// Finding is the result of one check.
type Finding struct {
	Level  Level  `json:"level"`
	About  string `json:"about"` // set-up, ports, or a worker
	Text   string `json:"text"`
	Remedy string `json:"remedy,omitempty"` // a change, with its flag
}

// Run runs all checks and prints the findings. The error has the number of
// problems, or is the cause of ctx.
func (c Command) Run(ctx context.Context, s Setup, out io.Writer) error {
	if c.Wait <= 0 {
		return fmt.Errorf("--wait %v must be greater than 0", c.Wait)
	}
	findings := c.check(ctx, s)
	if ctx.Err() != nil { // interrupted checks would count as failed
		return context.Cause(ctx)
	}
	failed := 0
	for _, f := range findings {
		if f.Level == Fail {
			failed++
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
		}{failed == 0, findings})
	} else {
		err = printText(out, findings)
	}
	if err != nil {
		return fmt.Errorf("printing: %w", err)
	}
	switch {
	case failed == 1:
		return errors.New("doctor: 1 problem found")
	case failed > 1:
		return fmt.Errorf("doctor: %d problems found", failed)
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

// atOnce bounds the workers that are checked concurrently.
const atOnce = 32

// check returns all findings: of this machine, then of each worker, then of the workers
// together.
func (c Command) check(ctx context.Context, s Setup) []Finding {
	all := &report{about: "set-up"}
	c.checkMachine(ctx, s, all)
	checkPorts(s.Ports, all)

	seen := make([]patient, len(s.Workers))
	room := make(chan struct{}, atOnce)
	var checks sync.WaitGroup
	for i, at := range s.Workers {
		checks.Go(func() {
			room <- struct{}{}
			defer func() { <-room }()
			seen[i] = c.checkWorker(ctx, s, at)
		})
	}
	checks.Wait()
	for _, p := range seen {
		all.findings = append(all.findings, p.report.findings...)
	}
	all.about = "workers"
	if len(s.Workers) == 0 && s.Attached {
		all.note("no worker is configured", "give the URLs of running workers, such as http://host:8000, or register them later by POST /workers")
	}
	compare(seen, all)
	return all.findings
}

// report collects findings about one subject.
type report struct {
	about    string
	findings []Finding
}

func (r *report) add(level Level, text, remedy string) {
	r.findings = append(r.findings, Finding{level, r.about, text, remedy})
}

func (r *report) ok(format string, args ...any)   { r.add(OK, fmt.Sprintf(format, args...), "") }
func (r *report) note(text, remedy string)        { r.add(Note, text, remedy) }
func (r *report) fail(text string, remedy string) { r.add(Fail, text, remedy) }

// silent discards the log of libraries.
func silent() *slog.Logger { return slog.New(slog.DiscardHandler) }
