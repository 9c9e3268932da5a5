# make install     the environment in .venv, with the command .venv/bin/atoll
# make demo        several algorithms on one simulated cluster, a table and a plot
# make test        lint, types, fast tests, links and code of the pages
# make test-slow   fuzzers, short soaks, network namespaces
# make docs        the docs site, in site/
# make evidence    the papers' claims: TEXT=FOLDER with train* and valid* files of text; DEVICE=cuda for the larger workload

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test test-slow lint types docs evidence clean

install: $(STAMP)

# pip installs torch first, in the tested version. If its index has a CPU build of that version, pip installs that.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "atoll needs Python 3.11 or newer: make PYTHON=python3.12 install")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/atoll compare demo-ddp demo-diloco demo-async demo-acco

test: $(STAMP) lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow tests

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# A repeated command continues the study of the same day. RECORD=FOLDER continues another one.
DEVICE ?= cpu
TOKENS := prepared/evidence-$(DEVICE)
TOKENIZER := $(if $(filter cuda,$(DEVICE)),bpe:8192,bytes)

evidence: $(STAMP)
	@test -n '$(TEXT)' || { echo 'make evidence TEXT=FOLDER: name a folder with train* and valid* files of text' >&2; exit 2; }
	test -d $(TOKENS) || $(BIN)/atoll data prepare 'files:$(TEXT)/train*' --validation-corpus 'files:$(TEXT)/valid*' \
		--tokenizer $(TOKENIZER) --out $(TOKENS)
	$(BIN)/python benchmarks/paper_claims.py --text $(TOKENS) --device $(DEVICE) --processes 2 $(if $(RECORD),--record $(RECORD)) \
		--docs docs/evidence.md --readme README.md

clean:
	rm -rf .venv build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
