# kvrouter: `make run` sets everything up and starts a router with two vLLM workers, `make run-sglang` with two SGLang workers. ARGS=... is passed to kvrouter.
SHELL := bash
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.1
SHELL_SCRIPTS := ping.sh perf.sh .ci/run $(wildcard scripts/*.sh)
PYTHON_SCRIPTS = $(wildcard scripts/*.py internal/*/*/plugin/*.py internal/*/*/plugin/*/*.py internal/*/*/testdata/*.py testdata/*/*.py)
PYTHON ?= python3
ARGS ?=
# Without paths in its results, the build cache serves every checkout. Nothing uses gin's codec of
# MessagePack, a tenth of the binary.
export GOFLAGS := $(strip -trimpath -tags=nomsgpack $(GOFLAGS))
# Tests that need the native library fail without it; otherwise they are left out.
export KVROUTER_NATIVE := 1
# An engine imports 5,000 files, which each start would compile anew.
unexport PYTHONDONTWRITEBYTECODE
BENCH ?= .
TEST_TIMEOUT ?= 45m
SOAK ?= 60s
FUZZTIME ?= 10s
CHAOS ?= 2m
FAR ?= 2m
SEEDS ?= 100000
FROM ?= 1
GRID ?= policies

.DEFAULT_GOAL := help
.PHONY: help help-all setup setup-sglang run run-disagg run-sglang run-sglang-disagg demo check test test-mooncake test-sglang test-zoo test-fleet test-tiers test-migration test-sglang-migration test-routes test-vllm-own test-kubernetes test-gateway test-traces test-boards test-page test-mesh test-cluster test-relay test-cells lint dist test-dist bench index-bench growth sim bench-real bench-fair bench-rollouts bench-adapters bench-fleet bench-gateway bench-herding wire-speed peers peers-predictions parity segments soak fuzz chaos chaos-gateway dst dst-bugs docs-check clean

help: ## List the usual targets; make help-all lists all
	@printf 'kvrouter: KV-cache-aware routing for vLLM and SGLang\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  ARGS="--num-workers 4 ..." passes flags to kvrouter (run..., demo, sim). List the flags with: go run . --help=all\n'

help-all: help #: List the other targets, too
	@printf '\nTests with more set-up, and measurements:\n\n'
	@awk -F ':.*#: ' '/^[a-z-]+:.*#: / {printf "  make %-21s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Check the tools, build the native library, install vLLM and a CPU model (cached)
	@scripts/setup.sh

setup-sglang: setup ## Run setup and install SGLang into its own venv (cached)
	@scripts/setup-sglang.sh

# Builds first, because `go run` does not forward SIGTERM to the program.
run: setup ## Serve on :8000 with two vLLM workers
	go build -o kvrouter .
	@exec ./kvrouter --num-workers 2 $(ARGS)

# The prompt of ping.sh has 150 tokens: with the default of 256 the decode worker would compute it itself.
run-disagg: setup ## Serve on :8000 with one vLLM prefill and one vLLM decode worker
	go build -o kvrouter .
	@exec ./kvrouter --prefill-workers 1 --decode-workers 1 --disagg-min-uncached-tokens 64 $(ARGS)

run-sglang: setup-sglang ## Serve on :8000 with two SGLang workers
	go build -o kvrouter .
	@exec ./kvrouter --engine sglang --num-workers 2 $(ARGS)

run-sglang-disagg: setup-sglang #: Serve on :8000 with one SGLang prefill and one SGLang decode worker
	go build -o kvrouter .
	@exec ./kvrouter --engine sglang --prefill-workers 1 --decode-workers 1 --disagg-min-uncached-tokens 64 $(ARGS)

demo: ## Run four simulated workers with traffic; dashboard at http://127.0.0.1:7000/ (no GPU, Python or model needed)
	@scripts/build-native.sh
	go run . --engine mocker --demo --num-workers 4 $(ARGS)

# Four packages at a time, because many tests wait more than they compute.
check: lint ## Run the linters and the short tests
	go test -short -p 4 ./...

