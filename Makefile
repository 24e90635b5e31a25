# One virtual environment for everything; each stamp says which extras it holds for this pyproject.toml.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# two workers have the two cores: one thread each, and where a test asks for two, they do not spin while they wait
ALONE  := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-thorough test-yolo check docs dist format assets gallery models bench clean

help:
	@echo "make demo     install, then draw images whose evidence is known and explain them"
	@echo "make test     install with the test extras, then run the tests that are not marked slow"
	@echo "make test-slow  the tests that take longer than a third of a second each: audits, commands, whole families of models; those of the documentation run in make docs"
	@echo "make test-thorough   also every model of the zoo, more of Ray, trainings, and all cases of long lists"
	@echo "make test-yolo  the tests of YOLO, in an environment of their own, because its OpenCV writes over the headless one"
	@echo "make check    format, lint, types, import levels, doctests, documentation code, prose rules"
	@echo "make docs     run the code of all pages, and build the site into docs/_build/html; warnings are errors"
	@echo "make dist     wheel and sdist in dist/, tried in a fresh environment with each extra"
	@echo "make format   put the format right, and what the linter can mend"
	@echo "make assets   draw the pictures of the README again"
	@echo "make gallery  every method on four photographs and four phantoms, into docs/gallery: hours"
	@echo "make models   every architecture of the zoo again, into docs/evidence/models.md"
	@echo "make bench    the benchmark, beside grad-cam, torchcam and captum"
	@echo "make clean    remove the virtual environment and everything built"

demo: $(STAMP)-base
	$(BIN)/camscope demo --overwrite
	@echo "camscope is in $(BIN): . $(BIN)/activate brings it into this shell"

# the package of nnU-Net's networks asks for an old timm, which these networks do not import
NETWORKS := $(BIN)/python -m pip install --quiet --no-deps "dynamic-network-architectures>=0.4"

test: $(STAMP)-test
	$(NETWORKS)
	$(ALONE) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow"

test-slow: $(STAMP)-test
	$(NETWORKS)
	$(ALONE) $(BIN)/python -m pytest -q -n 2 --dist worksteal -m slow --ignore tests/docs

test-thorough: $(STAMP)-test
	$(NETWORKS)
	$(ALONE) $(BIN)/python -m pytest -q -n 2 --dist worksteal --thorough

test-yolo:
	$(PYTHON) -m venv $(VENV)-yolo
	$(VENV)-yolo/bin/python -m pip install --quiet -e ".[hub,segments,batch,audit,yolo]" "pytest>=8" "supervision>=0.25"
	$(VENV)-yolo/bin/python -m pip install --quiet --force-reinstall --no-deps opencv-python-headless
	$(ALONE) $(VENV)-yolo/bin/python -m pytest -q tests/models tests/docs/test_recipes_with_other_libraries.py tests/targets/test_supervision_detections.py -k "ultralytics or yolo or supervision"

check: $(STAMP)-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(ALONE) $(BIN)/python -m pytest -q -n 2 --dist worksteal --doctest-modules src/camscope tests/test_package_structure.py tests/test_prose.py tests/test_docstrings.py

docs: $(STAMP)-docs $(STAMP)-test
	$(ALONE) $(BIN)/python -m pytest -q -n 2 --dist worksteal --thorough tests/docs
	$(ALONE) $(BIN)/python -m sphinx -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html
	$(ALONE) $(BIN)/python docs/translations.py check
	$(ALONE) $(BIN)/python -m sphinx -W --keep-going -q -b html -D language=zh_CN -d docs/_build/doctrees-zh docs docs/_build/html/zh-CN
	@echo "docs/_build/html/index.html"

dist: $(STAMP)-release
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/release/try_wheel.py dist

format: $(STAMP)-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

assets: $(STAMP)-base
	$(BIN)/python assets/draw.py

gallery: $(STAMP)-gallery
	$(BIN)/python assets/gallery.py

models: $(STAMP)-test
	$(BIN)/python -m pytest -q tests/explainers/test_zoo.py --write-models

bench: $(STAMP)-bench
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) $(VENV)-yolo .mypy_cache .pytest_cache .ruff_cache build dist docs/_build docs/tutorials
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP)-base: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(STAMP)-%: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet -e ".[$*]"
	@touch $@
