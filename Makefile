# Every target is a line or two; what they do is Python in deploy/local. `make` alone lists them.
PYTHON ?= python3
PY := .venv/bin/python
STACK := PYTHONPATH=. $(PY) -m deploy.local
SUITE := $(PY) -m tests.suite
SUITE_OPTIONS = $(addprefix --part ,$(PART)) $(if $(SHARD),--shard $(SHARD)) $(if $(COVERAGE),--coverage) $(if $(KEEP_GOING),--keep-going)
SETTINGS = $(if $(PORT),--port $(PORT)) $(if $(DTYPE),--dtype $(DTYPE)) $(if $(ENGINES),--engines $(ENGINES)) $(if $(STORE),--store $(STORE)) $(if $(DEV),--dev)
PROTOS := $(wildcard proto/contextcache/v1/*.proto proto/contextcache/extproc/v3/*.proto)
STUBS := contextcache/v1 contextcache/extproc/v3
BUILDER ?= $(firstword $(notdir $(shell command -v docker buildah)))
RELEASE = $(shell $(PYTHON) -m deploy.release version)
IMAGE_OPTIONS = --build-arg VERSION=$(RELEASE) $(if $(PYTHON_IMAGE),--build-arg PYTHON_IMAGE=$(PYTHON_IMAGE))
OURS := contextcache context_manager kv_sidecar vllm_plugin integrations gateway pod_injector deploy tests benchmarks examples
PROSE := README.md SECURITY.md CONTRIBUTING.md CHANGELOG.md tests/README.md charts/context-cache/README.md docs
export TORCH_INDEX
export SEED

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' Makefile)

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: .venv/.installed contextcache/client/errors.py ## install all packages into .venv, minutes at first; TORCH_INDEX=<url> if pip finds no CPU torch
.venv/.installed: pyproject.toml deploy/server/pyproject.toml requirements.lock
	@PYTHONPATH=. $(PYTHON) -m deploy.local.install
contextcache/client/errors.py: contextcache/errors.py $(wildcard contextcache/client/_async/*.py) deploy/client_sources.py | .venv/.installed
	@PYTHONPATH=. $(PY) -m deploy.client_sources

lock: ## lock versions and hashes of all packages; needs uv; UPGRADE=<package>
	@PATH="$$PWD/.venv/bin:$$PATH" UPGRADE=$(UPGRADE) PYTHONPATH=. $(PYTHON) -m deploy.lock

proto: .build/proto/.installed ## generate the gRPC stubs
	@.build/proto/bin/python -m grpc_tools.protoc -I proto $(addprefix --,$(addsuffix =.,python_out grpc_python_out mypy_out mypy_grpc_out)) \
	  --plugin=.build/proto/bin/protoc-gen-mypy --plugin=.build/proto/bin/protoc-gen-mypy_grpc $(PROTOS)
	@PYTHONPATH=. $(PYTHON) -m deploy.local.proto_tools $(addsuffix /*_grpc.pyi,$(STUBS))
proto-check: proto ## check that the committed gRPC stubs match the protos
	@git diff --exit-code --stat -- $(STUBS) && test -z "$$(git status --porcelain -- $(STUBS))"
.build/proto/.installed: deploy/local/proto_tools.py
	@PYTHONPATH=. $(PYTHON) -m deploy.local.proto_tools

client-ts: install ## generate the types of the TypeScript client, compile and pack it in .build/client-ts
	@PYTHONPATH=. $(PY) -m deploy.client_ts

fmt: install ## format all sources
	@$(PY) -m ruff check --fix-only --quiet . ; $(PY) -m ruff format . && .venv/bin/buf format -w

lint: install ## check style, types, imports, protos, spelling, dependencies, Dockerfiles, workflows and language
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && .venv/bin/lint-imports
	@.venv/bin/buf lint && .venv/bin/buf format --diff --exit-code && .venv/bin/codespell && .venv/bin/deptry contextcache deploy
	@.venv/bin/deptry --config deploy/server/pyproject.toml gateway context_manager kv_sidecar vllm_plugin integrations pod_injector
	@.venv/bin/hadolint deploy/docker/Dockerfile* && .venv/bin/actionlint && .venv/bin/zizmor --quiet --offline .github
	@$(PY) -m deploy.docs.language && .venv/bin/proselint check --config deploy/docs/proselint.json $(PROSE)

lines: install ## count lines of code, comments and docstrings by package; BASE=<commit>: and the change since it
	@$(PY) -m deploy.lines $(BASE)

check: install ## check style, types and imports, and run the unit tests of changed code, within a minute
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && .venv/bin/lint-imports && $(PY) -m tests.suite.changed
test: lint proto-check ## lint, then run the quick tests of all parts; PART=<names> SEED=<n> KEEP_GOING=1
	@$(SUITE) $(SUITE_OPTIONS)
test-all: install ## run all tests, long ones too; PART=<names> SHARD=<k/n> SEED=<n>
	@$(SUITE) all $(SUITE_OPTIONS)
test-slice: install ## run one shard of the long tests; each commit and each day takes the next one
	@$(SUITE) slice $(if $(WITHIN_S),--within-s $(WITHIN_S))
test-matrix: ## print the long tests as a matrix of CI jobs; SINCE=<commit>: only for paths changed since then
	@$(PYTHON) -m tests.suite matrix $(if $(SINCE),--since $(SINCE))
test-list: install ## list the test parts and their purpose
	@$(SUITE) list
test-unit: install ## run the unit tests
	@$(SUITE) --part unit --part unit-engine
test-integration: install ## run tests with real Valkey, gRPC and processes
	@$(SUITE) --part integration
test-vllm: install ## run tests with real vLLM; VLLM=0.29.0: run the engine contract against that version
	@$(if $(VLLM),$(PY) -m tests.suite.vllm_version $(VLLM),$(SUITE) --part vllm)
test-gpu: install ## run tests of KV on a GPU and print GB/s; without a GPU they are skipped
	@$(PY) -m pytest tests/gpu -s

chart: install ## test the Helm chart with Helm 3 and 4
	@PYTHONPATH=. $(PY) -m deploy.chart.tools && $(PY) -m pytest tests/chart

up: install ## start the local stack; PORT=8000 ENGINES=1..4 DTYPE=bfloat16|float32 STORE=dir|s3 DEV=1
	@$(STACK) up $(SETTINGS)
down: install ## stop the local stack; sessions and KV stay
	@$(STACK) down
status: install ## show the running parts
	@$(STACK) status
kill: install ## kill a part and its child processes with SIGKILL; PART=redis|manager|sidecar|engine|sidecar-1|engine-1|gateway|envoy
	@$(STACK) kill '$(PART)'
start: install ## start a killed part again; PART=…
	@$(STACK) start '$(PART)'
drain: install ## drain an engine, so that its contexts move; PART=engine|engine-1
	@$(STACK) drain '$(PART)'
undrain: install ## send turns to a drained engine again; PART=…
	@$(STACK) undrain '$(PART)'
clean: install ## stop the local stack and remove sessions, KV, logs and secrets
	@$(STACK) clean
demo: install ## run a story with figures on the local stack; JSON=1
	@$(STACK) demo $(SETTINGS) $(if $(JSON),--json)
torture: install ## run seeded faults, tenants and races against real parts for minutes; SEED=… TURNS=500 ONLY=<name>
	@PYTHONPATH=. $(PY) -m tests.torture $(if $(SEED),--seed $(SEED)) $(if $(TURNS),--turns $(TURNS)) $(if $(ONLY),--only $(ONLY))
soak: install ## run mixed load with faults, then check that memory and disk stay flat; MINUTES=20
	@PYTHONPATH=. $(PY) -m tests.torture --only soak $(if $(MINUTES),--minutes $(MINUTES)) $(if $(SEED),--seed $(SEED))
mutants: install ## break each promise in a copy and check that a test fails; ONLY=<name>
	@PYTHONPATH=. $(PY) -m tests.mutants $(if $(ONLY),--only $(ONLY))
bench: install ## measure the time to first token; PEER=1: also from another pod; STORE=dir: also from a shared store
	@PYTHONPATH=. $(PY) benchmarks/bench_ttft.py $(if $(PORT),--port $(PORT)) $(if $(PEER),--peer --out benchmarks/results/bench_ttft_peer.json) $(if $(STORE),--store $(STORE) --out benchmarks/results/bench_ttft_store.json)
bench-front: install ## measure the overhead of each front; QUICK=1; REAL=1: with vLLM
	@PYTHONPATH=. $(PY) benchmarks/bench_front.py $(if $(QUICK),--quick) $(if $(REAL),--real)
bench-one: install ## run one other benchmark; ONLY=agents|aiperf|attacks|beside|block_path|checksum|codec|compaction|conversation|early_saves|hostile_bodies|keys|manager|neighbours|not_found|overhead|promises|scale|simulate|store|streaming|trace|transfer|turn_cost|turns|weights WITH='--check …'
	@PYTHONPATH=. $(PY) benchmarks/bench_$(ONLY).py $(WITH)
proof: install ## replay recorded sessions of coding agents on four systems, with and without failures, and AIPerf's conversations
	@PYTHONPATH=. $(PY) benchmarks/bench_trace.py
	@PYTHONPATH=. $(PY) benchmarks/bench_trace.py --calm
	@PYTHONPATH=. $(PY) benchmarks/bench_aiperf.py

docs: install ## build the documentation site in .build/site; REPOSITORY_URL=<web page of the repository>
	@PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict
plots: install ## draw the README's picture from benchmarks/results; the documentation site draws its own
	@PYTHONPATH=. $(PY) -m benchmarks.plots

pictures: install ## draw the console's pictures of docs/guides/console.md from sample data; needs Chromium
	@PYTHONPATH=. $(PY) -m tests.kit.console_pictures

images: ## build both images with docker or buildah; VLLM_IMAGE=<vLLM's> PYTHON_IMAGE=<Debian with Python> BUILDER=<program>
	@$(BUILDER) build $(IMAGE_OPTIONS) --file deploy/docker/Dockerfile --tag context-cache:$(RELEASE) .
	@$(BUILDER) build $(IMAGE_OPTIONS) $(if $(VLLM_IMAGE),--build-arg VLLM_IMAGE=$(VLLM_IMAGE)) --file deploy/docker/Dockerfile.vllm --tag context-cache-vllm:$(RELEASE) .
release: install ## set the version, commit, tag and add the snapshot for upgrade tests; VERSION=1.2.3
	@$(PY) -m deploy.release $(VERSION)

ci: lint proto-check test test-slice ## run the checks of CI
