package proxy

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"net/http"
	"sync"

	"kvrouter/internal/base/jsonbody"
	"kvrouter/internal/base/kv"
)

// errTokenIDsRefused means that a worker refused a request because of return_token_ids, which
// the router had added: it must be sent again without.
var errTokenIDsRefused = errors.New("the worker refuses return_token_ids")

// errTokensRefused means that a worker refused a request that had the tokens of its prompt, and
// perhaps because of them: it must be sent again without.
var errTokensRefused = errors.New("the worker refuses the tokens of the prompt")

// resent reports whether a request that failed with err must be sent again as the client wrote
// it, because a worker refused what the router had added.
func resent(err error) bool {
	return errors.Is(err, errTokenIDsRefused) || errors.Is(err, errTokensRefused) || errors.Is(err, errPacked)
}

// mostRefusers bounds the workers that are remembered.
const mostRefusers = 4096

// refusers are the workers that refuse what the router adds to requests. The zero value is empty.
type refusers struct {
	mu          sync.Mutex     // guards generations
	generations map[uint64]int // by worker
}

func (r *refusers) add(t *kv.Target) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.generations == nil || len(r.generations) >= mostRefusers {
		r.generations = map[uint64]int{}
	}
	r.generations[t.Key.Worker] = t.Generation
}

// has reports whether that incarnation of a worker has refused.
func (r *refusers) has(t *kv.Target) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	generation, known := r.generations[t.Key.Worker]
	return known && generation == t.Generation
}

// names reports whether an answer has a word in it, in whatever way its JSON escapes that.
func names(answer []byte, word string) bool {
	return bytes.Contains(answer, []byte(word)) || jsonbody.EscapesNames(answer) && bytes.Contains(jsonbody.Unescaped(answer), []byte(word))
}

// refused notes that the worker returns no token ids.
func (s *Migration) refused() {
	s.why = cmp.Or(s.why, whyNoTokens)
}

// mayBeRefused reports whether an answer with that status may refuse the router's request for
// token ids.
func (s *Migration) mayBeRefused(status int) bool {
	return s != nil && s.added && !s.begun && (status == http.StatusBadRequest || status == http.StatusUnprocessableEntity)
}

// refusesTokenIDs reports whether an answer refuses a request because of return_token_ids,
// which it names. The answer can still be read.
func refusesTokenIDs(answer *upstreamAnswer) (refused bool, err error) {
	body, err := io.ReadAll(io.LimitReader(answer, keptLimit))
	if err != nil {
		return false, err
	}
	answer.unread(body)
	return names(body, "return_token_ids"), nil
}
