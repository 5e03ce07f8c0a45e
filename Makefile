# make reproduce   install if needed, then tables/ and figures/ from the micro models and the recorded pair; goes on if interrupted
# make test        install if needed, then ruff, import-linter, a cold smoke run of the stages, the other notebooks, all tests but the slow ones
# make weekly      other programs ask our server (litellm, lm-eval, in an environment of their own: .clients)
# make notebooks   re-run all notebooks (micro profile) and store their outputs
# make bench       speed of the engine, of policy steps, of routed generation, and how cost grows; ratios within one run
# make hooks       check that notebooks, modules and README agree before each commit
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
STAGES := 01_confidence|02_rollouts|02b_outcomes|03b_training|04b_comparison|05_results
FORMATTED := stepwise_routing nbs/0*.ipynb nbs/labs/micro_world nbs/labs/recorded_pair bench

.PHONY: reproduce test style smoke lessons weekly notebooks bench hooks
.DEFAULT_GOAL := reproduce

reproduce: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume
	$(BIN)/stepwise-routing reproduce --profile recorded --resume

test: $(STAMP)
	$(MAKE) style
	$(MAKE) -j 2 smoke lessons
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

style: $(STAMP)
	$(BIN)/ruff check -q $(FORMATTED)
	$(BIN)/ruff format --check -q $(FORMATTED)
	$(BIN)/lint-imports --no-cache

smoke: $(STAMP)
	rm -rf runs/smoke runs/store/smoke
	$(BIN)/stepwise-routing reproduce --profile smoke --run-id smoke

lessons: $(STAMP)
	$(BIN)/nbdev_test --n_workers 1 --skip_file_re '^([_.]|$(STAGES))'

weekly: $(STAMP)
	test -x .clients/bin/python || $(PYTHON) -m venv .clients
	.clients/bin/python -m pip install -q 'litellm' 'lm-eval[api]' -c constraints-clients.txt
	$(BIN)/python -m pytest -m slow tests/test_clients.py

notebooks: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume --write-back
	$(BIN)/python .ci/lessons.py
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/readme.py

bench: $(STAMP)
	for name in engine policy routing growth; do $(BIN)/python bench/$$name.py; done

hooks:
	git config core.hooksPath .ci/hooks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $(STAMP)
