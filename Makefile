# Everything a newcomer or CI needs. `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
PYTEST_ARGS ?=
# Half of the time of tests without engines is waiting.
PARALLEL := -n 4 --dist loadfile

.PHONY: help setup demo test unit check docs quickstart package compat gate soak fuzz aiperf-check mori-contract clean

help: ## Say what the targets do
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

setup: ## Make .venv with everything pinned; quick when it is up to date
	@$(PYTHON) tools/setup.py

demo: setup ## Serve the bundled model over two engines and show what moves
	@$(BIN)/stateferry demo $(ARGS)

check: setup ## Lint, formatting, types, size table
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_sizes.py

docs: ## Build the site into site/, links checked; hold deploy files against their schemas
	@$(PYTHON) tools/setup_site.py
	@NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet
	@.venv-site/bin/python -m pytest tests/site -q

quickstart: setup ## Run the README's quick start as it is printed (two engines: a minute or two)
	@$(BIN)/python tools/quickstart.py

package: ## Build a wheel; install it into clean environments, with and without extras (minutes, gigabytes)
	@$(PYTHON) tools/setup_site.py
	@.venv-site/bin/python tools/check_package.py $(ARGS)

compat: setup ## Print what of vLLM we touch, and what other versions made of it
	@$(BIN)/python tools/compat_table.py

unit: setup ## The tests without vLLM
	$(BIN)/python -m pytest tests/unit $(PARALLEL) --durations=10 $(PYTEST_ARGS)

test: check docs unit ## Set-up, checks, documentation and the whole test suite (real engines: minutes)
	$(BIN)/python -m pytest tests/scheduler $(PARALLEL) --durations=10 $(PYTEST_ARGS)
	$(BIN)/python -m pytest tests/engines -m "not by_hand" --durations=10 $(PYTEST_ARGS)

gate: setup ## The accuracy gate on the bundled model; ARGS=--full for the long one
	@$(BIN)/stateferry gate $(ARGS)

fuzz: setup ## Damaged messages for as long as you like; ARGS=-max_total_time=600 (needs atheris)
	@$(BIN)/python tools/fuzz_wire.py $(ARGS)

soak: setup ## Half an hour of hand-offs with faults and cancellations; ARGS="--minutes 3"
	@$(BIN)/stateferry soak $(ARGS)

aiperf-check: setup ## By hand: does AIPerf ask what `bench agentx` asks? Makes an environment of its own
	@$(BIN)/python tools/aiperf_check.py $(ARGS)

mori-contract: setup ## Compare what transport mori uses with the published MoRI packages (downloads them)
	@$(BIN)/python tools/mori_contract.py

clean: ## Remove .venv and all caches
	rm -rf .venv .venv-site site .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist src/*.egg-info
