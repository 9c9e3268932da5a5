# make install     the environment in .venv, with the command .venv/bin/atoll
# make demo        several algorithms on one simulated cluster, a table and a plot
# make test        lint, types, fast tests, links and code of the pages
# make test-slow   fuzzers, short soaks, network namespaces
# make docs        the docs site, in site/
# make docs-commands   the commands of the pages, in an environment with the wheel alone
# make matrix      the fast tests with every Python and torch that pyproject.toml allows; the table in docs/overview.md. SHORT=1: fewer
# make evidence    the papers' claims: TEXT=FOLDER with train* and valid* files of text. WORKLOAD=small (33,000 parameters on a CPU),
#                  medium or large (0.6 or 6.8 million on a GPU), small-batch (13 million; DOMAINS=FOLDER: shards by domain), speed
#                  (on a GPU), links (slow links), or all. RECORD=FOLDER continues a record, RECORD=newest the newest one;
#                  MINUTES=N starts no cell after N minutes; DOCS=1 writes the pages' tables; DRY=1 lists the missing cells;
#                  TABLES=1 RECORD=newest writes a record's tables, without text or GPU

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# With NO_INSTALL=1 `make evidence` uses $(PYTHON) and its packages, with atoll from src/.
INTERPRETER := $(if $(NO_INSTALL),PYTHONPATH=src $(PYTHON),$(BIN)/python)
ENVIRONMENT := $(if $(NO_INSTALL),,$(STAMP))

.PHONY: install demo test test-slow lint types docs docs-commands matrix evidence clean $(addprefix evidence-,small medium large links small-batch speed)

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

# A repeated command continues the studies of the same day. On a GPU start CUDA's MPS first, else processes compute in turns:
# nvidia-cuda-mps-control -d
WORKLOAD ?= small
PROCESSES ?= 2
PARTS := small links medium large small-batch speed
GPU_PARTS := medium large small-batch speed
prepared_text = prepared/evidence-$(subst :,-,$(1))
TOKENS ?= $(call prepared_text,$(if $(filter large,$(WORKLOAD)),bpe:8192,bytes))
CUDA := $(INTERPRETER) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

