package hints

import (
	"encoding/json"
	"fmt"
	"strings"

	"kvrouter/internal/base/kv"
)

// PinnedError means that a pinned worker cannot serve the request.
type PinnedError struct {
	Worker, Prefill *kv.WorkerKey // as Hints has them; not both nil
	Names           *kv.Names     // names of workers; nil: their ids
	Err             error         // why it cannot
}

// Error names the workers and the reason why they cannot serve the request.
func (e *PinnedError) Error() string {
	var named []string
	if e.Prefill != nil {
		named = append(named, fmt.Sprintf("prefill worker %s rank %d", e.Names.Label(e.Prefill.Worker), e.Prefill.Rank))
	}
	if e.Worker != nil {
		named = append(named, fmt.Sprintf("worker %s rank %d", e.Names.Label(e.Worker.Worker), e.Worker.Rank))
	}
	return fmt.Sprintf("%s, which the request pins, cannot serve it (%v); no other worker is used", strings.Join(named, " with "), e.Err)
}

// Unwrap returns Err.
func (e *PinnedError) Unwrap() error { return e.Err }

// QueryAnswer is the answer to a dry run: the workers that would serve the request. The
// fields are those of Dynamo's frontends: older versions have worker_instance_id and
// token_data, newer ones worker_id and token_ids.
type QueryAnswer struct {
	ID      string     `json:"id"`
	Object  string     `json:"object"`
	Created int64      `json:"created"` // seconds since 1970
	Model   string     `json:"model"`
	Choices []struct{} `json:"choices"`
	NVExt   struct {
		WorkerInstanceID uint64 `json:"worker_instance_id"`
		WorkerID         struct {
			PrefillWorker uint64 `json:"prefill_worker_id"`
			PrefillRank   uint32 `json:"prefill_dp_rank"`
			DecodeWorker  uint64 `json:"decode_worker_id"`
			DecodeRank    uint32 `json:"decode_dp_rank"`
		} `json:"worker_id"`
		TokenData     []uint32 `json:"token_data"`
		TokenIDs      []uint32 `json:"token_ids"`
		OverlapTokens int      `json:"overlap_tokens"`
	} `json:"nvext"`
}

// NewQueryAnswer returns the answer to a request of that id for a model. The
// prefill and the decode worker may be the same; overlap is in tokens.
func NewQueryAnswer(id, object, model string, created int64, prefill, decode kv.WorkerKey, overlap int, tokens []uint32) QueryAnswer {
	if tokens == nil {
		tokens = []uint32{} // a list in JSON, too
	}
	a := QueryAnswer{ID: id, Object: object, Created: created, Model: model, Choices: []struct{}{}}
	a.NVExt.WorkerInstanceID, a.NVExt.OverlapTokens = decode.Worker, overlap
	a.NVExt.WorkerID.PrefillWorker, a.NVExt.WorkerID.PrefillRank = prefill.Worker, prefill.Rank
	a.NVExt.WorkerID.DecodeWorker, a.NVExt.WorkerID.DecodeRank = decode.Worker, decode.Rank
	a.NVExt.TokenData, a.NVExt.TokenIDs = tokens, tokens
	return a
}

// Events returns the answer as the events of a stream.
func (a QueryAnswer) Events() ([]byte, error) {
	text, err := json.Marshal(a)
	if err != nil {
		return nil, fmt.Errorf("answer to %s: %w", AnnotationQuery, err)
	}
	return fmt.Appendf(nil, "data: %s\n\ndata: [DONE]\n\n", text), nil
}
