// Package models manages a router, an index and a tokenizer for each base model of the
// workers.
package models

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/radix"
	"kvrouter/internal/decide/policies"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/tokens"
)

const (
	// MaxModels is the maximum number of base models. A new one replaces one without
	// workers.
	MaxModels = 32
	// maxName is the maximum length of a base model's name that a worker reports, bytes.
	maxName = 256
	// maxRoot is the same for the path or repository that a model was loaded from. A longer
	// one is ignored.
	maxRoot = 4096
)

// Flags are the settings of further models.
type Flags struct {
	ModelsDir   string `group:"Model and engine" placeholder:"DIR" help:"Folder of tokenizer files for further models that workers serve, one subfolder each, named after the model or the last part of its name. Otherwise the local Hugging Face cache is searched; without files, workers tokenize the prompts."`
	chat.Limits `embed:""`

	SendTokens string `group:"Model and engine" enum:"auto,never" default:"auto" help:"Send the tokens of prompts to workers, which then need not tokenize the text again: auto (prompts of 1,024 tokens or more, to workers that have shown at attach that they take them) or never."`
}

// SendAuto is the value of --send-tokens with which long prompts are sent as tokens.
const SendAuto = "auto"

// Settings name the default model, and configure further ones.
type Settings struct {
	Flags
	Model           string // --model: a name or a folder; empty: not set
	ServedModelName string // --served-model-name; empty: not set
	BlockSize       int    // tokens, of a model whose workers do not report theirs

	Policy  string
	Scoring policies.Settings
	Index   router.IndexSettings
	Routing router.Settings
	Seed    uint64

	TokenTimeout time.Duration // maximum wait for prompt tokens of a worker
	CacheTokens  int           // capacity of a tokenizer's cache
}

// Deps are the parts that a Set uses.
type Deps struct {
	Router           *router.Router        // of the default model
	Index            radix.Index           // of Router, as KV events change it
	Tokenizer        *tokens.Model         // of the default model; nil: workers tokenize the prompts
	TokenizerRefused bool                  // Tokenizer is nil because its files could not be used
	Ask              Ask                   // nil: no worker is asked
	Look             func(context.Context) // refreshes the models of the workers; nil: they are current
	Log              *slog.Logger
}

// Ask sends a request to a worker and returns its answer.
type Ask func(ctx context.Context, t kv.Target, method, path string, header http.Header, body []byte) (status int, answer []byte, err error)

// Model is a base model with its router, index and source of prompt tokens.
type Model struct {
	Name   string         // as its workers report it; empty: the default model, which is not configured
	Router *router.Router // of its workers alone
	Index  radix.Index    // of Router, as KV events change it
	Tokens *tokens.Source

	Requests, Refused atomic.Uint64 // of the OpenAI port: all, and those that no worker could serve

	ask     Ask
	sends   bool                     // prompts as tokens
	dir     string                   // of files; empty: there are none
	files   *tokens.Model            // of a further model; nil: workers tokenize its prompts
	refused bool                     // its files, or its chat template
	names   atomic.Pointer[[]string] // last reported by a worker; nil: none yet
	stop    context.CancelFunc       // ends the comparison of its tokens; nil: it has not begun

	// The Set's mu guards these.
	members int       // workers that have joined
	empty   time.Time // when the last one left
}

// Lists reports whether a worker that is up serves the name, of the model or of an
// adapter.
func (m *Model) Lists(name string) bool {
	return m.Router.Has(func(t *kv.Target) bool { return slices.Contains(t.Models, name) })
}

// remembers reports whether the model has no worker up and served the name before, or is
// configured to.
func (m *Model) remembers(name string) bool {
	if m.Router.Count() > 0 {
		return false
	}
	names := m.names.Load()
	return name == m.Name || names != nil && slices.Contains(*names, name)
}

