// Command kvrouter routes each LLM request to a vLLM or SGLang worker by the prompt
// prefix in its KV cache and its load.
//
// The root package holds flags, wiring and the OpenAI port. All other packages are
// in internal/. A root file builds the part of its name: router.go the router,
// radix.go its index, workers.go the workers. The packages form layers (see
// layers_test.go): a package imports only from lower layers.
//
// Path of a request: package openai reads it, chat renders it, tokens and encode
// compute its prompt tokens, router looks them up (radix), a policy chooses a worker,
// router books it, proxy forwards the same bytes and relays the answer, and the booking
// ends. Path of a KV event: zmq, events, radix. Of a load report: workers, router.
//
// Two rules hold everywhere. Cold rather than wrong: when the index of a worker may
// be incorrect, its blocks are cleared or replayed. Every booking ends
// exactly once, however its request ends.
package main