# The race detector watches the packages, and the built program in test/; there the tests themselves go without.
# Policies and simulations are one goroutine each, and run without it; so do proxy and router with every policy.
SEQUENTIAL := policies|policy|simulate
test: setup lint parity ## Run the linters and all tests (race detector, real vLLM workers)
	go test -race -timeout $(TEST_TIMEOUT) $$(go list . ./internal/... | grep -vE '/($(SEQUENTIAL))$$')
	go test -timeout $(TEST_TIMEOUT) $$(go list ./internal/... | grep -E '/($(SEQUENTIAL)|proxy|router)$$')
	go test -p 1 -timeout $(TEST_TIMEOUT) ./test/...

test-mooncake: setup #: Test two real vLLM CPU workers with MooncakeConnector over TCP (minutes)
	@scripts/mooncake.sh

test-sglang: setup-sglang ## Test real SGLang CPU servers: KV events, data-parallel ranks, load, disaggregation, crashes (minutes)
	KVROUTER_SGLANG=1 go test -v -count 1 -timeout 40m ./test/real/sglang

test-migration: setup #: Test 200 greedy streams over three real vLLM CPU workers, one killed every 20 s, against uninterrupted ones (10 minutes; STREAMS=n)
	KVROUTER_MIGRATION=$(or $(STREAMS),200) go test -v -count 1 -timeout 60m ./test/real/migration

test-sglang-migration: setup-sglang #: Test 60 greedy streams over two real SGLang CPU workers, one killed every 20 s, against uninterrupted ones (STREAMS=n; 18 take 16 minutes beside other work)
	KVROUTER_SGLANG_MIGRATION=$(or $(STREAMS),60) go test -run KilledSGLang -v -count 1 -timeout 60m ./test/real/migration

test-routes: setup #: Compare the answers of real vLLM workers on the routes without an exact prompt (batch, embeddings, scores, rendering, speech) with and without the router (4 minutes)
	@$(PYTHON) -m pip install --quiet --no-deps --upgrade --target out/speech soundfile==0.14.0
	KVROUTER_ROUTES=$(CURDIR)/out/speech go test -v -count 1 -timeout 30m ./test/real/routes

test-vllm-own: setup #: Run vLLM's own HTTP tests, of the installed version, directly and through the router: none may pass only directly (hours; ARGS="serve/tokenize/test_tokenization.py" runs one file)
	@scripts/vllm-own.sh $(ARGS)

test-zoo: setup-sglang #: Test predictions with real engines for 16 forms of models: windows, chunks, states, drafters, adapters (40 to 90 minutes; ZOO=folder keeps captures)
	KVROUTER_ZOO=$(or $(ZOO),run) go test -run '^TestZoo$$' -v -count 1 -timeout 3h ./test/real/zoo

test-fleet: setup-sglang #: Test one router over stock servers of vLLM, SGLang and llama.cpp, attached by URL alone, and a vLLM restarted with KV events (8 to 11 minutes on two busy cores, as long once more to compile llama.cpp; 12 GB of memory)
	@folder=$$(scripts/setup-llamacpp.sh) && echo "KVROUTER_FLEET=$$folder go test ./test/real/fleet" && KVROUTER_FLEET=$$folder go test -v -count 1 -timeout 30m ./test/real/fleet

test-tiers: setup-sglang #: Test predictions with real vLLM and SGLang workers that offload KV blocks to host memory and files (20 to 40 minutes)
	KVROUTER_TIERS=200 go test -v -count 1 -timeout 90m ./test/real/tiers

test-kubernetes: ## Test with a real Kubernetes API server: rollouts, API server outage, 200 pods, RBAC, Helm chart (5 minutes; builds the servers and Helm once)
	@scripts/build-native.sh
	@scripts/helm.sh >/dev/null
	@folder=$$(scripts/kubernetes.sh) && echo "KVROUTER_KUBERNETES=$$folder go test ./test/real/kubernetes" && KVROUTER_KUBERNETES=$$folder go test -run '^TestKubernetes' -v -count 1 -timeout 20m ./test/real/kubernetes

test-gateway: setup ## Test the endpoint picker behind a real Envoy, with simulated and real vLLM workers (5 minutes; installs Envoy once)
	@scripts/gateway.sh

test-traces: setup #: Test OpenTelemetry traces across the router and a real vLLM CPU worker (1 minute)
	go test -run '^TestTwoWorkersOnRealVLLM$$/^trace$$' -v -count 1 -timeout 15m ./test/real/vllm

