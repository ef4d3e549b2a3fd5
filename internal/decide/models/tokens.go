package models

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"time"

	"github.com/tidwall/gjson"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/prompt/chat"
	"kvrouter/internal/prompt/tokens"
)

// folder returns the folder of a model's tokenizer files; empty: there are none. The
// names come from workers, so only local folders below --models-dir and the Hugging Face
// cache are searched and nothing is downloaded. In the cache, root takes precedence over
// the name that clients use, which may be any.
func (s *Set) folder(name, root string) string {
	if s.settings.ModelsDir != "" {
		for _, model := range []string{root, name} {
			for _, folder := range []string{model, path.Base(model)} {
				dir := filepath.Join(s.settings.ModelsDir, folder)
				if model != "" && folder != "." && filepath.IsLocal(folder) && chat.FileExists(dir, "tokenizer.json") {
					return dir
				}
			}
		}
	}
	return chat.Cached(cmp.Or(root, name))
}

// open opens the tokenizer in a folder; nil: it cannot be read, and workers tokenize the
// prompts.
func (s *Set) open(dir string, log *slog.Logger) *tokens.Model {
	if spare := s.spare[dir]; len(spare) > 0 {
		s.spare[dir] = spare[1:]
		return spare[0]
	}
	model, err := tokens.Open(context.Background(), tokens.Opening{Name: dir, CacheTokens: s.settings.CacheTokens, Limits: s.settings.Limits},
		log)
	if err != nil {
		log.Warn("cannot open the tokenizer: workers tokenize the prompts", "folder", dir, "error", err)
		return nil
	}
	log.Info("opened the tokenizer", "folder", dir)
	return model
}

// CheckDir returns an error if --models-dir is set and no folder.
func (f Flags) CheckDir() error {
	if f.ModelsDir == "" {
		return nil
	}
	if info, err := os.Stat(f.ModelsDir); err != nil || !info.IsDir() {
		return fmt.Errorf("--models-dir %s: no such folder; give a folder with a subfolder of tokenizer files for each model", f.ModelsDir)
	}
	return nil
}

// askAny sends a tokenize or render request to the least loaded worker.
func (m *Model) askAny(ctx context.Context, path string, body []byte) ([]byte, error) {
	engine := kv.EngineVLLM
	if m.Tokens.SGLang() {
		engine = kv.EngineSGLang
	}
	target, ok := m.Router.Health.Idlest(engine)
	if !ok {
		return nil, router.ErrNoWorker
	}
	return m.asker(target)(ctx, path, body)
}

// asker sends such requests to one worker.
func (m *Model) asker(target kv.Target) tokens.Asker {
	return func(ctx context.Context, path string, body []byte) ([]byte, error) {
		asked := time.Now()
		status, answer, err := m.ask(ctx, target, http.MethodPost, path, http.Header{"Content-Type": {"application/json"}}, body)
		if err != nil {
			m.Router.Health.AskFailed(ctx, target, asked)
		}
		if err == nil && status != http.StatusOK {
			err = &tokens.AskError{Status: status, Answer: answer}
		}
		return answer, err
	}
}

// peers returns the workers whose prompt tokens are compared with the router's own: one rank of
// each that the router may ask, as the ranks of a worker share a server.
func (m *Model) peers() []tokens.Peer {
	peers, complete := make([]tokens.Peer, 0, m.Router.Count()), m.completePeer
	m.Router.Has(func(t *kv.Target) bool {
		if last := len(peers) - 1; !t.Unanswered && (last < 0 || peers[last].ID != t.Key.Worker) {
			p := peerOf(t)
			p.Complete = complete
			peers = append(peers, p)
		}
		return false
	})
	return peers
}

// completePeer sets how a worker is asked. The maximum prompt length comes from the engine's list
// of models, because its flags may set a lower one than the model's files.
func (m *Model) completePeer(p *tokens.Peer) bool {
	targets := kv.OnePerWorker(m.Router.Ranks(p.ID))
	if len(targets) == 0 {
		return false
	}
	t := targets[0]
	*p = peerOf(&t)
	p.Ask, p.MayTake = m.asker(t), m.mayTake(t)
	p.MaxModelLen = func(ctx context.Context) int {
		_, answer, _ := m.ask(ctx, t, http.MethodGet, "/v1/models", nil, nil)
		return int(gjson.GetBytes(answer, "data.0.max_model_len").Int())
	}
	return true
}

// peerOf returns what is known of a worker without asking it.
func peerOf(t *kv.Target) tokens.Peer {
	return tokens.Peer{ID: t.Key.Worker, Generation: t.Generation, SGLang: t.Engine == kv.EngineSGLang}
}

// TakesTokens returns the routes on which that incarnation of a worker takes the tokens of
// prompts; nil: it has not been asked.
func (s *Set) TakesTokens(worker uint64, generation int) (routes []string) {
	takes, known := s.For(worker).Tokens.Takes(worker, generation)
	if !known {
		return nil
	}
	return takes.Routes()
}

// mayTake returns whether a worker may be asked whether it takes token ids; nil: it is not.
// A part of a pair of SGLang's answers no request alone, and its chat templates with a
// name of their own add stop strings, which it leaves out with token ids.
func (m *Model) mayTake(t kv.Target) func(context.Context) bool {
	switch {
	case !m.sends:
		return nil
	case t.Engine != kv.EngineSGLang:
		return func(context.Context) bool { return true }
	}
	return func(ctx context.Context) bool {
		if t.Role != kv.RoleBoth {
			return false
		}
		status, answer, err := m.ask(ctx, t, http.MethodGet, "/server_info", nil, nil)
		info := gjson.ParseBytes(answer)
		return err == nil && status == http.StatusOK && info.IsObject() && info.Get("chat_template").Type == gjson.Null &&
			info.Get("completion_template").Type == gjson.Null
	}
}

// Run compares the router's prompt tokens of every model with those of its workers until
// ctx is done.
func (s *Set) Run(ctx context.Context) {
	s.mu.Lock()
	s.comparing = ctx
	for _, m := range s.All() {
		s.compare(m)
	}
	s.mu.Unlock()
	<-ctx.Done()
	s.mu.Lock()
	s.comparing = nil
	s.mu.Unlock()
	s.compares.Wait()
}

// compare starts the comparison for a model if Run runs; s.mu is held. The goroutine ends
// when the model is removed or Run ends.
func (s *Set) compare(m *Model) {
	if s.comparing == nil {
		return
	}
	var ctx context.Context
	ctx, m.stop = context.WithCancel(s.comparing)
	s.compares.Go(func() { m.Tokens.KeepComparing(ctx, m.peers) })
}
