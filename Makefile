# Every target sets up what it needs in .venv.
SHELL := /bin/bash
PY := .venv/bin/python
ON_RANKS := $(PY) launch.py --ranks
# One thread per rank by default, because the ranks of a host share its cores.
export OMP_NUM_THREADS ?= 1

MODEL ?= models/tiny-hybrid
RANKS ?= 2
PROMPT ?= Once upon a time
PROFILE ?= profile.json
OUT ?= out/quantized
IN ?= -
ANSWERS ?= -
ARGS ?=
SEED ?= 0
STEPS ?= 200000

# No target is a file.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))

# `make` lists the targets marked ## (scripts/targets.awk), `make help-all` also those marked #+.
help:
	@awk -f scripts/targets.awk $(MAKEFILE_LIST)
	@echo "make help-all lists all targets; variables: MODEL=$(MODEL) RANKS=$(RANKS) PROMPT=\"$(PROMPT)\" ARGS=\"--max-new-tokens 100\""

help-all:
	@awk -v all=1 -f scripts/targets.awk $(MAKEFILE_LIST)
	@echo "minutes and GB: on 2 CPU cores that do nothing else"

setup: #+ Set up: make .venv with what running needs
	@scripts/setup.sh run

setup-dev: #+ Set up: make .venv with what testing needs, too
	@scripts/setup.sh dev

demo: setup ## Use: a trained hybrid-ladder model writes a story on 2 tensor-parallel ranks
	@$(PY) generate.py --tp $(RANKS) --model $(MODEL) --prompt "$(PROMPT)" --temperature 0.7 --seed 1 $(ARGS)

generate: setup ## Use: generate.py on RANKS ranks: make generate MODEL=… PROMPT=… ARGS=…
	@$(PY) generate.py --tp $(RANKS) --model $(MODEL) --prompt "$(PROMPT)" $(ARGS)

chat: setup ## Use: talk to the model in the terminal
	@$(PY) generate.py --model $(MODEL) --chat --interactive --temperature 0 $(ARGS)

serve: setup ## Use: an OpenAI-compatible server for MODEL on RANKS ranks, with --speculate auto (ARGS="--speculate off": without)
	@$(PY) -m server --tp $(RANKS) --model $(MODEL) --speculate auto $(ARGS)

plan-serving: setup ## Use: which tp, replicas, weights, variant and batch for your latencies, and the load: make plan-serving MODEL=llama-3-70b ARGS="--gpus 8 --ttft 500 --itl 20"
	@$(PY) -m deploy.plan --model $(MODEL) $(ARGS)

cluster: setup ray ## Use: 2 replicas of MODEL on RANKS ranks each behind one address, on a local Ray: make cluster ARGS="--replicas 3"
	@.venv-ray/bin/python -m deploy.ray_serve --tp $(RANKS) $(ARGS) -- --model $(MODEL)

ray:
	@[ -x .venv-ray/bin/serve ] || { python3 -m venv .venv-ray && .venv-ray/bin/pip install -q -r deploy/requirements-ray.txt; }

batch: setup ## Use: answer a file of requests in OpenAI's batch format: make batch IN=in.jsonl ANSWERS=out.jsonl
	@$(PY) -m scripts.batch $(IN) $(ANSWERS) --tp $(RANKS) --model $(MODEL) $(ARGS)

quantize: setup ## Use: MODEL with weights in 8 or 4 bits, into OUT: make quantize MODEL=… OUT=… ARGS="--weights fp8"
	@$(PY) -m scripts.quantize --model $(MODEL) --out $(OUT) $(ARGS)

bench-offline: setup #+ Measure: throughput of the serving engine without HTTP, one JSON line
	@$(ON_RANKS) $(RANKS) -m engine.bench --model $(MODEL) $(ARGS)

startup: setup-dev #+ Measure: seconds from the server's command to its first token, cold and warm, into out/startup.json
	@$(PY) -m scripts.bench.serving.startup --model $(MODEL) --ranks $(RANKS) $(ARGS)

stalls: setup-dev #+ Measure: how long a stream stops while another client sends a costly request or many connections, into out/stalls.json (tracked: ARGS=--write; 10 min on a CPU, ARGS="--only penalties")
	@$(PY) -m scripts.bench.serving.stalls $(ARGS)

beside-batch: setup-dev #+ Measure: the gaps between a stream's tokens alone, beside a batch and beside other streams, into out/beside-batch.json (tracked: ARGS=--write; a minute on 2 cores)
	@$(PY) -m scripts.bench.serving.beside_batch $(ARGS)

bench-host: setup #+ Measure: what the host adds to a decode step of 64 sequences, in ms
	@$(ON_RANKS) $(RANKS) -m engine.bench --model $(MODEL) --host --requests 64 $(ARGS)

soak: setup-dev #+ Test: 64 streaming clients for a minute, 1,000 dropped connections, and a look for leaks (1.5 min, 2 GB)
	@$(PY) -m scripts.bench.serving.soak $(ARGS)

