// Command kvrouter routes LLM requests to the vLLM or SGLang worker that already holds
// most of their prompt in its KV cache and is least busy.
//
// What nobody imports lives here, at the root: flags, wiring, the OpenAI port.
// What somebody imports lives below, in internal/. A root file opens the package
// of its name: router.go makes the router, radix.go its index, workers.go the
// workers. The packages form layers (see layers_test.go): a package imports only
// from layers above its own.
//
// A request's way: api.go reads it, package tokens finds its prompt, package
// router looks the prompt up (radix), lets a policy choose and books, package
// proxy forwards the same bytes and relays the answer, and the booking ends. A KV
// event's way: zmq, events, radix. A load report's way: workers, router.
//
// Two rules hold everywhere. Run cold, never run wrong: whatever makes the index
// doubtful ends with that worker's blocks cleared or replayed. Every booking ends
// exactly once, however its request ends.
package main