# $(call page,FILE): with DOCS, the option that writes a page's tables
page = $(if $(DOCS),--docs docs/$(1))
limits = $(if $(TABLES),--minutes 0,$(if $(MINUTES),--minutes $(MINUTES))) $(dry)
dry = $(if $(DRY),--dry-run)
# $(call newest,STUDY ...): the newest record of these names
newest = $(patsubst %/cells.jsonl,%,$(lastword $(sort $(wildcard $(patsubst %,benchmarks/records/*_%/cells.jsonl,$(1))))))
# $(call continued,STUDY): with RECORD, the option that continues the newest record of a study
continued = $(if $(RECORD),$(addprefix --record ,$(call newest,$(1))))

claims_record = $(if $(filter newest,$(RECORD)),$(call newest,$(1)),$(RECORD))
# $(call paper_claims,RECORDS): a new record on a GPU takes the newest one's choices over
paper_claims = $(INTERPRETER) benchmarks/paper_claims.py --text $(TOKENS) --workload $(WORKLOAD) --processes $(PROCESSES) \
	$(if $(RECORD),$(addprefix --record ,$(call claims_record,$(1))),$(if $(filter medium,$(WORKLOAD)),$(addprefix --choices ,$(call newest,$(1))))) \
	$(if $(filter small,$(WORKLOAD)),--seeds $(or $(SEEDS),0)) $(if $(filter large,$(WORKLOAD)),,$(call page,evidence.md)) \
	$(if $(DOCS),$(if $(filter medium,$(WORKLOAD)),--readme README.md --coverage docs/coverage.md)) $(limits)

# $(call prepare,TOKENIZER,FOLDER)
define prepare
	$(if $(TABLES)$(DRY),,@test -n '$(TEXT)' || { echo 'make evidence TEXT=FOLDER: name a folder with train* and valid* files of text' >&2; exit 2; })
	$(if $(TABLES)$(DRY),,test -f $(2)/meta.json || $(INTERPRETER) -m atoll data prepare 'files:$(TEXT)/train*' \
		--validation-corpus 'files:$(TEXT)/valid*' --tokenizer $(1) --out $(2))
	$(if $(TABLES)$(DRY),,@grep -qF '"corpus": "files:$(TEXT)/train*"' $(2)/meta.json || { \
		echo '$(2) was not prepared from $(TEXT): remove it, or name another folder with TOKENS=FOLDER' >&2; exit 2; })
endef

evidence: $(ENVIRONMENT)
	@test -z '$(TABLES)' -o -n '$(RECORD)' || { \
		echo 'make evidence TABLES=1: name the record whose tables are to be written, RECORD=FOLDER or RECORD=newest' >&2; exit 2; }
ifeq ($(WORKLOAD),all)
	@test -z '$(filter-out newest,$(RECORD))' || { echo 'WORKLOAD=all has many records: use RECORD=newest' >&2; exit 2; }
	$(foreach part,$(filter-out $(GPU_PARTS),$(PARTS)),$(MAKE) evidence WORKLOAD=$(part) &&) true
	@if test -n '$(TABLES)$(DRY)' || $(CUDA); then $(foreach part,$(GPU_PARTS),$(MAKE) evidence WORKLOAD=$(part) &&) true; \
		else echo 'no CUDA device: the parts $(GPU_PARTS) were left out'; fi
else
	@test -n '$(filter $(WORKLOAD),$(PARTS))' || { echo 'WORKLOAD=$(WORKLOAD) is none of: $(PARTS) all' >&2; exit 2; }
	@test -z '$(filter $(WORKLOAD),$(GPU_PARTS))' -o -n '$(TABLES)$(DRY)' || $(CUDA) || { \
		echo 'WORKLOAD=$(WORKLOAD) needs a CUDA device, torch sees none: use WORKLOAD=small, or DRY=1 to list the cells' >&2; exit 2; }
	$(MAKE) evidence-$(WORKLOAD)
endif

its_records = $(if $(filter small,$(WORKLOAD)),paper_claims paper_claims_small,paper_claims_$(WORKLOAD))
evidence-small evidence-medium evidence-large:
	$(call prepare,$(if $(filter large,$(WORKLOAD)),bpe:8192,bytes),$(TOKENS))
	$(if $(and $(TABLES),$(filter newest,$(RECORD)),$(if $(call newest,$(its_records)),,none)),@echo 'WORKLOAD=$(WORKLOAD): no record'\
		,$(call paper_claims,$(its_records)))

# Exchanges over slow links: in virtual time, and between two processes. The latter need root.
evidence-links:
	$(INTERPRETER) benchmarks/acco_links.py $(call continued,acco_links) $(call page,acco.md) $(dry)
	$(if $(TABLES),@echo 'slow_link.py measures what its record lacks: not with TABLES=1',$(INTERPRETER) benchmarks/slow_link.py \
		$(call continued,slow_link) $(call page,slow_links.md) $(dry))

# The studies with small batches.
evidence-small-batch: SMALL_BATCH := $(call prepared_text,bpe:16384)
evidence-small-batch:
	$(call prepare,bpe:16384,$(SMALL_BATCH))
	$(if $(DOMAINS),test -f prepared/evidence-domains/meta.json || $(INTERPRETER) -m atoll data prepare files:$(DOMAINS) \
		--tokenizer $(SMALL_BATCH)/tokenizer.json --out prepared/evidence-domains,@echo 'no DOMAINS=FOLDER: no shards by domain')
	$(foreach study,diloco async acco,$(INTERPRETER) benchmarks/evidence_$(study).py --text $(SMALL_BATCH) \
		$(if $(DOMAINS)$(and $(TABLES),$(filter diloco,$(study))),--domains prepared/evidence-domains) --processes $(PROCESSES) $(call continued,evidence_$(study)) $(limits) &&) true
	$(if $(DRY),,$(INTERPRETER) benchmarks/evidence_headline.py $(call page,evidence.md))

# The speed of islands on one GPU: all algorithms on the text, and DiLoCo by model and batch.
evidence-speed: SPEED := $(call prepared_text,bpe:8192)
evidence-speed:
	$(call prepare,bpe:8192,$(SPEED))
	$(INTERPRETER) benchmarks/gpu.py --text $(SPEED) $(call continued,gpu) \
		$(if $(RECORD),$(addprefix --algorithms-record ,$(call newest,gpu_algorithms))) $(call page,evidence.md) $(limits)

clean:
	rm -rf .venv .matrix build dist site src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