chaos: setup-dev #+ Test: kill and stop ranks and frontend of a server 1,000 times, and compare every answer with the undisturbed one, into out/chaos.json (hours, 2 GB; ARGS="--kills 20 --journal"; tracked: --write)
	@$(PY) -m scripts.bench.serving.chaos $(ARGS)

test: setup-dev ## Test: all tests
	@$(PY) -m pytest -n auto --dist worksteal $(ARGS)

cluster-test: setup-dev ray #+ Test: kill, update and scale replicas on a local Ray under load, into out/ray-serve.md (tracked: ARGS=--write; 4 min, 4 GB)
	@$(PY) -m tests.deploy $(ARGS)

clients: setup-dev #+ Test: openai, anthropic, agents and benchmarks from PyPI and npm against the server, resumable, into out/clients.md (tracked: ARGS=--write; 20 min, 10 GB of disk)
	@$(PY) -m tests.clients $(ARGS)

routers: setup-dev #+ Test: routers from PyPI in front of two servers: balance, prefixes, a killed server, drain, into out/routers.md (tracked: ARGS=--write; 5 min, 2 GB)
	@$(PY) -m tests.routers $(ARGS)

quantizers: setup-dev #+ Test: llmcompressor, ModelOpt, transformers and GPTQModel from PyPI write checkpoints, whose logits are compared with theirs, resumable, into out/quantizers.md (tracked: ARGS=--write; 5 min, 10 GB of disk)
	@$(PY) -m tests.quantizers $(ARGS)

simulate: setup-dev #+ Test: the server against a simulated clock, model and faults: make simulate SEED=… STEPS=…
	@$(PY) -m tests.simulation --seed $(SEED) --steps $(STEPS) $(ARGS)

lint: setup-dev ## Test: ruff, mypy, that README and docs quote the results as they are, the order of imports, and that no part exceeds its budget
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy && $(PY) -m scripts.report.quote_tables --check && $(PY) -m scripts.report.check_docs && $(PY) -m scripts.report.check_structure

real-models: setup-dev #+ Measure: SmolLM2 and Qwen2.5-Coder from PyPI beside transformers, in every width and with quantized all-reduces, resumable, into out/real-models.md (tracked: ARGS=--write; ARGS="--models smollm2 --tokens 256"; an hour and 4 GB on 2 cores, a GPU minutes)
	@$(PY) -m scripts.quality.real_models $(ARGS)

real-tasks: setup-dev #+ Measure: HumanEval's pass@1 and right tool calls of Qwen2.5-Coder from PyPI by width, resumable, into out/real-tasks.md (tracked: ARGS=--write; ARGS="--widths bfloat16 --problems 40"; hours on 2 cores, a GPU minutes)
	@$(PY) -m scripts.quality.tasks $(ARGS)

real-ladder: setup-dev #+ Measure: SmolLM2 from PyPI as a hybrid ladder, trained on its own chats, beside the original, resumable, into out/real-ladder-NAME.md (hours on a GPU; NAME=coder LAYERS="6 12 18" MILLIONS="10 50 200" SEEDS="0 1 2")
	@scripts/quality/real_ladder.sh

bench-cpu: setup-dev #+ Measure: tokens/s of SmolLM2 from PyPI on a CPU by width, beside transformers and llama.cpp (ARGS="--gguf FILE"), into out/bench-cpu.md (tracked: ARGS=--write; 5 min)
	@$(PY) -m scripts.bench.cpu $(ARGS)

accuracy: setup #+ Measure: perplexity and exact match of every embedded model at tp 1, 2 and 4, then with each quantized all-reduce, resumable, into out (tracked: ARGS=--write; half an hour on 2 cores, 2 GB)
	@$(PY) -m scripts.quality.accuracy $(ARGS)
	@$(PY) -m scripts.quality.accuracy --comm gloo int8 int6 int4 fp8 --tp 2 $(ARGS)

same-bits: setup-dev #+ Measure: how many of 1,000 prompts have other log-probabilities in batches, chunks, on RANKS ranks and in training than alone, with --deterministic, into out (tracked: ARGS=--write; 2 GPUs: ARGS="--device cuda"; a CPU: ARGS="--items 24 --models models/tiny-hybrid")
	@$(PY) -m scripts.quality.same_bits --tp $(RANKS) $(ARGS)

speculation: setup-dev #+ Measure: accepted tokens of drafts and tokens/s with and without speculation by task on the embedded models, resumable, into out/speculation.md (tracked: ARGS=--write; over an hour)
	@$(PY) -m scripts.bench.serving.speculation $(ARGS)

comm-table: setup #+ Measure: how fast all-reduces are on RANKS ranks by message size and algorithm, and what --comm auto chooses
	@$(ON_RANKS) $(RANKS) -m scripts.bench.comm.auto_table $(ARGS)

