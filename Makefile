# make install     the environment in .venv, with the command .venv/bin/atoll
# make demo        several algorithms on one simulated cluster, a table and a plot
# make test        lint, types, fast tests, links and code of the pages
# make test-slow   fuzzers, short soaks, network namespaces
# make docs        the docs site, in site/
# make docs-commands   the commands of the pages, in an environment with the wheel alone
# make matrix      the fast tests with every Python and torch that pyproject.toml allows; the table in docs/overview.md. SHORT=1: fewer
# make evidence    the papers' claims with 33,000 parameters on a CPU: TEXT=FOLDER with train* and valid* files of text. WORKLOAD=medium
#                  or large on a GPU in place of it; medium also makes the studies with small batches (DOMAINS=FOLDER: shards by
#                  domain) and the speeds, but not the study with 33,000 parameters. RECORD=FOLDER continues a record of the
#                  workload and, with medium, the newest ones of small batches; DOCS=1 writes the pages' tables;
#                  DRY=1 lists the missing cells; TABLES=1 RECORD=FOLDER writes a record's tables, without text or GPU

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install demo test test-slow lint types docs docs-commands matrix evidence gpu-evidence clean

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
	$(BIN)/python -m pytest -n 3 --dist worksteal -m "not slow"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist worksteal -m slow tests

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(STAMP)
	$(BIN)/mypy

docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-commands: $(STAMP)
	$(BIN)/python -m tools.docs_commands

matrix:
	$(PYTHON) -m tools.matrix $(CELLS) $(if $(SHORT),--short) --docs docs/overview.md

# A repeated command continues the studies of the same day. RECORD=FOLDER continues another record of the workload.
# Several processes on one GPU compute in turns unless CUDA's MPS runs: nvidia-cuda-mps-control -d
WORKLOAD ?= small
PROCESSES ?= 2
prepared_text = prepared/evidence-$(subst :,-,$(1))
TOKENS ?= $(call prepared_text,$(if $(filter large,$(WORKLOAD)),bpe:8192,bytes))
PAGES := $(if $(DOCS),--docs docs/evidence.md)
PAPER_CLAIMS = $(BIN)/python benchmarks/paper_claims.py --text $(TOKENS) --workload $(WORKLOAD) --processes $(PROCESSES) \
	$(if $(RECORD),--record $(RECORD)) $(if $(filter large,$(WORKLOAD)),,$(PAGES)) \
	$(if $(DOCS),$(if $(filter medium,$(WORKLOAD)),--readme README.md))
CUDA := $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

# $(call prepare,TOKENIZER,FOLDER)
define prepare
	test -f $(2)/meta.json || $(BIN)/atoll data prepare 'files:$(TEXT)/train*' --validation-corpus 'files:$(TEXT)/valid*' \
		--tokenizer $(1) --out $(2)
	@grep -qF '"corpus": "files:$(TEXT)/train*"' $(2)/meta.json || { \
		echo '$(2) was not prepared from $(TEXT): remove it, or name another folder with TOKENS=FOLDER' >&2; exit 2; }
endef

# $(call newest,STUDY): with RECORD, the option that continues the newest record of another study
newest = $(if $(RECORD),$(addprefix --record ,$(lastword $(sort $(wildcard benchmarks/records/*_$(1))))))

ifdef TABLES
evidence: $(STAMP)
	@test -n '$(RECORD)' || { echo 'make evidence TABLES=1 RECORD=FOLDER: name the record whose tables are to be written' >&2; exit 2; }
	$(PAPER_CLAIMS) --minutes 0
else
evidence: $(STAMP)
	@test -n '$(TEXT)' || { echo 'make evidence TEXT=FOLDER: name a folder with train* and valid* files of text' >&2; exit 2; }
	@test '$(WORKLOAD)' = small -o -n '$(DRY)' || $(CUDA) || { \
		echo 'WORKLOAD=$(WORKLOAD) needs a CUDA device, torch sees none: use WORKLOAD=small, or DRY=1 to list the cells' >&2; exit 2; }
	$(call prepare,$(if $(filter large,$(WORKLOAD)),bpe:8192,bytes),$(TOKENS))
	$(PAPER_CLAIMS) $(if $(DRY),--dry-run)
	$(if $(filter medium,$(WORKLOAD)),$(if $(DRY),,$(MAKE) gpu-evidence))
endif

# The studies with small batches, and the speeds. They need a CUDA device.
gpu-evidence: SMALL_BATCH := $(call prepared_text,bpe:16384)
gpu-evidence: SPEED := $(call prepared_text,bpe:8192)
gpu-evidence:
	$(call prepare,bpe:16384,$(SMALL_BATCH))
	$(if $(DOMAINS),test -f prepared/evidence-domains/meta.json || $(BIN)/atoll data prepare files:$(DOMAINS) \
		--tokenizer $(SMALL_BATCH)/tokenizer.json --out prepared/evidence-domains,@echo 'no DOMAINS=FOLDER: no shards by domain')
	$(foreach study,diloco async acco,$(BIN)/python benchmarks/evidence_$(study).py --text $(SMALL_BATCH) \
		$(if $(DOMAINS),--domains prepared/evidence-domains) --processes $(PROCESSES) $(call newest,evidence_$(study)) &&) true
	$(BIN)/python benchmarks/evidence_headline.py $(PAGES)
	$(call prepare,bpe:8192,$(SPEED))
	$(BIN)/python benchmarks/gpu_algorithms.py --text $(SPEED)
	$(BIN)/python benchmarks/gpu.py $(PAGES)

clean:
	rm -rf .venv .matrix build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
