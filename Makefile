# Two commands matter: `make up` (a cluster with the operator and a chatting example) and `make test` (everything).
.DEFAULT_GOAL := help
SHELL := /bin/sh
PY := .venv/bin/python
# Compiled modules are kept: without them every process of a run compiles torch anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help up down test lint unit lock clean

help: ## what there is to do
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

.venv/.ready: requirements/dev.lock engine/pyproject.toml operator/pyproject.toml e2e/bootstrap.sh
	sh e2e/bootstrap.sh
	@touch $@

up: .venv/.ready ## cluster, operator, examples/tiny.yaml, a streamed chat
	@$(PY) -m e2e.cluster up

down: .venv/.ready ## remove everything that `make up` started
	@$(PY) -m e2e.cluster down

test: .venv/.ready ## every check and every test, on a real cluster
	@$(PY) -m e2e.suite

lint: .venv/.ready ## ruff, mypy, import-linter, generated files
	@$(PY) -m e2e.suite lint

unit: .venv/.ready ## the tests of parts, under a minute
	@$(PY) -m e2e.suite unit

lock: .venv/.ready ## renew requirements/*.lock from requirements/*.in
	cd requirements && ../.venv/bin/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" dev.in -o dev.lock
	cd requirements && ../.venv/bin/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" load.in -o load.lock
	cd requirements && for f in engine operator; do ../.venv/bin/uv pip compile -q -U --universal --python-version 3.11 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" -c dev.lock $$f.in -o $$f.lock; done
