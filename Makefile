# Everything that a developer or the CI runs. A target creates its environment once. It updates the environment when
# pyproject.toml changes, and creates it again when its pins in requirements/ change.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The first of these that is Python >= 3.10 creates the environments; `make test PYTHON=python3.12` selects one.
PYTHON ?= python3 python3.13 python3.12 python3.11 python3.10 python
EXTRAS := dev,demo
# Number of test files that run at a time: one more than the CI has cores, because many tests wait. With two more, they
# take a tenth more of processor time. Not `auto`: the tests start workers and whole training runs themselves.
JOBS ?= 3
# More arguments for pytest: make test PYTEST_ARGS="-k rng -x", or some files: make test PYTEST_ARGS=tests/loader
PYTEST_ARGS ?=
# The part of the slow tests, and of those on the oldest Lightning, that runs: 2/6 is the third of six.
PART ?= 0/1
SUITE = python -m tests.harness.run -q -j $(JOBS)

BIN := .venv/bin
BUILD := .venv-build/installed.stamp
DOCS := .venv-docs/installed.stamp
NEWEST := .venv/installed.stamp
OLDEST := .venv-oldest/installed.stamp
LIBRARIES := .venv-libraries/installed.stamp
STORES := .venv-stores/installed.stamp
# uv takes seconds where pip takes minutes. It does not read pip's settings, so the Makefile passes them on.
UV := .venv-uv/bin/uv
export UV_CACHE_DIR := $(CURDIR)/.venv-uv/cache
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX ?= $(PIP_INDEX_URL)
endif
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
endif
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# If this is set, each process compiles everything that it imports: 15 s for torch and Lightning.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: night versions help environment environments libraries stores demo bench docs docs-live dist browser slurm slurm-stop slurm-installed try-installs test snapshots quick test-all test-slow slow oldest soak fast lint types format clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

environment: $(NEWEST)  ## create or update .venv

environments: $(NEWEST) $(OLDEST) $(LIBRARIES) $(STORES) $(DOCS) $(BUILD) .venv-dist/torch.stamp try-installs  ## create or update all that test-all needs

demo: $(NEWEST)  ## train, kill twice, restart, compare; write figures and logs to demo-output/
	$(BIN)/python examples/demo/run.py --output demo-output

bench: $(NEWEST)  ## run the benchmarks (70 minutes, on an idle machine); write tables and plot to docs/
	$(BIN)/python benchmarks/all.py

docs: $(DOCS)  ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict  # --quiet would hide warnings from --strict, too

docs-live: $(DOCS)  ## show the documentation at http://127.0.0.1:8000, and rebuild it when a page changes
	.venv-docs/bin/mkdocs serve

# The wheel is built from the sdist, and tried in an environment that has only the package and its dependencies: with the
# newest Lightning, with the oldest, and with pytorch_lightning alone.
try_wheel = cd "$$(mktemp -d)" && "$(CURDIR)/.venv-dist/bin/python" -I "$(CURDIR)/tests/release/smoke.py"
dist: $(BUILD) .venv-dist/torch.stamp  ## build wheel and sdist into dist/, check both, try the wheel in a clean environment
	rm -rf dist
	.venv-build/bin/python -m build --no-isolation --outdir dist . >/dev/null
	.venv-build/bin/python tests/release/contents.py dist
	$(UV) pip uninstall --quiet --python .venv-dist lightning-faulttolerant
	$(UV) pip install --quiet --python .venv-dist --constraint requirements/newest.txt --upgrade dist/*.whl
	$(try_wheel)
	$(UV) pip install --quiet --python .venv-dist --constraint requirements/oldest.txt lightning pytorch-lightning
	$(try_wheel)
	$(UV) pip uninstall --quiet --python .venv-dist lightning  # it shares no file with pytorch-lightning
	$(try_wheel)

browser:  ## install Chromium and its driver (Debian, Ubuntu; needs root) for the tests that open the pages of reports
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null || \
		{ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver; }

# Where a cluster's files are. Its path must be short, since a socket is created in it.
SLURM_DIRECTORY ?= .slurm
slurm: slurm-installed $(NEWEST)  ## install SLURM (Debian, Ubuntu; needs root) and start a cluster of three nodes on this machine
	@$(BIN)/python -m tests.harness.slurm start $(SLURM_DIRECTORY)

slurm-stop: $(NEWEST)  ## end the cluster that `make slurm` has started, and its jobs
	$(BIN)/python -m tests.harness.slurm stop $(SLURM_DIRECTORY)

# The distribution's packages start nothing as long as there is no /etc/slurm/slurm.conf.
slurm-installed:
	@export PATH="$$PATH:/usr/sbin:/sbin"; \
	for program in munged slurmctld slurmd srun; do command -v $$program >/dev/null || break; done && \
	command -v $$program >/dev/null || { \
		command -v apt-get >/dev/null || \
			{ echo "$$program is missing, and so is apt-get: install SLURM and munge as your system does." >&2; exit 1; }; \
		[ "$$(id -u)" = 0 ] || { echo "$$program is missing. Install it as root: apt-get install" \
			"--no-install-recommends slurmctld slurmd slurm-client munge" >&2; exit 1; }; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
			slurmctld slurmd slurm-client munge; }

# The types are checked beside the tests: that takes 20 s of one core in a fresh clone.
beside_tests = @$(MAKE) --no-print-directory --jobs=3 lint types fast
test: $(NEWEST)  ## run lint, types, and the fast tests: before each commit
	$(beside_tests)

snapshots: $(NEWEST)  ## write the texts again that tests compare with: review their diff
	$(BIN)/$(SUITE) --snapshot-update $(PYTEST_ARGS)

quick: $(NEWEST)  ## run lint, types, and one case of each law: a minute
	$(beside_tests) TESTS="--one-of-each-law tests/laws"

TESTS ?=
fast: $(NEWEST)
	$(BIN)/$(SUITE) -m "not slow" $(TESTS) $(PYTEST_ARGS)

test-all: test test-slow  ## run test, then test-slow

test-slow: try-installs slow oldest docs dist  ## run the slow tests, those on the oldest Lightning, docs, dist

try-installs:
	@$(MAKE) --no-print-directory browser || echo "Can't install a browser. The tests that need one are skipped." >&2
	@$(MAKE) --no-print-directory slurm-installed || echo "Can't install SLURM. The tests that need it are skipped." >&2

slow: $(NEWEST) $(LIBRARIES) $(STORES)
	$(BIN)/$(SUITE) -m slow --part $(PART) $(PYTEST_ARGS)

# Pieces of the night that run on any day: make night PIECES="soak 'slow 2'"
PIECES ?=
night: $(NEWEST)  ## run what takes long, in rotation by date (a week covers all of it); note it in tests/night.json
	$(BIN)/python -m tests.harness.night $(PIECES)

# The versions beside the pinned pair: two of Python, and the newest torch that the registry serves.
VERSIONS ?= python3.10 python3.13 torch
versions: $(VERSIONS:%=version-%)  ## run the fast tests on other versions of Python, and on the newest torch
version-%: .venv-%/installed.stamp
	.venv-$*/bin/$(SUITE) -m "not slow" $(PYTEST_ARGS)

