# Everything that a developer or the CI runs. The environments are made by the targets that need them, once, and are
# brought up to date when pyproject.toml changes, made anew when their pins in requirements/ do.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first of these that is Python >= 3.10 makes the environments; `make test PYTHON=python3.12` chooses one.
PYTHON ?= python3 python3.13 python3.12 python3.11 python3.10 python
EXTRAS := dev,demo
# How many files of tests run at a time: two more than the CI has cores, since many tests wait. Not `auto`: the tests
# start workers and whole training runs of their own.
JOBS ?= 4
# More arguments for pytest: make test PYTEST_ARGS="-k rng -x", or some files: make test PYTEST_ARGS=tests/loader
PYTEST_ARGS ?=
# Up to how many tests that fail are run once more, alone; those that pass are named. The CI sets it.
AGAIN ?= 0
SUITE = python -m tests.harness.run -q -j $(JOBS) --again $(AGAIN)

BIN := .venv/bin
BUILD := .venv-build/installed.stamp
DOCS := .venv-docs/installed.stamp
NEWEST := .venv/installed.stamp
OLDEST := .venv-oldest/installed.stamp
LIBRARIES := .venv-libraries/installed.stamp
# uv installs in seconds what takes pip minutes. It does not read pip's settings, so the Makefile passes them on.
UV := .venv-uv/bin/uv
export UV_CACHE_DIR := $(CURDIR)/.venv-uv/cache
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without it, each process would compile again all that it imports: 15 s for torch and Lightning.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help environment libraries demo bench docs docs-live dist browser try-browser test quick test-all test-slow slow oldest checks lint types compiled format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

environment: $(NEWEST)  ## make or update .venv

demo: $(NEWEST)  ## train, kill twice, restart, compare; figures and logs in demo-output/
	$(BIN)/python examples/demo/run.py --output demo-output

bench: $(NEWEST)  ## measure speed, resuming and size (40 minutes on a calm machine); tables and plot in docs/
	$(BIN)/python benchmarks/all.py

docs: $(DOCS)  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict  # --quiet would hide warnings from --strict, too

docs-live: $(DOCS)  ## show the documentation at http://127.0.0.1:8000, and build it anew when a page changes
	.venv-docs/bin/mkdocs serve