test-boards: #: Test the Grafana dashboard and the alerts with promtool and a Prometheus that scrapes simulated workers
	@scripts/boards.sh

# KVROUTER_PAGE_PICTURES=folder saves a screenshot of each view, =docs updates those of docs/dashboard.md.
test-page: #: Test the dashboard in Chromium; installs Debian's package if missing (30 s)
	@scripts/build-native.sh
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -qy chromium; } || { echo "test-page: chromium is missing: run apt-get install chromium as root" >&2; exit 1; }
	KVROUTER_PAGE=1 go test -count 1 -timeout 10m -run '^TestBrowser' -v ./test/real/browser

docs-check: ## Check the pages: flags and defaults, commands, links, simulated numbers (40 s of CPU)
	@scripts/build-native.sh
	go test -count 1 -run 'Page|Help' . ./internal/tools/mocker
	go test -count 1 -run '^TestFiguresInThePages' ./test

lint: #: Run gofmt, go vet, staticcheck and syntax checks of the shell and Python scripts
	@scripts/build-native.sh
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt: not formatted:" $$unformatted "(run gofmt -w .)"; exit 1; fi
	go vet ./...
	go run $(STATICCHECK) ./...
	@for f in $(SHELL_SCRIPTS); do bash -n $$f || exit 1; done
	@$(PYTHON) -c 'import ast, sys; [ast.parse(open(f).read(), f) for f in sys.argv[1:]]' $(PYTHON_SCRIPTS)

dist: ## Build release artifacts into out/dist: static binaries, images, SBOM, completions, man page
	@scripts/dist.sh

test-dist: dist #: Build the release artifacts, then run the binary and the image in a chroot (needs root)
	@scripts/build-native.sh
	KVROUTER_DIST=1 go test -v -count 1 -timeout 10m ./test/real/dist

bench: setup ## Run the micro-benchmarks of hashing, index, decoding and routing (BENCH=regexp)
	go test -run '^$$' -bench '$(BENCH)' -benchmem -timeout 60m ./...

index-bench: #: Benchmark the index: event rate, lookup times and memory with a trace of 128 workers, lookup times with 4,096 (2 minutes, 4 GB)
	@scripts/build-native.sh
	go test -run '^$$' -bench '^BenchmarkIndex' -benchtime 1x -timeout 30m ./internal/cache/radix

growth: #: Measure scaling to 4,096 workers and 10 M blocks: out/growth.csv, docs/growth.svg (7 minutes, 4 GB)
	@scripts/build-native.sh
	@mkdir -p out && rm -f out/growth.csv
	KVROUTER_GROWTH=$(CURDIR)/out/growth.csv go test -run '^TestGrowth' -p 1 -timeout 60m ./internal/decide/router ./test
	$(PYTHON) scripts/growth_plot.py out/growth.csv docs/growth.svg

sim: ## Simulate a grid of loads and policies (minutes; GRID=policies, grid (103 loads) or holdout)
	@scripts/build-native.sh
	go build -o kvrouter .
	$(PYTHON) scripts/grid.py testdata/grids/$(GRID).toml $(ARGS)

bench-real: setup #: Benchmark every policy on two real vLLM CPU workers (10 minutes; ARGS="--policies work,round-robin")
	$(PYTHON) scripts/bench_real.py --shared $(ARGS)

bench-rollouts: #: Benchmark a step of RL training on simulated workers behind kvrouter and five policies of vllm-router (9 minutes; ARGS="--blocks 700" for small caches; needs make peers once)
	@scripts/build-native.sh
	$(PYTHON) scripts/bench_rollouts.py --vllm-router "$(firstword $(wildcard $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/kvrouter/peers-vllm-router-*/bin/vllm-router))" $(ARGS)

bench-fair: setup #: Benchmark a flood beside light chats on two real vLLM CPU workers, with and without a fair queue (10 minutes; ARGS="--seconds 300")
	$(PYTHON) scripts/bench_fair.py $(ARGS)

bench-adapters: setup #: Benchmark 8 LoRA adapters with made-up weights on two real vLLM CPU workers with slots for 2 (20 minutes; ARGS="--policies work")
	$(PYTHON) scripts/bench_adapters.py $(ARGS)

