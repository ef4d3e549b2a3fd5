// Package page serves the dashboard: workers, recent requests with explained
// decisions, cached prompts and the trends of the last hour. Without viewers it
// computes only one step of the trends, every 10 s.
package page

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/base/metrics"
	"kvrouter/internal/base/web"
	"kvrouter/internal/decide/models"
	"kvrouter/internal/fleet/workers"
	"kvrouter/internal/peers/replica"
	"kvrouter/internal/prompt/tokens"
)

// Flags are the settings of the page.
type Flags struct {
	PagePort     int  `group:"Addresses" default:"0" help:"Port that serves only the dashboard, at the router port's address and with its key. With 0, the router port alone serves it, at /ui/."`
	PageShowText bool `group:"Addresses" help:"Show the beginnings of prompts on the dashboard instead of hashes."`
}

// Settings describe the router that the page shows.
type Settings struct {
	Flags
	Host     string    // address of its ports
	Keys     *web.Keys // that it requires; nil: none
	APIKeyed bool      // the OpenAI port requires a key
	Secure   bool      // its ports speak TLS
	Version  string
	Policy   string
	Demo     bool
	Fair     bool // the queue is shared out between tenants
}

// Journal keeps the last requests, and the prompts that arrived while the page was
// viewed. It is an openai.Observer.
type Journal struct {
	showText bool
	models   *models.Set
	model    *tokens.Model // of the default model; nil: tokens stay hashes
	now      func() time.Time
	began    time.Time

	viewers  *viewers
	requests *requests
	prompts  *prompts
}

// NewJournal returns an empty journal. model decodes the tokens of the default model's
// prompts; nil: they are shown as hashes.
func NewJournal(settings Settings, models *models.Set, model *tokens.Model) *Journal {
	return &Journal{
		showText: settings.PageShowText, models: models, model: model, now: time.Now, began: time.Now(),
		viewers: newViewers(), requests: new(requests), prompts: newPrompts(models.Names()),
	}
}

// Proxy sends short requests to workers.
type Proxy interface {
	Ask(ctx context.Context, t kv.Target, method, path string, header http.Header, body []byte) (status int, answer []byte, err error)
}

// Deps are the parts that the page shows and changes.
type Deps struct {
	Journal *Journal
	Models  *models.Set
	Fleet   *workers.Fleet
	Proxy   Proxy
	Totals  func() metrics.Totals         // of all requests
	Tenants func() []Tenant               // in any order, to be kept by the page; nil: none
	Cluster func() replica.Status         // nil: there is none
	Ready   func() (ready, draining bool) // of the OpenAI port
	OpenAI  http.Handler                  // the routes of that port
	Log     *slog.Logger
}

// Page serves the dashboard of a router. Its methods are safe for concurrent use.
type Page struct {
	*Journal
	settings Settings
	deps     Deps
	log      *slog.Logger
	sessions *sessions
	trends   *trends
}

// New returns a page. It shows data while Run runs.
func New(settings Settings, deps Deps) *Page {
	return &Page{Journal: deps.Journal, settings: settings, deps: deps, log: deps.Log, sessions: newSessions(),
		trends: newTrends(deps.Journal.began)}
}

// URL returns the page's address on a port at http://HOST:PORT.
func URL(port string) string { return port + root + "/" }

// Run computes the states until ctx ends: one a second while there are viewers, and a
// step of the trends every ten seconds.
func (p *Page) Run(ctx context.Context) {
	defer p.Close()
	second, step := time.NewTicker(time.Second), time.NewTicker(stepLength)
	defer second.Stop()
	defer step.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.viewers.over:
			return
		case <-step.C:
			p.takeStep()
		case <-second.C:
			p.show()
		case <-p.viewers.came:
			if p.viewers.stale(p.now()) {
				p.show()
			}
		}
	}
}

// Close ends all streams. It may be called any number of times.
func (p *Page) Close() { p.viewers.close() }

// show computes a state for all viewers together, if there are any.
func (p *Page) show() {
	if p.viewers.watched() {
		p.deps.Models.Decisions(0) // the next ones are explained
		p.viewers.send(eventState, p.state(p.now()), p.now())
	}
}

// takeStep adds a step to the trends and sends them to the viewers.
func (p *Page) takeStep() {
	now := p.now()
	inFlight, names := map[string]int{}, p.deps.Models.Names().Now()
	for _, load := range p.deps.Models.Loads() {
		inFlight[names.Label(load.Key.Worker)] += load.ActiveRequests
	}
	queued, _ := p.deps.Models.QueueDepth()
	p.trends.step(p.deps.Totals(), queued, inFlight, now)
	if p.viewers.watched() {
		p.viewers.send(eventTrends, p.trends.all(), now)
	}
}

// limited is a copy of the first bytes of a text, without invalid UTF-8: its source need
// not be kept.
func limited(text string, bytes int) string {
	return strings.ToValidUTF8(strings.Clone(text[:min(len(text), bytes)]), "")
}
