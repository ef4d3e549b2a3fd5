package kv

// Knowledge is what is known of the KV cache of a worker.
type Knowledge uint8

// The knowledge.
const (
	Exact       Knowledge = iota // its events report all of its blocks
	Approximate                  // blocks of the prompts that were routed to it count
	LoadOnly                     // nothing
)

var knowledgeNames = []string{Exact: "exact", Approximate: "approximate", LoadOnly: "load_only"}

// String returns the knowledge's name.
func (k Knowledge) String() string { return knowledgeNames[k] }

// MarshalText writes its name.
func (k Knowledge) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads its name.
func (k *Knowledge) UnmarshalText(text []byte) error { return parseName(knowledgeNames, text, k) }
