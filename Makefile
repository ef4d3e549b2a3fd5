# kvrouter: `make run` sets everything up and starts a router over two vLLM workers, `make run-sglang` over two of SGLang. ARGS=... goes to kvrouter.
SHELL := bash
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.1
SHELL_SCRIPTS := ping.sh perf.sh .ci/run $(wildcard scripts/*.sh)
PYTHON_SCRIPTS = $(wildcard scripts/*.py internal/*/plugin/*.py internal/*/plugin/*/*.py internal/*/testdata/*.py testdata/*/*.py)
PYTHON ?= python3
ARGS ?=
BENCH ?= .
TEST_TIMEOUT ?= 45m
SOAK ?= 60s
FUZZTIME ?= 10s
CHAOS ?= 2m
GRID ?= policies

.DEFAULT_GOAL := help
.PHONY: help setup setup-sglang run run-disagg run-sglang run-sglang-disagg demo check test test-mooncake test-sglang test-kubernetes test-gateway test-traces test-boards test-page test-mesh lint dist test-dist bench index-bench growth sim bench-real bench-gateway bench-herding wire-speed peers parity segments soak fuzz chaos clean

help: ## Show these targets
	@printf 'kvrouter: KV-cache-aware routing over vLLM and SGLang workers\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  ARGS="--num-workers 4 ..." passes flags on to kvrouter (run..., bench-real); go run . --help lists them.\n'

setup: ## Check tools; build the native library; install vLLM and a CPU model (cached)
	@scripts/setup.sh

setup-sglang: setup ## The same for --engine sglang: SGLang in a venv of its own (cached)
	@scripts/setup-sglang.sh

# Built and then run, where `go run .` would do: a SIGTERM sent to make reaches kvrouter, while `go run` passes none on.
run: setup ## Set up, then serve on :8000 over two vLLM workers
	go build -o kvrouter .
	@exec ./kvrouter --num-workers 2 $(ARGS)

# The prompt of ping.sh has 150 tokens: with the default of 256 the second worker would compute it itself.
run-disagg: setup ## The same over one vLLM worker that computes prompts and one that answers
	go build -o kvrouter .
	@exec ./kvrouter --prefill-workers 1 --decode-workers 1 --disagg-min-uncached-tokens 64 $(ARGS)

run-sglang: setup-sglang ## Like run, over two SGLang workers
	go build -o kvrouter .
	@exec ./kvrouter --engine sglang --num-workers 2 $(ARGS)

run-sglang-disagg: setup-sglang ## Like run-disagg, over SGLang workers
	go build -o kvrouter .
	@exec ./kvrouter --engine sglang --prefill-workers 1 --decode-workers 1 --disagg-min-uncached-tokens 64 $(ARGS)

demo: ## A router over four mock workers with traffic of its own; look at http://127.0.0.1:7000/ (no GPU, Python or model needed)
	@scripts/build-native.sh
	go run . --engine mocker --demo --num-workers 4 $(ARGS)

check: lint ## The fast loop: linters and short tests
	go test -short -skip RealVLLM ./...

test: setup lint parity ## Set up, then linters and all tests (race detector, real vLLM workers)
	@echo "go test: unit, model-based and end-to-end tests; the last start real vLLM workers, which takes minutes"
	go test -race -timeout $(TEST_TIMEOUT) ./...

test-mooncake: setup ## Two real vLLM CPU workers with MooncakeConnector, over TCP (minutes)
	@scripts/mooncake.sh

test-sglang: setup-sglang ## Real SGLang CPU servers: truth, ranks, load, pairs, deaths (minutes)
	KVROUTER_SGLANG=1 go test -run RealSGLang -v -count 1 -timeout 40m .

test-kubernetes: ## A real Kubernetes API server: rollouts, its death, 200 pods, rights, the chart by helm (5 minutes; builds both once)
	@scripts/build-native.sh
	@scripts/helm.sh >/dev/null
	@folder=$$(scripts/kubernetes.sh) && echo "KVROUTER_KUBERNETES=$$folder go test -run '^TestKubernetes' ." && KVROUTER_KUBERNETES=$$folder go test -run '^TestKubernetes' -v -count 1 -timeout 20m .

test-gateway: setup ## The endpoint picker behind a real Envoy: mock workers, then two vLLM workers (5 minutes; installs Envoy once)
	@scripts/gateway.sh

test-traces: setup ## One trace through the router and a real vLLM CPU worker (a minute)
	KVROUTER_TRACES=1 go test -run TraceOnRealVLLM -v -count 1 -timeout 15m .

test-boards: ## The board and the alerts against promtool and a Prometheus that scrapes simulated workers
	@scripts/boards.sh

