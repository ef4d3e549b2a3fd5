package kv

// Served describes the base model that a worker reports.
type Served struct {
	Names []string // of the base model, its own first; none: not reported
	Root  string   // path or hub id that its files were loaded from; empty: not reported
}
