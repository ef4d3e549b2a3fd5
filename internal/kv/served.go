package kv

// Served is what a worker says of the base model that it serves.
type Served struct {
	Names []string // of the base model, the first one its own; none: the worker does not tell
	Root  string   // where its files were loaded from, as the worker names it; empty: it does not tell

	// BlockSize asks for the worker's block size, tokens; 0: it does not tell. nil:
	// nobody can be asked.
	BlockSize func() (tokens int, err error)
}
