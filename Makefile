# Everything a newcomer needs: make train, make test. Everything a change needs: make check test.
PYTHON ?= python3
VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
# A run needs far fewer packages than the tests, and has them where those of the tests are.
RUN_READY := $(if $(wildcard $(READY)),$(READY),$(VENV)/.run-ready)
export OMP_NUM_THREADS ?= 1
# Bytecode is written, whatever the environment says: hundreds of processes would compile all modules.
export PYTHONDONTWRITEBYTECODE :=
SAMPLE := out/sample
CHECKPOINT ?= $(SAMPLE)/run
STEPS ?= 400
DEVICE ?= cuda
# make train chooses the device itself unless DEVICE is given.
ON_DEVICE := $(if $(filter command environment,$(origin DEVICE)),--device $(DEVICE))
OLDEST := build/oldest
NEWEST := build/newest
EXAMPLES := $(VENV)/.examples
IN_PROCESS := -m pytest -n 2 --dist loadfile -m "not launch and not gpu"
# make gpu PYTHON=python3 runs in the environment of that interpreter, and installs nothing.
ifeq ($(origin PYTHON),command line)
RUN := $(PYTHON)
ENVIRONMENT := check-python
else
RUN := $(BIN)/python
ENVIRONMENT := $(READY)
endif

.NOTPARALLEL:
.PHONY: help setup train test test-all oldest newest versions check-python gpu gpu-bench check check-export fix smoke matrix elastic faults examples docs clean

help: ## this list
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { print $$1 "\t" $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv, install the tested versions into it, and name its build of torch
	@$(BIN)/minimind env --brief

$(READY): EXTRA := dev
$(VENV)/.run-ready: EXTRA := data,serve
$(READY) $(VENV)/.run-ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed; make PYTHON=python3.12 setup"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt --editable '.[$(EXTRA)]'
	@touch $@

train: $(RUN_READY) ## train the tiny model on what this Python says about itself: 3 to 8 minutes on two CPU cores after installing
	@$(BIN)/python examples/stdlib_corpus.py $(SAMPLE)/stdlib.jsonl
	@PYTHON=$(BIN)/python bash run_accelerate.sh --config strong --model tiny --data_path $(SAMPLE)/stdlib.jsonl \
	  --out_dir $(SAMPLE)/run --cache_dir $(SAMPLE)/cache --max_steps $(STEPS) --batch_size 8 \
	  --save_interval 100 --eval_interval 200 $(ON_DEVICE)
	@echo
	@echo "A sample, after the prompt 'class Reader:' (another --seed, another text; what comes next is above):"
	@text=$$($(BIN)/minimind generate --checkpoint $(SAMPLE)/run --max_new_tokens 80 --temperature 0.3 \
	  --repetition_penalty 1.1 --prompt "$$(printf 'class Reader:\n    """')") \
	  && printf '%s\n' "$$text" | fold -s -w 92 | sed 's/^/  | /'

test: $(READY) ## everything that fits in minutes on two cores
	@$(BIN)/python -m pytest -n 2 --dist loadfile

test-all: $(READY) oldest ## the long runs too, and the in-process tests with the oldest versions
	$(BIN)/python -m pytest --long -rs

$(OLDEST)/.ready $(NEWEST)/.ready: build/%/.ready: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv build/$*
	build/$*/bin/python -m pip install --quiet --constraint constraints-$*.txt --editable '.[dev]'
	@touch $@

oldest: $(OLDEST)/.ready ## the in-process tests with the oldest versions that pyproject.toml allows
	$(OLDEST)/bin/python $(IN_PROCESS)

newest: $(NEWEST)/.ready ## the in-process tests with the newest versions that pyproject.toml allows
	$(NEWEST)/bin/python $(IN_PROCESS)

versions: oldest newest $(READY) ## the in-process tests with the oldest versions, the newest, and those of constraints.txt
	$(BIN)/python $(IN_PROCESS)

check-python:
	@$(PYTHON) scripts/check_environment.py $(NEEDS)

gpu: NEEDS := pytest
gpu: $(ENVIRONMENT) ## all that one GPU has to show, to out/gpu: 20 minutes at most; DEVICE=mps, xpu or npu: another one, DEVICE=cpu tries it, PYTHON=python3 uses that
	$(RUN) -m tools.gpu --device $(DEVICE) --out out/gpu

gpu-bench: $(ENVIRONMENT) ## speed on one CUDA GPU: tokens/s, MFU, memory of 26m, 104m, 0.4b, to out/gpu.json
	@mkdir -p out
	$(RUN) -m benchmarks.gpu --out out/gpu.json

check: $(READY) ## lint, format, types, shell
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/shellcheck run_accelerate.sh scripts/slurm.sbatch scripts/prepare.sbatch .ci/run

fix: $(READY) ## mend what can be mended by machine, and write docs/flags.md and the tables of docs/launching.md and docs/coming_from.md
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python -m scripts.flag_reference
	$(BIN)/python -m scripts.device_reference

smoke: $(READY) ## two processes, killed and resumed, compared step by step
	$(BIN)/python -m pytest tests/distributed -k 'kill or resume'

matrix: $(READY) ## ZeRO stage x dtype x accumulation x processes and their groups: do all curves agree? 12 to 14 minutes
	$(BIN)/python -m tools.matrix

elastic: $(READY) ## save under one ZeRO stage, number of processes or group size, go on under another: the table, 7 minutes
	$(BIN)/python -m tools.elastic

faults: $(READY) ## kill, fill, stop and damage runs in every way; a table of what came of it: about an hour
	$(BIN)/python -m tools.faults

$(EXAMPLES): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[examples]'
	@touch $@

examples: $(EXAMPLES) ## every example, by accelerate launch and torchrun, in one process and in two, and the commands of docs/fine_tuning.md; the time of each
	$(BIN)/python -m pytest --long tests/examples "tests/docs/test_commands.py::test_every_command_of_a_page_ends_well[docs/fine_tuning.md]" --durations=0 --durations-min=0.1

check-export: $(READY) ## export the sample run, or CHECKPOINT=out/mine, load it in a fresh environment, compare logits
	$(BIN)/python scripts/check_export.py --checkpoint $(CHECKPOINT)

docs: $(READY) ## the docs as a site, in build/site; a broken link or anchor ends it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html, or for its search too: $(VENV)/bin/mkdocs serve"

clean: ## forget the sample run
	rm -rf $(SAMPLE)
