# Everything the book does. `make book` and `make test` set themselves up.
PYTHON ?= python3
CHAPTER ?=
GPU_PYTHON ?= 3.12
REPEAT ?= 1

BOOK = .venv/book/bin/python
TEST = .venv/test/bin/python
OLDEST_PYTHON ?= python3.11
OLDEST = .venv/oldest/bin/python
TOOL_TESTS = site test_fingerprint.py test_front.py test_rules.py test_setup.py test_tools.py
BUNDLE = build/gpu-bundle
# A runner that was given a bundle has no network: it uses its own torch and the bundle's wheels.
GPU = $(if $(wildcard $(BUNDLE)),PYTHONPATH=$(CURDIR)/build/gpu-site $(PYTHON),$(TEST))
SETUP = $(PYTHON) tools/setup_env.py
NEWEST_FLAG = $(if $(NEWEST),--newest)
.DEFAULT_GOAL = help
.PHONY: help book test test-gpu test-t4 execute execute-gpu sync check gpu-bundle gpu-ready \
        record status serve repository vendor pins clean env-book env-test test-oldest env-oldest

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 16

book: env-book   ## build the HTML from the stored outputs, warnings as errors
	@$(BOOK) tools/pages.py
	@rm -rf _build/html
	@$(BOOK) -c "from jupyter_book.cli.main import main; main()" build . --all -W -n --keep-going --quiet
	@echo "The book is built. Open _build/html/index.html, or run 'make serve'."

test: book env-test  ## everything a CPU can check
	$(TEST) tools/rules.py
	$(TEST) -m pytest -q tests
	$(TEST) tools/run_nbval.py --repeat $(REPEAT) $(CHAPTER)
	@$(TEST) tools/records.py status || true

test-gpu: gpu-ready  ## run and compare every cell on a GPU; goes on by chapter
	$(GPU) tools/run_nbval.py --runner gpu --resume $(CHAPTER)

test-t4: gpu-ready  ## run every cell on a GPU that poses as a Colab T4
	$(GPU) tools/t4.py $(CHAPTER)

test-oldest: env-oldest  ## the package and all chapters on the oldest Python and torch that Colab offers
	$(OLDEST) -m pytest -q tests $(addprefix --ignore=tests/,$(TOOL_TESTS))
	$(OLDEST) tools/run_nbval.py --records build/records-oldest $(CHAPTER)

execute: env-test    ## run chapters on this CPU and store their outputs (CHAPTER=name)
	$(TEST) tools/execute.py $(CHAPTER)

execute-gpu: gpu-ready  ## run chapters on a GPU and store the GPU cells' outputs
	$(GPU) tools/execute.py --gpu $(CHAPTER)

sync: env-test       ## bring the notebooks up to their texts, keeping outputs
	$(TEST) tools/sync.py $(if $(DISCARD),--discard) $(CHAPTER)

check: env-test      ## the book's own rules; runs no chapter
	$(TEST) tools/rules.py $(CHAPTER)

gpu-bundle:      ## pack what a GPU runner without a network lacks (GPU_PYTHON=3.12)
	$(PYTHON) tools/gpu_bundle.py $(BUNDLE) --python $(GPU_PYTHON)

gpu-ready:
	@if [ -d $(BUNDLE) ]; then $(PYTHON) tools/gpu_bundle.py $(BUNDLE) --install build/gpu-site; \
	else $(SETUP) test $(NEWEST_FLAG); fi

record: env-test     ## keep the newest runs' records beside the chapters
	$(TEST) tools/records.py promote

status: env-test     ## per chapter and runner: is the page still what its code prints?
	@$(TEST) tools/records.py status

serve:           ## read the built book at http://127.0.0.1:8000
	$(PYTHON) -m http.server -b 127.0.0.1 -d _build/html 8000

repository: env-test ## change the repository's address everywhere (URL=https://...)
	$(TEST) tools/repository.py "$(URL)"

vendor:          ## fetch again what is kept below _static, and check it (needs npm)
	$(PYTHON) tools/vendor.py

pins: env-book env-test  ## write what is installed to the constraints files
	$(BOOK) tools/pins.py constraints-book.txt
	$(TEST) tools/pins.py constraints.txt

clean:           ## remove what was built; environments and stored outputs stay
	rm -rf _build _generated build

env-book:
	@$(SETUP) book

env-test:
	@$(SETUP) test $(NEWEST_FLAG)

env-oldest:
	@command -v $(OLDEST_PYTHON) > /dev/null || { echo "test-oldest needs Python 3.11: \
	make test-oldest OLDEST_PYTHON=<path>"; exit 1; }
	@$(OLDEST_PYTHON) tools/setup_env.py oldest
