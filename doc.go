// Kvrouter routes OpenAI requests to the vLLM worker where they cost least: the
// one that already holds the longest prefix of the prompt in its KV cache,
// weighed against how busy it is.
//
// The package is flat; a file is one noun, and a capitalised name is what a
// file offers to the others. In the order in which a request passes them:
//
//	api.go        the OpenAI side: routes, limits, errors, request ids
//	nvext.go      what a request says about its own routing (prefixhints.go: about
//	              the series of requests that it belongs to)
//	jsonscan.go   Body: a request's JSON, checked and taken apart once (jsontext.go
//	              writes JSON with its order kept)
//	prompts.go    Tokens: a request's prompt tokens, from here or from a worker
//	              (probe.go: what is compared with a worker's at start)
//	segments.go   Segments: tokens of prompt pieces that were seen before
//	tokens.go     Model: tokenizer and chat templates (modelfiles.go finds them,
//	              normalize.go, chatcontext.go, chatoptions.go and tooldump.go make
//	              of a chat what vLLM's templates get, render.go and native/ render
//	              it, segments.go remembers the tokens of its pieces)
//	hashes.go     block hashes of those tokens
//	router.go     Router: look up, choose, book, free
//	index.go      Index: which worker holds which blocks
//	radix.go      Radix: the same known from KV events (radixnodes.go, workersets.go,
//	              hashtable.go and spinlock.go are what it is made of)
//	approx.go     Approx: the same assumed from what was routed (prefixtrees.go:
//	              SGLang's kind of it)
//	load.go       Loads: how busy each worker is, as published and as booked
//	booking.go    Booking: one request in flight
//	queue.go      admission: those that wait until a worker has room
//	busy.go       BusyThresholds: when requests are refused
//	policy.go     Policy: the rules that choose a worker (kvpolicy.go, cachepolicy.go,
//	              work.go with timing.go, which learns how long engines take)
//	thompson.go   the one that learns which worker is good for what (thompsonmath.go:
//	              bandits, thompsonreward.go: what a decision earns,
//	              thompsonstats.go: its numbers, thompsonconfig.go, thompsonstate.go and
//	              thompsontrace.go: its files; recent.go: bounded maps)
//	proxy.go      one request to one worker and back (streamevents.go follows the
//	              events of its answer)
//	role.go       Disagg: which part of a request a worker computes (detect.go
//	              asks it)
//	pair.go       Pair: two workers chosen for one request
//	disagg.go     Pairs: one request to two workers and back (disaggbody.go: what
//	              each gets, sharedrequest.go: what both legs know of each other,
//	              mooncake.go: what only that protocol has, disaggmetrics.go)
//	selection.go  the router port, for those who only want the decision
//	              (selectroutes.go: choosing and booking, findworker.go the same
//	              with feedback, reservations.go what is booked,
//	              selectworkers.go the workers; dump.go: the index as
//	              JSON, to start another router from)
//	events.go     EventStream: one worker's KV events, in order and complete
//	              (eventcodec.go decodes them, zmqconn.go carries them,
//	              eventreplay.go fetches what was missed)
//	eventlog.go   EventLog: the last of them, for other routers that missed some
//	workers.go    Fleet: started workers (launch.go, nixl.go, process.go, startlog.go),
//	              attached ones (attach.go) and those registered at run time
//	              (registered.go); incarnation.go is what they share, models.go
//	              what they serve
//	replica.go    Replicas: several routers know what each has in flight
//	telemetry.go  Prometheus metrics (dynamometrics.go those under Dynamo's
//	              names, thompsonmetrics.go those of policy thompson); record.go
//	              writes a line a request (jsonlines.go)
//	enginesim.go  SimEngine: a simulated engine, step by step (blockpool.go: its
//	              memory, enginefetch.go: prompts that another engine computes)
//	mocker.go     simulated workers behind real sockets (mockapi.go, mockrequest.go and
//	              mockanswer.go and mockadapters.go: their HTTP side, mockrank.go:
//	              their engine, mockdisagg.go: prompts computed by one for another,
//	              mockevents.go, mockmodel.go, mockwords.go, zmqserver.go)
//	simulate.go   traces in virtual time (trace.go reads them, synthetic.go and
//	              agentic.go make some up, handover.go moves prompts between
//	              workers, report.go and plot.go show what came out)
//	config.go     every flag (mockconfig.go and simconfig.go those of simulations,
//	              vllmargs.go what follows --, configfile.go reads the YAML file,
//	              machine.go what the defaults depend on, ports.go what will
//	              be listened on)
//	main.go       wires all this and ends it again
//
// Three things to know before changing anything:
//
// The index is exact or empty. Whatever makes a worker's part of it doubtful
// (a gap that cannot be replayed, a restart, a broken event) empties that part;
// a wrong match is never the cheaper choice. Only --no-kv-events asks for a guess
// instead, which answers correct.
//
// Choosing and booking happen under one lock, Router.mu, so that requests
// arriving together see each other. Nothing under it waits for anything.
//
// The client's bytes reach the worker unchanged, so that what the engine
// renders is what was hashed here. The exceptions are asking a stream for its
// usage, and what two workers need to share a request; both go into copies.
package main
