// Package models keeps what the router has for each base model that the workers
// serve: an index, the state of a policy and a tokenizer of its own.
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

	"kvrouter/internal/kv"
	"kvrouter/internal/policies"
	"kvrouter/internal/radix"
	"kvrouter/internal/router"
	"kvrouter/internal/tokens"
)

const (
	// MaxModels is how many base models there are at most. One without workers makes
	// room for a new one.
	MaxModels = 32
	// maxName bounds the name of a base model that a worker tells, bytes.
	maxName = 256
)

// Flags are the settings of further models.
type Flags struct {
	ModelsDir string `group:"Model and engine" placeholder:"DIR" help:"Folder with the tokenizer files of further models that workers serve, each in a folder of its full name or of its last part. Else they are looked for in the local Hugging Face cache; without files the workers are asked for prompt tokens."`
}

// Settings say which model the router was told of, and what it gives to others.
type Settings struct {
	Flags
	Model           string // --model: a name or a folder; empty: none was told
	ServedModelName string // --served-model-name; empty: none was told
	BlockSize       int    // tokens, of a model whose workers do not tell theirs

	Policy  string
	Scoring policies.Settings
	Index   router.IndexSettings
	Routing router.Settings
	Seed    uint64

	TokenTimeout time.Duration // longest wait for a worker's own tokens
	CacheTokens  int           // that a tokenizer remembers by piece of text
}

// Ask sends a request to a worker and returns its answer.
type Ask func(ctx context.Context, t kv.Target, method, path string, header http.Header, body []byte) (status int, answer []byte, err error)

// Model is a base model with all that is the router's own for it.
type Model struct {
	Name   string         // as its workers tell it; empty: the default one, of a router that was told none
	Router *router.Router // of its workers alone
	Index  radix.Index    // the Router's, as KV events are to change it
	Tokens *tokens.Source // nil: nobody needs prompt tokens

	Requests, Refused atomic.Uint64 // of the OpenAI port: all, and those that no worker could take

	ask   Ask
	dir   string                   // of files; empty: there are none
	files *tokens.Model            // that Tokens reads by, of a further model
	names atomic.Pointer[[]string] // that a worker told last; nil: none has
	leave context.CancelFunc       // ends the comparing of its tokens; nil: it has not begun

	// The Set's mu guards these.
	members int       // workers that belong to it
	empty   time.Time // since when it has none
}

// Lists tells whether a worker that is up lists the name, as one of the model or of an
// adapter.
func (m *Model) Lists(name string) bool {
	return m.Router.Has(func(t *kv.Target) bool { return slices.Contains(t.Models, name) })
}

// remembers tells whether the name was served when the workers of the model were last
// up, or is to be: none is up now.
func (m *Model) remembers(name string) bool {
	if m.Router.Count() > 0 {
		return false
	}
	names := m.names.Load()
	return name == m.Name || names != nil && slices.Contains(*names, name)
}

// Set is all models. The first is the default one: that of --model, or of the first
// worker where none was told. It is there always; others come with their workers. Its
// methods are safe for concurrent use.
type Set struct {
	// Look brings what is known of the workers' models up to date; nil: nothing does.
	Look func(context.Context)

	settings Settings
	log      *slog.Logger

	all atomic.Pointer[[]*Model] // a slice that was read stays as it is

	holding holding

	joining sync.Mutex                 // held while a worker joins
	made    uint64                     // further models so far; joining guards it and spare
	spare   map[string][]*tokens.Model // tokenizers of models that were dropped, by folder

	mu           sync.Mutex           // guards the rest, and changes of all
	homes        map[uint64]*Model    // of the workers that have joined
	held         map[uint64]bool      // workers that get no new requests, whichever their model
	gone         tokens.Stats         // of models that were dropped
	goneSessions router.SessionCounts // likewise
	claimed      string               // name of the default model where none was told; empty: nobody has come
	comparing    context.Context      // ends Run; nil: it does not run
	compares     sync.WaitGroup       // of each model
}

// New returns a set of the default model, whose Router must be set.
func New(settings Settings, standard *Model, log *slog.Logger) *Set {
	s := &Set{settings: settings, log: log, spare: map[string][]*tokens.Model{}, homes: map[uint64]*Model{}, held: map[uint64]bool{}, gone: tokens.Stats{Reasons: map[string]uint64{}}}
	s.all.Store(&[]*Model{standard})
	return s
}

// All returns the models, the default one first. The slice never changes.
func (s *Set) All() []*Model { return *s.all.Load() }

// Default returns the default model.
func (s *Set) Default() *Model { return s.All()[0] }

// Names says how workers are called, of all models.
func (s *Set) Names() *kv.Names { return s.Default().Router.Names() }

// Of returns the model that serves a name: its own, else another one of its workers or
// an adapter's, of several models the first's. An empty name is the default model's.
// Not known: a worker is up that could tell, and none serves it or did when it was last
// up; the default model stands for it then.
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
	serves, _ := all[0].Router.Serves(name) // its workers may not tell what they serve
	return all[0], serves || all[0].remembers(name) || s.Count() == 0
}

