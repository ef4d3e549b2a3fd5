package kv

// Served describes the base model that a worker reports.
type Served struct {
	Names []string // of the base model, its own first; none: not reported
	Root  string   // path or hub id that its files were loaded from; empty: not reported

	// BlockSize queries the worker's block size, tokens; 0: not reported. nil: the worker
	// cannot be queried.
	BlockSize func() (tokens int, err error)
}
