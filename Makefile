# make demo: a trained tiny pipeline -> bundles -> verified -> pictures beside diffusers -> table
# make test: ruff, mypy --strict, pytest
# make coverage: every other class that has a recipe, held to the same contract
# make figures: all classes, and what `mlxconv models` and docs/MODELS.md show of them
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TORCH := 2.13.0
# On Linux, PyPI's build of this version carries CUDA. Where PyTorch's own CPU wheels are within
# reach, `make TORCH_INDEX=https://download.pytorch.org/whl/cpu test` takes those.
TORCH_INDEX ?=
TORCH_SPEC := torch==$(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: demo test coverage figures lint clean env

demo: env
	$(BIN)/mlxconv demo

test: lint
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "not coverage"

coverage: env
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup -m coverage

# Measures every class again and writes down what `mlxconv models` and docs/MODELS.md show.
figures: env
	MLXCONV_FIGURES=$(CURDIR)/recipes/parity.json $(BIN)/python -m pytest -q -n 2 --dist loadgroup \
		tests/convert/test_recipes.py -k keeps_the_contract
	$(BIN)/mlxconv models --markdown > docs/MODELS.md

lint: env
	$(BIN)/ruff check src convert runtime tests
	$(BIN)/ruff format --check src convert runtime
	$(BIN)/mypy

env: $(VENV)/.ready

# torch goes first, by its pinned version, so that no other package can pull a CUDA build.
$(VENV)/.ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check $(TORCH_SPEC)
	$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
