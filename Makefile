# One command sets up and runs the main job (`make demo`), one sets up and passes the tests
# (`make test`). Both make the virtual environment they need.
VENV ?= .venv
PYTHON ?= python3
# The environment is made for one accelerator, cpu or cuda. It holds which, and later commands use it.
STAMP := $(VENV)/.installed
ACCELERATOR ?= $(shell cat $(STAMP) 2> /dev/null || echo cpu)
# Where pip finds PyTorch's CPU build when none of its configured sources has it.
TORCH_INDEX_URL ?= https://download.pytorch.org/whl/cpu
SEED ?= 0
BIN := $(VENV)/bin

.PHONY: setup accelerator demo test test-cpu test-cuda test-fast browser soak lint page docs clean

setup: $(STAMP)

$(STAMP): pyproject.toml tools/setup.sh | accelerator
	PYTHON=$(PYTHON) TORCH_INDEX_URL=$(TORCH_INDEX_URL) \
		bash tools/setup.sh $(VENV) $(ACCELERATOR) $(STAMP)

accelerator:
	@for former in $(VENV)/.installed-*; do if [ -e "$$former" ]; then echo "$(VENV) was made by an" \
	"earlier version of this Makefile ($$former): remove $(VENV)" >&2; exit 2; fi; done
	@held=$$(cat $(STAMP) 2> /dev/null || echo $(ACCELERATOR)); \
	if [ "$$held" != "$(ACCELERATOR)" ]; then echo "$(VENV) holds the packages for $$held, and" \
	"ACCELERATOR is $(ACCELERATOR): leave ACCELERATOR out, or remove $(VENV)" >&2; exit 2; fi

demo: setup
	$(BIN)/torchtitan-rl train alphabet_sort_tiny --seed $(SEED) \
		--name alphabet_sort_tiny-$$(date +%Y%m%d-%H%M%S)

# Real processes often leave a core idle, so two test processes run, each with whole files, those
# that take minutes first.
PYTEST_PARALLEL := --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: test-$(ACCELERATOR)

test-cpu: setup browser
	$(BIN)/python -m pytest $(PYTEST_PARALLEL) -m "not soak" --durations 40 \
		--durations-min 8 tests/real tests/browser tests/fast

# The packages for CUDA have no engine for CPUs, which tests/real needs.
test-cuda: setup
	CUDA_VISIBLE_DEVICES= $(BIN)/python -m pytest $(PYTEST_PARALLEL) -m "not soak" tests/fast
	$(BIN)/python -m pytest tests/gpu

browser:
	@bash tools/browser.sh

test-fast: setup
	$(BIN)/python -m pytest $(PYTEST_PARALLEL) -m "not soak and not slow" tests/fast

soak: setup
	mkdir -p outputs
	for kind in rollouts restarts elastic agents conversations tenants; do $(BIN)/python -m tests.campaign --of $$kind \
	--first 1000 --seconds 1200 --jobs $$(nproc) --out outputs/campaign-$$kind.txt || exit 1; done
	$(BIN)/python -m pytest -m soak tests
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "not soak" tests/fast

lint: setup
	! git grep -nE "^(<<<<<<<|>>>>>>>) "
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@if command -v npm > /dev/null && $(NPM_INSTALL); then npm --prefix web run --silent check; \
	else echo "NOT checked: the types of web/, for which npm and its registry are missing"; fi

NPM_INSTALL := npm --prefix web install --no-package-lock --no-audit --no-fund --silent

page: # builds the files that the page's server sends
	$(NPM_INSTALL)
	npm --prefix web run --silent check
	npm --prefix web run --silent build

# To read the pages with their search: `python3 -m http.server --directory site`.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:
	rm -rf $(VENV) outputs site
