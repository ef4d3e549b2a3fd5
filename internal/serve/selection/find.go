package selection

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"sync"
	"time"

	"github.com/gin-gonic/gin"

	"kvrouter/internal/base/kv"
	"kvrouter/internal/cache/events"
	"kvrouter/internal/decide/policy"
	"kvrouter/internal/decide/router"
	"kvrouter/internal/decide/thompson"
	"kvrouter/internal/prompt/hints"
)

// maxOpenDecisions is the maximum number of decisions of /find_worker that await
// feedback. Beyond it, a decision has no id.
const maxOpenDecisions = 1 << 16

// noReuse is the NeMo Agent Toolkit's prefix id for a request without a prefix.
const noReuse = "<no_reuse>"

// openDecisions are the decisions of /find_worker by id. They are booked until /feedback
// reports their end, or as long as the policy waits for it. It is safe for concurrent
// use.
type openDecisions struct {
	mu   sync.Mutex // guards byID
	byID map[string]*openDecision
}

type openDecision struct {
	booking *router.Booking
	forget  *time.Timer
}

// put stores a booking, which ends after limit; false: there are maxOpenDecisions.
func (o *openDecisions) put(id string, b *router.Booking, limit time.Duration) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if len(o.byID) >= maxOpenDecisions {
		return false
	}
	o.byID[id] = &openDecision{b, time.AfterFunc(limit, func() {
		if b := o.take(id); b != nil {
			b.End()
		}
	})}
	return true
}

// take removes and returns the booking of an id; nil: there is none.
func (o *openDecisions) take(id string) *router.Booking {
	o.mu.Lock()
	defer o.mu.Unlock()
	d := o.byID[id]
	if d == nil {
		return nil
	}
	d.forget.Stop()
	delete(o.byID, id)
	return d.booking
}

// findWorkerQuery is the request of the NeMo Agent Toolkit's processor to its router.
type findWorkerQuery struct {
	Tokens       []uint32 `json:"tokens"`
	PrefixID     string   `json:"prefix_id"`
	ReuseBudget  int      `json:"reuse_budget"` // requests of the series still to come
	ExpectedOSL  string   `json:"expected_osl"` // LOW, MEDIUM, HIGH, or tokens
	Interarrival string   `json:"interarrival"` // the same, or ms
}

func (q findWorkerQuery) request() router.Request {
	id := q.PrefixID
	if id == noReuse {
		id = ""
	}
	budget := min(max(0, q.ReuseBudget), kv.MaxTokens)
	return router.Request{Tokens: q.Tokens, AnsweredWhole: true, Prefix: hints.Prefix{
		ID: id, Budget: &budget, OSL: hints.OSLBounds.Parse(q.ExpectedOSL), IAT: hints.IATBounds.Parse(q.Interarrival),
	}}
}

// findWorkerAnswer names a worker; worker_id is -1 if there is none.
type findWorkerAnswer struct {
	WorkerID      any     `json:"worker_id"`
	DPRank        uint32  `json:"dp_rank,omitempty"`
	PrefixHitRate float64 `json:"prefix_hit_rate"` // cached share of the prompt's full blocks
	DecisionID    *string `json:"decision_id"`     // for /feedback; null: no feedback is expected
}

// findWorker selects a worker for a client that forwards its request itself. For a policy
// that learns, the request is booked until /feedback reports its result; for others
// nothing is booked, as for /find_best_worker.
func (s *Service) findWorker(c *gin.Context, query findWorkerQuery) {
	switch {
	case query.Tokens == nil:
		plainError(c, http.StatusUnprocessableEntity, "bad body: tokens is missing: give the prompt's token ids")
		return
	case len(query.PrefixID) > hints.MaxPrefixID:
		plainError(c, http.StatusBadRequest, fmt.Sprintf("prefix_id is longer than %d bytes", hints.MaxPrefixID))
		return
	}
	request := query.request()
	limit := s.feedbackTime()
	request.ChooseOnly = limit == 0
	ctx := c.Request.Context()
	d, err := s.models.Default().Router.Route(ctx, s.within(request, events.Partition{Group: events.DefaultGroup}))
	if err != nil {
		c.JSON(http.StatusOK, findWorkerAnswer{WorkerID: -1})
		return
	}
	answer := findWorkerAnswer{WorkerID: d.Target.Key.Worker, DPRank: d.Target.Key.Rank}
	if blocks := d.Tokens / d.BlockSize; blocks > 0 {
		answer.PrefixHitRate = float64(d.MatchedBlocks) / float64(blocks)
	}
	if d.Booking != nil {
		id := newDecisionID()
		if ctx.Err() == nil && s.decisions.put(id, d.Booking, limit) {
			answer.DecisionID = &id
		} else {
			d.Booking.End() // there will be no feedback
		}
	}
	c.JSON(http.StatusOK, answer)
}