// For returns the model that a worker belongs to: the default one, unless it has joined
// another.
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

// Join makes a worker one of the model that it serves, a new one if need be, until
// Leave. It returns the index of its blocks and the tokens in a block. An error says
// that no more models can be, or why the worker does not tell its block size.
func (s *Set) Join(worker uint64, serves kv.Served) (radix.Index, int, error) {
	size := 0
	if serves.BlockSize != nil && (!s.told() || !s.isDefault(serves)) { // who is told nothing may change its mind below
		var err error
		if size, err = serves.BlockSize(); err != nil { // the worker may be slow, and others wait for what is locked below
			return nil, 0, err
		}
	}
	s.joining.Lock()
	defer s.joining.Unlock()
	m, err := s.home(serves, size)
	if err != nil {
		return nil, 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depart(worker)
	s.homes[worker] = m
	m.members++
	return m.Index, m.Router.BlockSize(), nil
}

// Leave ends a worker's being of its model: nothing of it is followed any more.
func (s *Set) Leave(worker uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.depart(worker)
}

// depart is Leave for who holds mu.
func (s *Set) depart(worker uint64) {
	if m := s.homes[worker]; m != nil {
		delete(s.homes, worker)
		if m.members--; m.members == 0 {
			m.empty = time.Now()
		}
	}
}

// told tells whether the router was told what the default model is.
func (s *Set) told() bool { return s.settings.Model != "" || s.settings.ServedModelName != "" }

// isDefault tells whether that is the model that the router was told of. Where it was
// told of none, it is the one that came first, as long as it has workers.
func (s *Set) isDefault(serves kv.Served) bool {
	if len(serves.Names) == 0 {
		return true
	}
	if !s.told() {
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

// home returns the model that is served, with blocks of so many tokens; 0: that is not
// known. One without workers whose blocks have another size is made anew.
func (s *Set) home(serves kv.Served, size int) (*Model, error) {
	if s.isDefault(serves) {
		if len(serves.Names) > 0 {
			s.mu.Lock()
			s.claimed = serves.Names[0]
			s.mu.Unlock()
		}
		return s.Default(), nil
	}
	name := serves.Names[0]
	if m := s.named(name); m != nil {
		s.mu.Lock()
		stays := m.members > 0 || size == 0 || size == m.Router.BlockSize()
		s.mu.Unlock()
		if stays {
			return m, nil
		}
		s.drop(m)
	}
	if len(name) > maxName {
		return nil, fmt.Errorf("the name of its model has %d bytes: at most %d may be", len(name), maxName)
	}
	if !s.room() {
		return nil, fmt.Errorf("it serves %q, and the router has workers of %d base models: no more can be; run a router of its own for it", name, MaxModels)
	}
	m, err := s.make(name, serves.Root, size)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for worker := range s.held {
		m.Router.Hold(worker, true)
	}
	all := append(slices.Clone(s.All()), m)
	s.all.Store(&all)
	s.compare(m)
	return m, nil
}

// room makes room for one more model; not ok: all have workers.
func (s *Set) room() (ok bool) {
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
		s.drop(idle)
	}
	return idle != nil
}

// drop forgets a model that has no workers. Requests may use its tokenizer yet, so it is
// not closed: the next model with these files gets it.
func (s *Set) drop(m *Model) {
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
	if m.leave != nil {
		m.leave()
	}
}

// make makes what is a new model's own. size is its workers' block size, tokens; 0:
// they do not tell.
func (s *Set) make(name, root string, size int) (*Model, error) {
	if size <= 0 {
		size = s.settings.BlockSize
	}
	rule, err := policies.New(s.settings.Policy, s.settings.Scoring)
	if err != nil {
		return nil, err
	}
	log := s.log.With("model", name)
	s.made++
	index := router.NewIndex(s.settings.Index, s.settings.Policy, s.settings.Scoring.Settings, size, time.Now)
	seed := cmp.Or(s.settings.Seed, uint64(time.Now().UnixNano()))
	routing := s.settings.Routing
	routing.BusyThresholds = s.BusyThresholds()
	m := &Model{Name: name, Router: router.New(routing, router.Deps{Index: index, Policy: rule, BlockSize: size, Seed: seed + s.made, Names: s.Names(), Log: log}), Index: index, ask: s.Default().ask}
	if m.dir = s.folder(name, root); m.dir != "" {
		m.files = s.open(m.dir, log)
	} else {
		log.Info("no tokenizer here: prompt tokens come from the workers", "remedy", "put its files into a folder of --models-dir that has its name")
	}
	m.Tokens = tokens.NewSource(m.files, m.askAny, s.settings.TokenTimeout, log)
	log.Info("a further base model: it has an index, a policy and a tokenizer of its own", "root", root, "block_size", size, "default_model", s.settings.ServedModelName)
	return m, nil
}