bench-comm: setup #+ Measure: every all-reduce on RANKS GPUs, latency by size, into out/comm.json
	@$(ON_RANKS) $(RANKS) -m scripts.bench.comm.all_reduce --out out/comm.json $(ARGS)

bench-frontend: setup-dev #+ Measure: CPU time of the HTTP frontend and the load generator per streamed token, with a fake engine
	@$(PY) -m scripts.bench.serving.frontend $(ARGS)

bench-kernels: setup #+ Measure: norms, RoPE, attention and sampling on one GPU compared with PyTorch, into out/kernels.json
	@$(PY) -m scripts.bench.kernels.non_gemm --out out/kernels.json $(ARGS)

tune: setup #+ Measure: which kernels make MODEL's linear layers fastest on RANKS GPUs, kept in ~/.cache/rung (servers do this at their first start)
	@$(ON_RANKS) $(RANKS) -m scripts.tune --model $(MODEL) $(ARGS)

bench-linear: setup #+ Measure: linear layers of few rows on RANKS GPUs compared with cuBLAS, into out/linear-RANK.json, the source of kernels/linear_configs
	@$(ON_RANKS) $(RANKS) -m scripts.bench.kernels.linear --out out/linear.json $(ARGS)

sanitize: setup-dev #+ Test: compute-sanitizer's memcheck, of CUDA's toolkit, over the GPU tests of the kernels and all all-reduce algorithms on one rank, resumable, into out/sanitizer/sanitizer.txt
	@$(PY) -m scripts.sanitize $(ARGS)

performance: setup-dev #+ Measure: tables and plots of GPU measurements, from the raw files in docs/results/h200-4: make performance ARGS="--raw DIR --write"
	@$(PY) -m scripts.report.performance $(ARGS)

sweep: setup ## Measure: variants x ranks x batch x interconnect x lengths x models into out/sweep.jsonl, where it stopped: make sweep ARGS="--grid table-2"
	@$(PY) -m scripts.sweep $(ARGS)

ladder: setup ## Measure: what would a ladder gain here? standard, ladder and no communication, with ratios: make ladder MODEL=llama-3-70b:16 RANKS=8
	@$(PY) -m scripts.sweep --grid ladder --models $(MODEL) --tp $(RANKS) $(ARGS)

latency: setup #+ Measure: the batch-1 part of the sweep, variants side by side
	@$(PY) -m scripts.sweep --grid latency $(ARGS)

throughput: setup-dev ## Measure: MODEL on RANKS ranks, offline and through the server under Poisson arrivals, into out/load.json
	@$(PY) -m scripts.bench.serving.load --model $(MODEL) --ranks $(RANKS) --offline $(ARGS)

compare: setup-dev ## Measure: Rung beside vLLM on RANKS GPUs, with ratios: make compare RANKS=2 ARGS="--models llama-3-70b:16 --vllm-python PYTHON"
	@$(PY) -m scripts.compare --ranks $(RANKS) $(ARGS)

measure-gpus: setup-dev ## Measure: sweeps, server load, drafts, all-reduces and start-up on RANKS GPUs, most important first, resumable: make measure-gpus RANKS=8 ARGS="--raw docs/results/gpu-8"
	@$(PY) -m scripts.measure_gpus --ranks $(RANKS) $(ARGS)

trace: setup #+ Measure: a trace for ui.perfetto.dev with hidden and exposed communication marked, and a table of both: make trace MODEL=models/tiny-ladder
	@$(ON_RANKS) $(RANKS) -m scripts.trace --model $(MODEL) $(ARGS)

plan: setup ## Train: how to shard P, G and OS of MODEL: make plan MODEL=llama-30b ARGS="--gpus 1024 --cluster a800 --recompute"
	@$(PY) -m training.plan --model $(MODEL) $(ARGS)

profile-collectives: setup #+ Train: time all-gather, reduce-scatter, all-reduce and broadcast on RANKS ranks, into PROFILE
	@$(ON_RANKS) $(RANKS) -m training.profile_collectives --out $(PROFILE) $(ARGS)

test-plans: setup-dev #+ Test: every sharding of 4 and 8 ranks against plain training (15 min, 2 GB)
	@$(PY) -m pytest -m exhaustive tests/training $(ARGS)

quote-tables: setup #+ Measure: copy the tables of docs/results into README.md and docs
	@$(PY) -m scripts.report.quote_tables

train-drafts: setup #+ Train: train the draft heads of three embedded models again (a GPU takes five minutes, a CPU hours)
	@$(PY) -m scripts.corpus.train_drafts $(ARGS)

train-tiny: setup #+ Train: train the embedded models again (ARGS=--sparse: tiny-moe and tiny-moe-ladder; a GPU takes minutes, a CPU most of a day)
	@$(PY) -m scripts.corpus.train_tiny $(ARGS)

clean: #+ Set up: remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