# KVROUTER_PAGE_PICTURES=folder makes a picture of each view, =docs those of docs/seeing.md.
test-page: ## Look at the live page in a browser; installs Debian's chromium if there is none (half a minute)
	@scripts/build-native.sh
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -q && apt-get install -qy chromium; } || { echo "test-page: chromium is missing: run apt-get install chromium as root" >&2; exit 1; }
	KVROUTER_PAGE=1 go test -count 1 -timeout 10m -run '^TestBrowser' -v .

lint: ## gofmt, go vet, staticcheck, syntax of the shell and Python scripts
	@scripts/build-native.sh
	@unformatted=$$(gofmt -l .); if [ -n "$$unformatted" ]; then echo "gofmt: not formatted:" $$unformatted "(run gofmt -w .)"; exit 1; fi
	go vet ./...
	go run $(STATICCHECK) ./...
	@for f in $(SHELL_SCRIPTS); do bash -n $$f || exit 1; done
	@$(PYTHON) -c 'import ast, sys; [ast.parse(open(f).read(), f) for f in sys.argv[1:]]' $(PYTHON_SCRIPTS)

dist: ## What is given away, into out/dist: static binaries, images, bill of materials, completions, man page
	@scripts/dist.sh

test-dist: dist ## The same, and then run what came out of it: binary and image, by chroot (as root)
	@scripts/build-native.sh
	KVROUTER_DIST=1 go test -run '^TestDist' -v -count 1 -timeout 10m .

bench: setup ## Micro-benchmarks of hashing, index, decoding and routing (BENCH=regexp)
	go test -run '^$$' -bench '$(BENCH)' -benchmem -timeout 60m ./...

index-bench: ## The index on a trace of 128 workers: rate, lookup times, memory (a minute, 4 GB)
	@scripts/build-native.sh
	go test -run '^$$' -bench '^BenchmarkIndexTrace$$' -benchtime 1x -timeout 30m ./internal/radix

growth: ## How costs grow to 512 workers and 1 M blocks: out/growth.csv, docs/growth.svg (ten minutes)
	@scripts/build-native.sh
	@mkdir -p out && rm -f out/growth.csv
	KVROUTER_GROWTH=$(CURDIR)/out/growth.csv go test -run '^TestGrowth' -p 1 -timeout 60m ./internal/router ./test
	$(PYTHON) scripts/growth_plot.py out/growth.csv docs/growth.svg

sim: ## Many loads times many policies on the simulator (minutes; GRID=grid: 103 loads on which no policy should be the wrong choice)
	@scripts/build-native.sh
	go run . simulate --grid testdata/grids/$(GRID).yaml $(ARGS)

bench-real: setup ## Every policy on two real vLLM CPU workers (ten minutes; ARGS="--policies work,round-robin")
	$(PYTHON) scripts/bench_real.py --shared $(ARGS)

bench-gateway: setup ## What the endpoint picker costs behind Envoy, beside the least of pickers and the OpenAI port (ten minutes)
	@scripts/gateway.sh bench

bench-herding: ## Three routers over the same mock workers, with and without --replica-sync, against one: spread, first token (five minutes)
	@scripts/build-native.sh
	KVROUTER_HERDING_BENCH=1 go test -run '^TestHerding$$' -v -count 1 -timeout 15m ./test

wire-speed: setup ## CPU per indexed KV event, against dynamo.indexer
	scripts/peers.sh wire

peers: setup ## Side by side with peers: KV events, simulator, proxy path
	scripts/peers.sh

test-mesh: ## Two kvrouters and one of Dynamo's selection services in one mesh: the same loads, sessions, late and lost ones
	scripts/selection_parity.sh -run '^TestMeshWithDynamo'

parity: ## Every answer of the router port beside Dynamo's selection service
	scripts/selection_parity.sh

segments: setup ## Hold fastokens, and cut and remembered prompts, against the tokenizers of nine models
	scripts/segments.sh

soak: ## Simulated workers kept busy: without faults, with them, with all coming and going, with prefill and decode apart (SOAK=60s each)
	@scripts/build-native.sh
	KVROUTER_SOAK=$(SOAK) go test -run '^TestSoak' -v -count 1 -timeout 60m ./test

fuzz: ## Every fuzz target, one after the other; stops at the first crash (FUZZTIME=10s each)
	@scripts/build-native.sh
	@FUZZTIME=$(FUZZTIME) scripts/fuzz.sh

chaos: setup ## Two routers in rolling restart over workers that crash, fail, hang and fall silent (CHAOS=2m); then each fault alone
	KVROUTER_CHAOS=$(CHAOS) go test -run '^(TestChaos|TestOneOfFourWorkers)' -v -count 1 -timeout 90m ./test

clean: ## Remove what was built here (the cache of vLLM and models stays)
	rm -rf out native/lib native/target kvrouter *.test *.prof