# Hours of random trainings, struck at random moments; or the directory of one trial, to repeat it.
HOURS ?= 1
TRIAL ?=
soak: $(NEWEST)  ## train random features, struck at random moments, for HOURS; keep what fails in soak-failures/
	$(BIN)/python -m tests.laws.soak --hours $(HOURS) $(if $(TRIAL),--trial $(TRIAL))

# Only the tests that need Lightning: `make test` runs the others with the same torch.
OLDEST_TESTS := laws trainer examples loader/test_resumable.py testing test_docs.py test_package.py
oldest: $(OLDEST)
	.venv-oldest/bin/$(SUITE) -m "not slow" --part $(PART) $(addprefix tests/,$(OLDEST_TESTS)) $(PYTEST_ARGS)

libraries: $(LIBRARIES)  ## create the environment with the libraries whose scripts the slow tests run

stores: $(STORES)  ## create the environment with the emulators of object stores that the slow tests use

lint: $(NEWEST)  ## run ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(NEWEST)  ## run mypy, strict, on the package
	$(BIN)/mypy

format: $(NEWEST)  ## let ruff format the code and fix what it can
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

clean:  ## remove the environments, build outputs, and caches
	rm -rf .venv .venv-uv .venv-build .venv-dist .venv-docs .venv-libraries .venv-stores .venv-oldest demo-output dist build site .pytest_cache .mypy_cache .ruff_cache .hypothesis lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/torch.stamp: requirements/newest.txt | $(UV)
	$(make_environment)

.venv-oldest/torch.stamp: requirements/oldest.txt | $(UV)
	$(make_environment)

.venv-dist/torch.stamp: requirements/newest.txt | $(UV)
	$(make_environment)

# Without torch: the build does not need it, and mkdocs reads the reference from the sources.
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

.PRECIOUS: .venv-%/torch.stamp .venv-%/installed.stamp
# pyenv offers names without an interpreter, so its folders come after the names.
.venv-python%/torch.stamp: PYTHON = python$* $(wildcard $(HOME)/.pyenv/versions/$**/bin/python)
.venv-python%/torch.stamp: requirements/newest.txt | $(UV)
	$(make_environment)

.venv-torch/torch.stamp: requirements/newest-torch.txt | $(UV)
	$(make_environment)

.venv-%/installed.stamp: .venv-%/torch.stamp pyproject.toml requirements/originals.txt
	$(call install_package,$(if $(filter torch,$*),requirements/newest-torch.txt,requirements/newest.txt))

# Libraries that users train with, and their dependencies. Leaving out torch's CUDA packages saves gigabytes.
.venv-libraries/torch.stamp: requirements/libraries.txt | $(UV)
	$(make_environment)

$(LIBRARIES): .venv-libraries/torch.stamp pyproject.toml
	$(UV) pip install --quiet --python $(@D) --requirement requirements/libraries.txt
	$(UV) pip install --quiet --python $(@D) --no-deps --editable .
	touch $@

# Without torch: the tests append its packages to the path of .venv, so its Python must be the same one. Its Node.js
# comes from PyPI, and does not depend on the machine's.
$(STORES): requirements/stores.txt requirements/stores-npm.txt | $(NEWEST) $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(@D)
	$(UV) pip install --quiet --python $(@D) --constraint requirements/newest.txt --requirement $<
	PATH="$(CURDIR)/$(@D)/bin:$$PATH" npm install --silent --no-audit --no-fund --prefix $(@D) $$(cat requirements/stores-npm.txt)

$(UV):
	@$(find_python); \
	$$python -m venv --clear .venv-uv
	.venv-uv/bin/python -m pip install -qq --no-compile uv

# Sets $python. Skips a name that pyenv offers without an interpreter, and a Python that a distribution ships without
# venv.
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

# Creates an environment and installs torch into it, first and alone: see requirements/.
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
