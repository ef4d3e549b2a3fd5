package page

import (
	"kvrouter/internal/decide/router"
	"kvrouter/internal/peers/replica"
)

// State is the content of the page, but for the trends: event "state" of the stream. All
// times are Unix seconds; nil is shown as "unknown". Ids of workers are strings, as not
// all of them are numbers that JavaScript counts exactly.
type State struct {
	At        float64  `json:"at"`
	Version   string   `json:"version"`
	Uptime    float64  `json:"uptime"` // s
	Policy    string   `json:"policy"`
	BlockSize int      `json:"block_size"` // tokens of the blocks of the tree and of prompts
	Models    []string `json:"models"`
	ShowText  bool     `json:"show_text"` // --page-show-text
	Ready     bool     `json:"ready"`
	Draining  bool     `json:"draining"`
	TryAsks   bool     `json:"try_asks"` // a chat needs a key of the OpenAI port
	Demo      bool     `json:"demo"`     // the traffic is made up, at least in part
	Fair      bool     `json:"fair"`     // the queue is shared out between tenants

	Totals      Totals    `json:"totals"`
	Rates       Rates     `json:"rates"`
	Workers     []Worker  `json:"workers"`  // each rank, by worker and rank
	Requests    []Request `json:"requests"` // the newest first
	Cache       Cache     `json:"cache"`
	Tenants     []Tenant  `json:"tenants"`      // the busiest first
	MoreTenants int       `json:"more_tenants"` // that are left out

	Cluster *replica.Status `json:"cluster"` // as GET /cluster shows it; nil: there is none
}

// Totals count since the start of the router.
type Totals struct {
	Requests        uint64 `json:"requests"` // that have ended
	Errors          uint64 `json:"errors"`   // of those with status 500 or more
	InFlight        int    `json:"in_flight"`
	Queued          int    `json:"queued"` // in the router's queue
	PromptTokens    uint64 `json:"prompt_tokens"`
	CachedTokens    uint64 `json:"cached_tokens"`    // as reported by the workers
	ComparedTokens  uint64 `json:"compared_tokens"`  // prompt tokens of the requests counted in CachedTokens
	PredictedTokens uint64 `json:"predicted_tokens"` // as predicted by the index
	Exact           uint64 `json:"exact"`            // exact predictions
	Compared        uint64 `json:"compared"`         // predictions with an actual value from a worker
}

// Rates are values of the last minute; nil: no data.
type Rates struct {
	RequestsPerSecond float64  `json:"requests_per_second"`
	HitRate           *float64 `json:"hit_rate"` // cached share of the prompt tokens, 0 to 1
	TTFT50            *float64 `json:"ttft_p50"` // s
	TTFT99            *float64 `json:"ttft_p99"`
	ITL50             *float64 `json:"itl_p50"`
	ITL99             *float64 `json:"itl_p99"`
	Exact             *float64 `json:"exact"` // share of exact predictions, 0 to 1
}

// States of a Worker.
const (
	StateReady     = "ready"
	StateStarting  = "starting"  // never ready so far
	StateEjected   = "ejected"   // out for its failures
	StateCordoned  = "cordoned"  // gets no new requests until it is readmitted
	StatePaused    = "paused"    // a trainer has paused its engine, or put it to sleep
	StateDraining  = "draining"  // a discovered one that ends its requests, and goes
	StateNotReady  = "not-ready" // a discovered one that gets no new requests for now
	StateDown      = "down"      // has ended, or cannot be reached any more
	StateUnhealthy = "unhealthy" // runs, but does not answer
)

// Worker is one rank of a worker.
type Worker struct {
	Worker        uint64   `json:"worker,string"`
	Name          string   `json:"name,omitempty"` // of a discovered one; empty: its id
	Rank          uint32   `json:"rank"`
	URL           string   `json:"url"`
	Engine        string   `json:"engine"`
	Role          string   `json:"role"` // empty: serves aggregated requests; prefill; decode
	Model         string   `json:"model"`
	Version       string   `json:"weight_version,omitempty"` // of its weights, as far as it is known
	State         string   `json:"state"`
	Cordoned      bool     `json:"cordoned"` // until it is readmitted, also if it is not up
	Since         float64  `json:"since"`    // of the state
	Why           string   `json:"why"`      // empty: nothing to say
	Restarts      int      `json:"restarts"`
	InFlight      int      `json:"in_flight"` // requests sent by this router
	Waiting       int      `json:"waiting"`   // in the engine, as it reports
	Running       int      `json:"running"`   // the same
	KVUsage       *float64 `json:"kv_usage"`  // the same, 0 to 1
	LoadKnown     bool     `json:"load_known"`
	Blocks        int      `json:"blocks"`         // of it in the index
	ActiveBlocks  int      `json:"active_blocks"`  // of requests in flight
	PrefillTokens int      `json:"prefill_tokens"` // uncached ones to compute
	HitRate       *float64 `json:"hit_rate"`       // of the worker (all ranks), since the start
	Requests      uint64   `json:"requests"`       // the same
	EventLag      *float64 `json:"event_lag"`      // s, of the last batch of KV events
	Known         string   `json:"known"`          // how its KV cache is known: exact, approximate, load_only; empty: not attached yet
	KnownWhy      string   `json:"known_why"`      // why not exactly, and what would make it so; empty: exactly
	BlockSize     int      `json:"block_size"`     // tokens; 0: not attached yet
}