bench-fleet: setup #: Compare cache hits of vllm-router, SMG and kvrouter before 2 to 16 simulated workers with and without KV events (45 minutes; ARGS="--workers 4,8 --seeds 1")
	scripts/peers.sh fleet $(ARGS)

bench-gateway: setup #: Measure the overhead of the endpoint picker behind Envoy against a minimal picker and the OpenAI port (10 minutes)
	@scripts/gateway.sh bench

bench-herding: #: Compare three routers, with and without --cluster, with one: load distribution, time to first token (5 minutes)
	@scripts/build-native.sh
	KVROUTER_HERDING_BENCH=1 go test -run '^TestHerding$$' -v -count 1 -timeout 15m ./test

wire-speed: setup #: Compare the CPU time per indexed KV event with dynamo.indexer
	scripts/peers.sh wire

peers-predictions: setup #: Compare predicted cache hits with those of Dynamo and vllm-router, for models with windows and states, and lower tiers (5 minutes)
	scripts/peers.sh predictions

peers: setup ## Compare with other routers: KV events, simulator, proxy path, predictions
	scripts/peers.sh

test-cells: #: Test three cells and three upper routers, 2 to 90 ms apart: kills, cuts, herding (5 minutes; FAR=2m). Needs user namespaces and /dev/net/tun
	@scripts/build-native.sh
	KVROUTER_FAR=$(FAR) go test -run 'FarApart' -v -count 1 -parallel 1 -timeout 60m ./test

test-mesh: #: Test two kvrouters and a Dynamo selection service in one mesh: load, sessions, late joiners, lost messages
	scripts/selection_parity.sh -run '^TestMeshWithDynamo'

test-cluster: #: Partition a cluster of five routers, kill one, and stop an existing NATS, all under load (5 minutes; root; ARGS="--long 10 kill")
	@scripts/build-native.sh
	go build -o out/kvrouter .
	go build -o out/nats-server github.com/nats-io/nats-server/v2
	$(PYTHON) scripts/cluster_faults.py $(ARGS)

test-relay: setup #: Test the contract of Dynamo's KV relay against Dynamo's own relay, and its cells and selection services below a kvrouter
	scripts/relay.sh

parity: #: Compare every response of the router port with Dynamo's selection service
	scripts/selection_parity.sh

segments: setup #: Compare fastokens and segmented, cached prompts with the tokenizers of nine models
	scripts/segments.sh

soak: #: Load simulated workers: without faults, with faults, with workers joining and leaving, disaggregated (SOAK=60s each)
	@scripts/build-native.sh
	KVROUTER_SOAK=$(SOAK) go test -run '^TestSoak' -v -count 1 -timeout 60m ./test

fuzz: ## Run every fuzz target in turn; stops at the first crash (FUZZTIME=10s each)
	@scripts/build-native.sh
	@FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

chaos: setup ## Restart two routers in turn while their workers crash, fail, hang and stop responding (CHAOS=2m), then test each fault alone, and every policy with a client whose requests fail (15 minutes more)
	KVROUTER_CHAOS=$(CHAOS) go test -run '^(TestChaos|TestOneOfFourWorkers|TestOneKeysFailures)' -v -count 1 -timeout 120m ./test

chaos-gateway: setup #: The same behind a real Envoy with 1,000 requests in flight (CHAOS=2m), and every policy with a client whose requests fail (7 minutes more)
	@KVROUTER_CHAOS=$(CHAOS) scripts/gateway.sh chaos

dst: ## Simulate routers, workers and a faulty network in virtual time (SEEDS=100000 seeds, FROM=1; 15 ms of CPU each)
	@scripts/build-native.sh
	@mkdir -p out/dst
	go test -run '^TestSimulation$$' -v -count 1 -timeout 0 ./test/simulation -seeds $(SEEDS) -from $(FROM) -save $(CURDIR)/out/dst

dst-bugs: #: Plant bugs in a copy of the code, each of which the simulation must find within 1,000 seeds (10 minutes)
	@scripts/build-native.sh
	KVROUTER_PLANTED=1 go test -run '^TestPlantedBugs$$' -v -count 1 -timeout 60m ./test/simulation

clean: ## Remove build output (keeps the cache of vLLM and models)
	rm -rf out native/lib internal/prompt/native/link/linked.go native/target kvrouter *.test *.prof