// feedbackTime returns the time that the policy waits for feedback; 0: it expects none.
func (s *Service) feedbackTime() (limit time.Duration) {
	thompson.With(s.models.Default().Router.WithPolicy, func(p *thompson.Policy) { limit = p.FeedbackTimeout() })
	return limit
}

// newDecisionID returns a version-4 UUID in hexadecimal digits.
func newDecisionID() string {
	var id [16]byte
	rand.Read(id[:])
	id[6], id[8] = id[6]&0x0f|0x40, id[8]&0x3f|0x80
	return hex.EncodeToString(id[:])
}

// feedbackQuery is the result of a request.
type feedbackQuery struct {
	DecisionID   string   `json:"decision_id"`
	LatencyMS    *float64 `json:"latency_ms"`
	Success      *bool    `json:"success"` // default: true
	TokensIn     int      `json:"tokens_in"`
	TokensOut    int      `json:"tokens_out"`
	FinishReason string   `json:"finish_reason"`
}

// readFeedback parses and validates a query.
func readFeedback(text []byte) (q feedbackQuery, err error) {
	if err := json.Unmarshal(text, &q); err != nil {
		return q, fieldError(err)
	}
	switch {
	case q.DecisionID == "":
		err = errors.New("decision_id is missing: give the one in the response of /find_worker")
	case q.LatencyMS == nil:
		err = errors.New("latency_ms is missing: give the time from sending the request to the end of its response")
	case !(*q.LatencyMS >= 0 && *q.LatencyMS <= maxFeedbackMS):
		err = errors.New("latency_ms must be a duration of at least 0")
	case q.TokensIn < 0 || q.TokensOut < 0:
		err = errors.New("tokens_in and tokens_out must not be negative")
	case q.TokensIn > kv.MaxTokens || q.TokensOut > kv.MaxTokens:
		err = fmt.Errorf("tokens_in and tokens_out must be at most %d", kv.MaxTokens)
	}
	return q, err
}

// maxFeedbackMS is the longest latency that a time.Duration can be.
const maxFeedbackMS = float64(math.MaxInt64 / int64(time.Millisecond))

// feedback converts the query. A cancelled request counts as abandoned only where that bug
// of the original is fixed (mended).
func (q feedbackQuery) feedback(mended bool) policy.Feedback {
	f := policy.Feedback{Ending: policy.Finished, Latency: time.Duration(*q.LatencyMS * float64(time.Millisecond)), TokensIn: q.TokensIn,
		TokensOut: q.TokensOut, Finish: q.FinishReason}
	switch {
	case mended && policy.Aborted(q.FinishReason):
		f.Ending = policy.Abandoned
	case !Given(q.Success, true):
		f.Ending = policy.Failed
	}
	return f
}

// feedbackAnswer is the effect of a feedback. The numbers are 0 where nothing was learned,
// as from a cancelled request.
type feedbackAnswer struct {
	OK           bool    `json:"ok"`
	UsedBaseline float64 `json:"used_baseline"` // baseline latency, ms
	Reward       float64 `json:"reward"`        // 0 to 1
	WorkerID     *uint64 `json:"worker_id,omitempty"`
	Error        string  `json:"error,omitempty"`
}

// feedback records the result of a request that /find_worker decided on. An invalid query
// gets ok false and an error, as in the NeMo Agent Toolkit; the decision still awaits its
// feedback.
func (s *Service) feedback(c *gin.Context, text json.RawMessage) {
	query, err := readFeedback(text)
	if err != nil {
		c.JSON(http.StatusOK, feedbackAnswer{Error: "bad body: " + err.Error()})
		return
	}
	if booking := s.decisions.take(query.DecisionID); booking != nil {
		mended := true
		thompson.With(s.models.Default().Router.WithPolicy, func(p *thompson.Policy) { mended = p.SparesAborts() })
		if ack, known := booking.Report(query.feedback(mended)); known {
			c.JSON(http.StatusOK, feedbackAnswer{OK: true, UsedBaseline: ack.Baseline, Reward: ack.Reward, WorkerID: &ack.Worker.Worker})
			return
		}
	}
	c.JSON(http.StatusOK, feedbackAnswer{Error: "unknown_decision"})
}
