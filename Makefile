# Every target sets up what it needs: a virtual environment with the package in it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# Workers and the processes that tests start share compiled files, also where the environment forbids to write them.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-oldest test-newest mutants test-federated test-wheel names lint docs notebooks install clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/privknn demo

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# What make test leaves out for its seconds: tests marked long, which have quicker siblings.
test-long: $(STAMP)
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m long

# make test with the lowest and with the newest versions that are supported, each in an environment of its own.
test-oldest test-newest: test-%: $(VENV)-%/.installed
	$(VENV)-$*/bin/python -m pytest --numprocesses auto --dist worksteal

$(VENV)-%/.installed: pyproject.toml constraints/%.txt
	test -x $(VENV)-$*/bin/python || $(PYTHON) -m venv $(VENV)-$*
	PIP_CONSTRAINT=$(CURDIR)/constraints/$*.txt $(VENV)-$*/bin/python -m pip install --quiet --editable ".[test]"
	touch $@

# Changes of single expressions that no test of privacy, neighbours and labelers notices: hours for all, so name a
# module, as in make mutants MODULES="pl_privknn.privacy.mechanisms.noisy_votes*". tests/mutants.md explains survivors.
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[mutants]"
	OMP_NUM_THREADS=1 $(BIN)/mutmut run $(MODULES)
	$(BIN)/mutmut results

# Clients and servers, in an environment of their own: Flower pins older versions of what the other one needs.
test-federated: $(VENV)-federated/.installed
	$(VENV)-federated/bin/python -m pytest tests/federated

$(VENV)-federated/.installed: pyproject.toml
	test -x $(VENV)-federated/bin/python || $(PYTHON) -m venv $(VENV)-federated
	$(VENV)-federated/bin/python -m pip install --quiet --editable ".[federated]" "pytest>=8"
	touch $@

# The wheel as its users get it: with its own torch and no extra, in an empty environment outside the checkout; there the
# demo, and the README's fit of a folder.
# It needs nothing of the checkout's environment, so that a small disk holds one of the two at a time.
test-wheel:
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	$(PYTHON) -m venv "$$folder/build" && \
	"$$folder/build/bin/python" -m pip install --quiet build && \
	{ "$$folder/build/bin/python" -m build --outdir "$$folder/dist" . > "$$folder/log" 2>&1 || { cat "$$folder/log"; exit 1; }; } && \
	$(PYTHON) -m venv "$$folder/venv" && \
	"$$folder/venv/bin/python" -m pip install --quiet "$$folder"/dist/*.whl && "$$folder/venv/bin/python" -m pip check && \
	awk '/^```python/ {inside = 1; next} /^```/ && inside {exit} inside' README.md > "$$folder/digits.py" && \
	cd "$$folder" && unset PYTHONPATH && venv/bin/privknn --version && venv/bin/privknn demo && \
	venv/bin/python digits.py && venv/bin/privknn fit --data digits --epsilon 1 --private-records 1000

# Two collections under different hash seeds must name the same tests in the same order.
names: $(STAMP)
	PYTHONHASHSEED=1 $(BIN)/python -m pytest --collect-only --quiet -m "" > $(VENV)/names && grep :: $(VENV)/names > $(VENV)/names.1
	PYTHONHASHSEED=2 $(BIN)/python -m pytest --collect-only --quiet -m "" > $(VENV)/names && grep :: $(VENV)/names > $(VENV)/names.2
	cmp $(VENV)/names.1 $(VENV)/names.2

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Static pages in build/site, with the gallery's outputs after `make notebooks`; a broken link, a missing anchor or a page outside the navigation is an error.
docs: $(VENV)/.docs-installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The gallery as executed notebooks in build/notebooks; an error in a cell is an error.
notebooks: $(STAMP)
	mkdir -p build/notebooks
	cd build/notebooks && for script in ../../docs/guides/gallery/*.py; do \
	  ../../$(BIN)/jupytext --quiet --set-kernel python3 --execute --to ipynb \
	    --output "$$(basename "$$script" .py).ipynb" "$$script" || exit 1; \
	done

$(VENV)/.docs-installed: $(STAMP)
	$(BIN)/python -m pip install --quiet --editable ".[docs]"
	touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
