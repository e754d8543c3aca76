BIN := .venv/bin
START := $(shell date +%s)
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
# What starts engines of vLLM and training ranks comes after the rest: it wants the memory for itself.
SLOW := tests/integration

.DEFAULT_GOAL := help
.PHONY: help install demo test test-long soak traces mutation bench lint clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

install: ## make .venv from constraints.txt; nothing to do the second time
	@python3.11 -c '' || { echo "dcr needs python3.11 on the PATH (Debian, Ubuntu: apt-get install python3.11-venv)" >&2; exit 1; }
	@python3.11 scripts/install.py

demo: install ## train a small policy, refit two live vLLM engines and a torch model; KILL=1 kills a rank of one, TRAINER=megatron
	KILL=$(KILL) TRAINER=$(TRAINER) $(BIN)/python -m demo.main

lint: install ## ruff check, ruff format --check, mypy
	$(LINT)

test: install ## lint, and every test that is not marked long
	@($(LINT) && $(BIN)/pytest -m "not long" -n 2 --dist loadfile --no-loadscope-reorder $(SLOW:%=--ignore=%) \
	&& $(BIN)/pytest -m "not long" -n 2 --no-loadscope-reorder $(SLOW)); status=$$?; \
	echo "make test: $$(( $$(date +%s) - $(START) )) s"; exit $$status

test-long: install ## the tests marked long, and what fault tests wrote down, held to the specification
	$(BIN)/pytest -m long
	DCR_VALIDATE_LOGS=1 $(BIN)/pytest tests/faults

soak: install ## refits under random kills, then a hundred quiet ones; FOR=seconds, SEED=number
	$(BIN)/dcr chaos soak --seconds $(or $(FOR),300) --seed $(or $(SEED),0)

traces: install ## take the traces that tests replay from the specification anew (spec/tla/traces)
	$(BIN)/dcr spec traces

.venv-mutation/installed: constraints-mutation.txt
	python3.11 -m venv .venv-mutation
	.venv-mutation/bin/pip install --quiet --no-deps --requirement constraints-mutation.txt
	touch $@

mutation: .venv-mutation/installed ## mutate dcr/protocol, list what no test notices (docs/mutation.md); ARGS="--seed 2 --minutes 10"
	.venv-mutation/bin/python scripts/mutation.py $(ARGS)

bench: install ## run every bench/*.py
	@scripts="$$(ls bench/*.py 2>/dev/null | grep -v -e bench/table.py -e bench/workload.py -e bench/gpu_exactness.py -e bench/gpu_refit.py -e bench/wan_)"; \
	if [ -z "$$scripts" ]; then echo "bench/ holds no scripts"; fi; \
	for script in $$scripts; do echo "$$script"; OMP_WAIT_POLICY=passive $(BIN)/python "$$script" || [ $$? -eq 3 ] || exit 1; done # 3: no GPU, no root

clean: ## remove what runs and tools left behind; .venv stays
	rm -rf run build mutants .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name .venv -prune -o -name __pycache__ -print0 | xargs -0 rm -rf
