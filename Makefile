# Every target does its own set-up; the second run is quick. `make help` lists them.

SHELL := /bin/bash
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
  $$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
  && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
RUST_MIN := 1.89
RUST_SOURCES := Cargo.toml $(wildcard Cargo.lock) $(shell find store_rs codec_rs kernels_rs policy_rs \
  \( -name '*.rs' -o -name '*.h' -o -name '*.cc' -o -name Cargo.toml \) -not -path '*/target/*' 2>/dev/null)

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python
export RAY_USAGE_STATS_ENABLED := 0

.DEFAULT_GOAL := help
.PHONY: help demo serve test test-slow test-gpu fault fault-nightly soak fuzz loom check audit docs bench figures build format lint rust-test manifests clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

demo: build model ## a long-context job on two replicas; EXIT=1 stops the server at the end
	@$(BIN)/python -m mooncake_serve.demo $(if $(EXIT),--exit)

serve: build model ## run the application on this machine until Ctrl-C
	@$(BIN)/mooncake-serve serve deployments/app.yaml

test: build model ## the whole test suite but for what takes minutes
	@$(BIN)/python -m pytest $(EXTRA)

test-slow: build model ## the tests that take minutes
	@$(BIN)/python -m pytest -m slow $(EXTRA)

test-gpu: build model ## engine and exactness tests on a CUDA device
	@$(BIN)/python -m pytest -m gpu tests/gpu $(EXTRA)

FAULTS := $(addprefix tests/store/test_,faults.py wire.py rude_clients.py nvme.py small_disks.py)

fault: build ## processes killed at the worst moments, disks that fail; SEED=n replays its choices
	@$(if $(SEED),MOONCAKE_SEED=$(SEED)) $(BIN)/python -m pytest $(FAULTS) \
	  $(if $(SEED),,tests/e2e/test_faults.py) $(EXTRA)
	@$(if $(SEED),MOONCAKE_SEED=$(SEED),MOONCAKE_SEEDS=$(or $(SEEDS),1000)) \
	  cargo test -q --release -p mooncake_store --lib no_history

fault-nightly: build ## ten thousand histories of the store on a disk that fails
	@MOONCAKE_SEEDS=10000 cargo test -q --release -p mooncake_store --lib no_history

soak: build ## half an hour of mixed load with random kills; DURATION=120 for less, SEED=n replays
	@$(BIN)/python -m tests.store.soak --seconds $(or $(DURATION),1800) $(if $(SEED),--seed $(SEED))

fuzz: ## damaged inputs to every decoder; cargo-fuzz goes on from there, see store_rs/fuzz
	@for target in wire record container; do cargo run -q --release \
	  --manifest-path store_rs/fuzz/Cargo.toml --target-dir target/fuzz --bin $$target || exit 1; done

loom: ## every interleaving of the store's lock-free protocols
	@RUSTFLAGS="--cfg loom" cargo test -q --release --manifest-path store_rs/loom/Cargo.toml \
	  --target-dir target/loom

check: lint rust-test fuzz loom test docs ## all that CI runs

audit: build ## known vulnerabilities of what we build on; needs cargo-deny and the internet
	cargo deny check
	@# What the index knows nothing of must fail: it would count as free of vulnerabilities.
	$(BIN)/pip freeze --exclude-editable | sed 's/+.*//' > build/audited.txt
	$(BIN)/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r build/audited.txt

docs: build ## the documentation, into build/site; a warning is an error
	@DISABLE_MKDOCS_2_WARNING=true NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

bench: build model ## the benchmarks behind the README's figures, into build/
	@mkdir -p build
	@run() { echo "bench $$*" >&2; $(BIN)/mooncake-serve bench "$$@" --json $(EXTRA); }; \
	  run store > build/bench-store.json && \
	  run engine --backend torch > build/bench-engine-torch.json && \
	  run engine --backend native > build/bench-engine-native.json

figures: build ## write the README's tables from what `make demo` and `make bench` left in build/
	@$(BIN)/python scripts/figures.py

manifests: build ## write the overlays of k8s/ from deployments/, and the Grafana dashboard
	@$(BIN)/python scripts/k8s_config.py && $(BIN)/python scripts/grafana.py

build: $(STAMPS)/extension ## environment and Rust extension

.PHONY: model
model: build
	@$(BIN)/python -m mooncake_serve.models smollm2-135m

format: build ## rewrite sources in the project's format
	@cargo fmt --all
	@$(BIN)/ruff check -q --fix .
	@$(BIN)/ruff format -q .

lint: build ## formats, lints, types and stubs
	cargo fmt --all --check
	cargo clippy -q --workspace --all-targets -- -D warnings
	cargo clippy -q -p mooncake_store --lib --features python -- -D warnings
	$(BIN)/ruff check -q .
	$(BIN)/ruff format -q --check .
	$(BIN)/pyright

rust-test: $(STAMPS)/tools ## unit and property tests of the Rust crates
	cargo test -q --workspace

clean: ## remove what the build made, but for .venv
	rm -rf build target $(STAMPS) mooncake_serve/_store*.so

$(STAMPS)/tools:
	@command -v cargo >/dev/null || \
	  { echo "No cargo found: install Rust >= $(RUST_MIN), https://rustup.rs"; exit 1; }
	@have=$$(rustc --version | cut -d' ' -f2); \
	  [ "$$(printf '%s\n' $(RUST_MIN) $$have | sort -V | head -1)" = "$(RUST_MIN)" ] || \
	  { echo "Rust $$have is too old: this project needs >= $(RUST_MIN); run 'rustup update stable'"; exit 1; }
	@command -v c++ >/dev/null || \
	  { echo "No C++ compiler found: on Debian, 'apt install g++'"; exit 1; }
	@[ -n "$(PYTHON)" ] || { echo "No Python >= 3.11 that can make virtual environments found:"; \
	  echo "on Debian 'apt install python3-venv', else 'make $(MAKECMDGOALS) PYTHON=/path/to/python'"; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'maturin>=1.9.4,<2'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/extension: pyproject.toml $(RUST_SOURCES) | $(STAMPS)/tools
	@echo "Building the Rust extension; what it does right now: tail -f build/setup.log"
	@ls -d $(VENV)/lib/*/site-packages/torch >/dev/null 2>&1 || \
	  echo "Installing Python packages first: GBs, mostly torch"
	@mkdir -p build
	@VIRTUAL_ENV="$(CURDIR)/$(VENV)" $(BIN)/maturin develop --release --extras serve,dev,docs \
	  > build/setup.log 2>&1 || { tail -40 build/setup.log; exit 1; }
	@touch $@