// Set is all models. The first is the default model, which always exists: that of
// --model, or of the first worker where none is configured. Others come with their
// workers. Its methods are safe for concurrent use.
type Set struct {
	settings Settings
	look     func(context.Context) // refreshes the models of the workers; nil: they are current
	log      *slog.Logger

	all atomic.Pointer[[]*Model] // a loaded slice never changes

	waiting waitList

	joining sync.Mutex                 // held while a worker joins, or busy thresholds change; taken before mu
	made    uint64                     // further models so far; joining guards it and spare
	spare   map[string][]*tokens.Model // tokenizers of removed models, by folder

	mu           sync.Mutex           // guards the rest, and changes of all; that of a router may be taken under it
	homes        map[uint64]*Model    // of the workers that have joined
	gone         tokens.Stats         // of removed models
	goneSessions router.SessionCounts // likewise
	claimed      string               // name of the default model where none is configured; empty: no worker has joined
	comparing    context.Context      // ends Run; nil: it does not run
	compares     sync.WaitGroup       // one for each model
}

// New returns a set of the default model alone.
func New(settings Settings, deps Deps) *Set {
	standard := &Model{
		Name: settings.ServedModelName, Router: deps.Router, Index: deps.Index, ask: deps.Ask, sends: settings.SendTokens == SendAuto,
	}
	standard.refused = deps.TokenizerRefused || deps.Tokenizer != nil && deps.Tokenizer.Problem() != ""
	standard.Tokens = tokens.NewSource(deps.Tokenizer, standard.askAny, settings.TokenTimeout, deps.Log)
	s := &Set{
		settings: settings, look: deps.Look, log: deps.Log, spare: map[string][]*tokens.Model{}, homes: map[uint64]*Model{},
		gone: tokens.Stats{Reasons: map[string]uint64{}},
	}
	s.all.Store(&[]*Model{standard})
	return s
}

// All returns the models, the default one first. The slice never changes.
func (s *Set) All() []*Model { return *s.all.Load() }

// Default returns the default model.
func (s *Set) Default() *Model { return s.All()[0] }

// Names returns the names of the workers of all models.
func (s *Set) Names() *kv.Names { return s.Default().Router.Names() }

// Of returns the model that serves a name: the model of that name, else the first whose
// workers serve it as an alias or an adapter. An empty name means the default model. A
// name that no worker serves, or served when it was last up, is unknown unless no worker
// is up; the default model is returned for it.
func (s *Set) Of(name string) (m *Model, known bool) {
	all := s.All()
	if name == "" {
		return all[0], true
	}
	for _, one := range all {
		if one.Lists(name) && (m == nil || one.Name == name) {
			m = one
		}
	}
	if m != nil {
		return m, true
	}
	for _, m := range all[1:] {
		if m.remembers(name) {
			return m, true
		}
	}
	serves := all[0].Router.Has(func(t *kv.Target) bool { return t.Serves(name) }) // those that report no models serve every name
	return all[0], serves || all[0].remembers(name) || s.Count() == 0
}

