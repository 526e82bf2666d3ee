# `make demo` and `make test` set up everything they need by themselves.

PYTHON ?= python3
VENV := .venv
comma := ,
BIN := $(VENV)/bin

# MLX's back end: Metal comes with macOS; on Linux CUDA where its driver is, else the CPU.
CUDA := $(shell nvidia-smi 2>/dev/null | grep -o 'CUDA Version: [0-9]*' | grep -o '[0-9]*$$')
BACKEND ?= $(if $(filter-out Linux,$(shell uname -s)),metal,$(if $(CUDA),$(if $(filter 12,$(CUDA)),cuda12,cuda13),cpu))
EXTRAS := dev$(if $(filter-out metal,$(BACKEND)),$(comma)$(BACKEND))
INSTALLED := $(VENV)/.installed-$(BACKEND)

.PHONY: demo test zoo check format clean

demo: $(INSTALLED)  ## build a model of 1 GB, run it in a third of that, and again in memory
	$(BIN)/python scripts/demo.py

test: $(INSTALLED)  ## run the tests, those of a file in one process, two files at a time
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

zoo: $(INSTALLED)  ## run every architecture of mlx-lm, stock and streamed, and compare bit for bit
	$(BIN)/python scripts/zoo.py --jobs 2

check: $(INSTALLED)  ## lint, type-check, layering
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_layering.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) models .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "mlx-flash needs Python 3.10 or newer. Hint: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS)]'
	@touch $@
