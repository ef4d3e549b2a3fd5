// Command kvrouter routes each LLM request to a vLLM or SGLang worker by the prompt
// prefix in its KV cache and its load.
//
// The root package contains flags and wiring. All other packages are in internal/. A
// root file builds the part of its name: api.go the OpenAI port, router.go the router,
// radix.go its index, workers.go the workers. The packages form layers (see
// layers_test.go): a package imports only from lower layers.
//
// Path of a request: package openai reads it, chat renders it, tokens and encode
// compute its prompt tokens, router looks them up (radix), a policy chooses a worker,
// router counts its load, proxy forwards the same bytes and relays the answer, and the load
// is released. Path of a KV event: zmq, events, radix. Of a load report: probe, workers,
// router.
//
// Two rules apply everywhere. Cold rather than wrong: when the index of a worker may
// be incorrect, its blocks are cleared or replayed. Counted load is released exactly
// once, however the request ends.
package main
