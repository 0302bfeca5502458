# Two commands matter: `make demo` (the whole journey) and `make test`. Each makes its own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=

.PHONY: demo demo-images test test-slow lint format bench bench-gpu clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[train,eval]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test]'
	# apart, for one test: beside the rest, without a torchvision made for this torch, torchmetrics could not be imported
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps --target $(VENV)/torch-fidelity torch-fidelity
	touch $@

demo: $(VENV)/.demo  ## train, convert, distil, judge, load elsewhere: everything lands in out/
	$(BIN)/python -m experiments.demo $(ARGS)

demo-images: $(VENV)/.demo  ## softmax, plain linear attention and MHLA learn digits: out/images
	$(BIN)/python -m experiments.studies images --threads 2 $(ARGS)

test: $(VENV)/.test lint  ## all tests but the slow ones
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.test  ## the long ones, by hand
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.demo  ## the operator against SDPA and plain linear attention, on this machine
	$(BIN)/mhla-hf bench --quick $(ARGS)

bench-gpu: $(VENV)/.demo  ## the kernels against what a user would pick instead, on a GPU: fills docs/performance.md
	failed=0; \
	$(BIN)/mhla-hf bench --suite paper --device cuda --out docs/bench/gpu $(ARGS) || failed=1; \
	$(BIN)/mhla-hf bench --suite kernels --device cuda --out docs/bench/kernels $(ARGS) || failed=1; \
	$(BIN)/mhla-hf bench --suite decode --device cuda --out docs/bench/decode $(ARGS) || failed=1; \
	$(BIN)/python -m mhla_hf.bench.document docs && exit $$failed

clean:
	rm -rf $(VENV) out build *.egg-info