# The wheel is built from the sdist. It is tried where nothing but the package is, and what that depends on.
dist: $(BUILD) .venv-dist/torch.stamp  ## build wheel and sdist into dist/, look into both, try them in a clean environment
	rm -rf dist
	.venv-build/bin/python -m build --no-isolation --outdir dist . >/dev/null
	.venv-build/bin/python tests/release/contents.py dist
	$(UV) pip uninstall --quiet --python .venv-dist lightning-faulttolerant
	$(UV) pip install --quiet --python .venv-dist --constraint requirements/newest.txt dist/*.whl
	cd "$$(mktemp -d)" && "$(CURDIR)/.venv-dist/bin/python" -I "$(CURDIR)/tests/release/smoke.py"

browser:  ## install Chromium and its driver (Debian, Ubuntu; needs root), in which tests open the pages of reports
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; }

test: checks  ## what has to pass before a commit: lint, types, the fast tests
	$(BIN)/$(SUITE) -m "not slow" $(PYTEST_ARGS)

quick: checks  ## in a minute: lint, types, one case of each file of laws
	$(BIN)/$(SUITE) -m "not slow" --one-of-each-law tests/law $(PYTEST_ARGS)

test-all: test test-slow  ## everything: test, then test-slow

test-slow: try-browser slow oldest docs dist  ## what test-all adds: slow tests, the oldest Lightning, docs and dist

try-browser:
	@$(MAKE) --no-print-directory browser || echo "No browser can be installed here: pages are not opened in one." >&2

slow: compiled $(LIBRARIES)
	$(BIN)/$(SUITE) -m slow $(PYTEST_ARGS)

# Of the tests those that need Lightning, and of laws about data a part (tests/harness/oldest.py): `make test` has tried
# the others beside the same torch.
OLDEST_TESTS := law trainer examples cli/test_inspection.py loader/test_resumable_fabric.py test_law_basic.py test_docs.py test_package.py
oldest: $(OLDEST)
	.venv-oldest/bin/$(SUITE) -m "not slow" --on-oldest $(addprefix tests/,$(OLDEST_TESTS)) $(PYTEST_ARGS)

libraries: $(LIBRARIES)  ## make the environment of the libraries whose scripts the slow tests run

checks: $(NEWEST)
	@$(MAKE) --no-print-directory --output-sync --jobs=2 lint types compiled

# The bytecode of what all processes import, so that they don't compile it side by side.
compiled: $(NEWEST)
	@$(BIN)/python -c "import tests.harness.run"

lint: $(NEWEST)  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(NEWEST)  ## mypy, strict, on the package
	$(BIN)/mypy

format: $(NEWEST)  ## let ruff format, and mend what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environments and all that was built or cached
	rm -rf .venv .venv-uv .venv-build .venv-dist .venv-docs .venv-libraries .venv-oldest demo-output dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/torch.stamp: requirements/newest.txt | $(UV)
	$(make_environment)

.venv-oldest/torch.stamp: requirements/oldest.txt | $(UV)
	$(make_environment)

.venv-dist/torch.stamp: requirements/newest.txt | $(UV)
	$(make_environment)

# Without torch: the build does not need it, and the reference of the documentation is read from the sources.
$(BUILD): requirements/dist.txt | $(UV)
	$(make_environment)
	$(UV) pip install --quiet --python $(@D) --requirement $<
	touch $@

$(DOCS): requirements/docs.txt | $(UV)
	$(make_environment)
	$(UV) pip install --quiet --python $(@D) --requirement $<
	touch $@

$(NEWEST): .venv/torch.stamp pyproject.toml requirements/originals.txt
	$(call install_package,requirements/newest.txt)

$(OLDEST): .venv-oldest/torch.stamp pyproject.toml requirements/originals.txt
	$(call install_package,requirements/oldest.txt)

# Libraries that users train with, and what they need: gigabytes less without the CUDA packages of torch.
.venv-libraries/torch.stamp: requirements/libraries.txt | $(UV)
	$(make_environment)

$(LIBRARIES): .venv-libraries/torch.stamp pyproject.toml
	$(UV) pip install --quiet --python $(@D) --requirement requirements/libraries.txt
	$(UV) pip install --quiet --python $(@D) --no-deps --editable .
	touch $@

$(UV):
	@$(find_python); \
	$$python -m venv --clear .venv-uv
	.venv-uv/bin/python -m pip install -qq --no-compile uv

# Sets $python. A name that pyenv offers without an interpreter behind it, or a Python that a distribution ships without
# venv, is passed over.
define find_python
python=""; \
for candidate in $(PYTHON); do \
	if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then \
		python=$$candidate; break; \
	fi; \
done; \
if [ -z "$$python" ]; then \
	echo "No Python >= 3.10 with the venv module found (tried: $(PYTHON))." >&2; \
	echo "Install one (on Debian and Ubuntu: apt-get install python3 python3-venv), or name it: make PYTHON=/path/to/python" >&2; \
	exit 1; \
fi
endef

# An empty environment with torch, which goes in first and alone: see requirements/.
define make_environment
	@$(find_python); \
	echo "$(@D): $$($$python --version) ($$python)"; \
	$(UV) venv --quiet --clear --python "$$(command -v $$python)" $(@D)
	torch="$$(grep '^torch==' $< || true)"; [ -z "$$torch" ] || $(UV) pip install --quiet --python $(@D) "$$torch"
	touch $@
endef

define install_package
	$(UV) pip install --quiet --python $(@D) --constraint $(1) --editable ".[$(EXTRAS)]"
	$(UV) pip install --quiet --python $(@D) --no-deps --requirement requirements/originals.txt
	touch $@
endef