// For returns the model that a worker has joined, else the default model.
func (s *Set) For(worker uint64) *Model {
	if all := s.All(); len(all) == 1 {
		return all[0]
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if m := s.homes[worker]; m != nil {
		return m
	}
	return s.Default()
}

// Join adds a worker to the model that it serves until Leave; the model is created
// if it is new. Join returns the index for the worker's blocks. It fails if there are too many
// models.
func (s *Set) Join(worker uint64, serves kv.Served) (radix.Index, error) {
	s.joining.Lock()
	defer s.joining.Unlock()
	m, err := s.home(serves)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depart(worker)
	s.homes[worker] = m
	m.members++
	return m.Index, nil
}

// Leave removes a worker from its model.
func (s *Set) Leave(worker uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depart(worker)
}

// depart is Leave; s.mu is held.
func (s *Set) depart(worker uint64) {
	if m := s.homes[worker]; m != nil {
		delete(s.homes, worker)
		if m.members--; m.members == 0 {
			m.empty = time.Now()
		}
	}
}

// configured reports whether the settings name the default model.
func (s *Set) configured() bool { return s.settings.Model != "" || s.settings.ServedModelName != "" }

// isDefault reports whether a worker serves the default model. Where none is configured,
// it is the model of the first worker, as long as it has workers.
func (s *Set) isDefault(serves kv.Served) bool {
	if len(serves.Names) == 0 {
		return true
	}
	if !s.configured() {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.claimed == "" || s.claimed == serves.Names[0] || s.Default().members == 0 && s.named(serves.Names[0]) == nil
	}
	last := func(name string) string { return strings.ToLower(path.Base(strings.ReplaceAll(name, `\`, "/"))) }
	model, name := s.settings.Model, s.settings.ServedModelName
	return name != "" && slices.Contains(serves.Names, name) || model != "" && serves.Root != "" && last(model) == last(serves.Root)
}

// named returns the further model of that name; nil: there is none.
func (s *Set) named(name string) *Model {
	further := s.All()[1:]
	if at := slices.IndexFunc(further, func(m *Model) bool { return m.Name == name }); at >= 0 {
		return further[at]
	}
	return nil
}

// home returns the model that a worker serves, and creates it if it is new.
func (s *Set) home(serves kv.Served) (*Model, error) {
	if s.isDefault(serves) {
		if len(serves.Names) > 0 {
			s.mu.Lock()
			s.claimed = serves.Names[0]
			s.mu.Unlock()
		}
		return s.Default(), nil
	}
	if len(serves.Root) > maxRoot {
		serves.Root = ""
	}
	name := serves.Names[0]
	if m := s.named(name); m != nil {
		return m, nil
	}
	if len(name) > maxName {
		return nil, fmt.Errorf("the model name has %d bytes; the maximum is %d", len(name), maxName)
	}
	if !s.makeRoom() {
		return nil, fmt.Errorf("it serves %q, and the router already has workers of %d base models, which is the maximum; run another router "+
			"for it", name, MaxModels)
	}
	m, err := s.create(name, serves.Root)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	m.Router.Health.CordonAs(s.Default().Router.Health)
	all := append(slices.Clone(s.All()), m)
	s.all.Store(&all)
	s.compare(m)
	return m, nil
}

// makeRoom removes the model that has been without workers for longest if there are
// MaxModels; not ok: all have workers.
func (s *Set) makeRoom() (ok bool) {
	all := s.All()
	if len(all) < MaxModels {
		return true
	}
	s.mu.Lock()
	var idle *Model
	for _, m := range all[1:] {
		if m.members == 0 && (idle == nil || m.empty.Before(idle.empty)) {
			idle = m
		}
	}
	s.mu.Unlock()
	if idle != nil {
		s.remove(idle)
	}
	return idle != nil
}

// remove removes a model without workers. Requests may still use its tokenizer, so it is
// not closed but kept for the next model with the same files.
func (s *Set) remove(m *Model) {
	if m.files != nil {
		s.spare[m.dir] = append(s.spare[m.dir], m.files)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.DeleteFunc(slices.Clone(s.All()), func(other *Model) bool { return other == m })
	s.all.Store(&all)
	add(&s.gone, m.Tokens.Stats())
	_, sessions := m.Router.Sessions()
	s.goneSessions.Add(sessions)
	if m.stop != nil {
		m.stop()
	}
}

// create returns a new model.
func (s *Set) create(name, root string) (*Model, error) {
	size := s.settings.BlockSize
	rule, err := policies.New(s.settings.Policy, s.settings.Scoring)
	if err != nil {
		return nil, err
	}
	log := s.log.With("model", name)
	s.made++
	index, assumer := router.NewIndex(s.settings.Index, s.settings.Policy, s.settings.Scoring.Settings, size, time.Now)
	seed := cmp.Or(s.settings.Seed, uint64(time.Now().UnixNano()))
	routing := s.settings.Routing
	routing.BusyThresholds = s.BusyThresholds()
	deps := router.Deps{Index: index, Assumer: assumer, Policy: rule, BlockSize: size, Seed: seed + s.made, Names: s.Names(), Log: log}
	m := &Model{Name: name, Router: router.New(routing, deps), Index: index, ask: s.Default().ask, sends: s.Default().sends}
	if m.dir = s.folder(name, root); m.dir != "" {
		m.files = s.open(m.dir, log)
		m.refused = m.files == nil || m.files.Problem() != ""
	} else {
		log.Info("no tokenizer files: workers tokenize the prompts",
			"remedy", "add a folder with the model's name and its tokenizer files to --models-dir")
	}
	m.Tokens = tokens.NewSource(m.files, m.askAny, s.settings.TokenTimeout, log)
	log.Info("added a base model with its own index, policy and tokenizer", "root", root,
		"default_model", s.settings.ServedModelName)
	return m, nil
}