// How a Request ended.
const (
	EndRunning   = "running"
	EndDone      = "done"
	EndFailed    = "failed"    // on its worker
	EndCancelled = "cancelled" // the client disconnected
	EndRefused   = "refused"   // by the router or, with a status from 400 to 499, by the worker
)

// Request is one of the last requests.
type Request struct {
	Key           string   `json:"key"` // unique
	ID            string   `json:"id"`  // X-Request-Id, which clients may choose
	At            float64  `json:"at"`  // of its arrival
	Route         string   `json:"route"`
	Model         string   `json:"model"`
	Worker        *uint64  `json:"worker,string"`         // that answers; nil: none so far
	WorkerName    string   `json:"worker_name,omitempty"` // of a discovered one
	Rank          uint32   `json:"rank"`
	PrefillWorker *uint64  `json:"prefill_worker,string"` // that computed the prompt for it
	PrefillName   string   `json:"prefill_worker_name,omitempty"`
	CellWorker    string   `json:"cell_worker,omitempty"`    // that a router below chose; empty: none did
	CellPredicted int      `json:"cell_predicted,omitempty"` // tokens that it predicted there
	PromptTokens  int      `json:"prompt_tokens"`            // 0: unknown
	Predicted     int      `json:"predicted"`                // tokens as predicted by the index
	Cached        *int     `json:"cached"`                   // tokens that the worker reports as cached
	TTFT          *float64 `json:"ttft"`                     // s; nil: no stream, or none so far
	Duration      *float64 `json:"duration"`                 // s; nil: running
	OutputTokens  *int     `json:"output_tokens"`
	End           string   `json:"end"`
	Status        int      `json:"status"`   // HTTP; 0: running
	Attempts      int      `json:"attempts"` // workers that were asked
	Explained     bool     `json:"explained"`
	Prompt        string   `json:"prompt,omitempty"` // its beginning, with --page-show-text
}

// Receipt is a request with the explanation of its decisions.
type Receipt struct {
	// Decision is that for the worker that answers, the last of several. nil: none
	// looked when it was made, or it is gone; its keys are absent then.
	*Decision
	Request Request     `json:"request"`
	Second  *Place      `json:"second"`            // the best other candidate
	Earlier []*Decision `json:"earlier,omitempty"` // decisions before it: of the prefill worker, of failed attempts
}

// Decision is a receipt of the router's with ids as strings.
type Decision struct {
	*router.Receipt
	Worker     *uint64     `json:"worker_id,string"`
	Candidates []Candidate `json:"candidates"`
}

// Candidate is one of a Decision.
type Candidate struct {
	Worker uint64 `json:"worker_id,string"`
	router.ReceiptCandidate
}

// Place is a rank of a worker.
type Place struct {
	Worker uint64 `json:"worker_id,string"`
	Rank   uint32 `json:"dp_rank"`
}

// Cache has the hottest branches of the prompts that arrived while the dashboard
// was viewed.
type Cache struct {
	Nodes     []Node `json:"nodes"`     // a parent comes before its children
	Truncated bool   `json:"truncated"` // nodes were omitted
}

// Node is a sequence of tokens that all prompts through it share.
type Node struct {
	ID      string   `json:"id"`             // hash of all tokens up to its end, hex
	Parent  string   `json:"parent"`         // empty: it is the beginning of prompts
	Depth   int      `json:"depth"`          // blocks before it
	Tokens  int      `json:"tokens"`         // of it alone
	Workers []string `json:"workers"`        // names of those that have cached it and all before it
	Hits    int      `json:"hits"`           // prompts through it in the last 5 minutes
	Last    float64  `json:"last"`           // when the last one came
	Text    string   `json:"text,omitempty"` // its beginning, with --page-show-text
}

// Trends is event "trends" of the stream: the last hour, the oldest value first.
type Trends struct {
	Step   int     `json:"step"` // s from one value to the next
	From   float64 `json:"from"` // end of the first one's span
	Series Series  `json:"series"`
}

// Series has one value per step in each list; nil: no data.
type Series struct {
	RequestsPerSecond []*float64            `json:"requests_per_second"`
	TTFT50            []*float64            `json:"ttft_p50"` // s
	TTFT99            []*float64            `json:"ttft_p99"`
	ITL50             []*float64            `json:"itl_p50"`
	ITL99             []*float64            `json:"itl_p99"`
	HitRate           []*float64            `json:"hit_rate"`
	Exact             []*float64            `json:"exact"`
	Queued            []*float64            `json:"queued"`
	InFlight          map[string][]*float64 `json:"in_flight"` // by name of the worker
}
