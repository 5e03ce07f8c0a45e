# make reproduce   install if needed, then tables/ and figures/ from the micro models and the recorded pair; goes on if interrupted
# make test        install if needed, then a cold smoke run of the stages, the other notebooks, all tests but the slow ones
# make fuzz        a search of MINUTES=60 for replies, answers, settings, files and requests that break something
# make properties  all property tests with ten times the examples, at random; what both find becomes fixed examples
# make ablations   a policy per design choice and per-step policies, to tables/ablations/ and figures/ablations/
# make bench       speed of the engine, of policy steps, of routed generation, and how cost grows; ratios within one run
# make hooks       check that notebooks, modules and README agree before each commit
# make clients     litellm and lm-eval in an environment of their own (.clients), and the tests that ask a server with them
# make site        the documentation, to _docs/html; needs no network once installed
# make notebooks   re-run all notebooks (micro profile) and store their outputs
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed
STAGES := 01_confidence|02_rollouts|02b_outcomes|03b_training|04b_comparison|05_results

.PHONY: reproduce ablations bench test fuzz properties smoke lessons hooks notebooks clients site
.DEFAULT_GOAL := reproduce

reproduce: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume
	$(BIN)/stepwise-routing reproduce --profile recorded --resume

ablations: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro-ablations --resume

bench: $(STAMP)
	for name in engine policy routing growth; do $(BIN)/python tests/bench/$$name.py; done

test: $(STAMP)
	$(MAKE) -j 2 smoke lessons
	$(BIN)/python -m pytest -n 2 -m "not slow"

fuzz: $(STAMP)
	$(BIN)/python tests/helpers/fuzz.py $(or $(MINUTES),60)

properties: $(STAMP)
	STEPWISE_FUZZ=10 $(BIN)/python -m pytest -n 2 -m hypothesis --timeout 3600

smoke: $(STAMP)
	rm -rf runs/smoke runs/store/smoke
	$(BIN)/stepwise-routing reproduce --profile smoke --run-id smoke

lessons: $(STAMP)
	$(BIN)/nbdev_test --n_workers 1 --skip_file_re '^([_.]|$(STAGES))'

notebooks: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume --write-back
	$(BIN)/python .ci/lessons.py
	$(BIN)/nbdev_clean
	$(BIN)/python .ci/readme.py

clients: $(STAMP)
	test -x .clients/bin/python || $(PYTHON) -m venv .clients
	.clients/bin/python -m pip install -q 'litellm' 'lm-eval[api]' -c constraints-clients.txt
	$(BIN)/python -m pytest -m slow tests/test_clients.py

site: $(STAMP)
	$(BIN)/python -m pip install -q -e '.[dev,docs]' -c constraints.txt
	$(BIN)/python .ci/site.py

hooks:
	git config core.hooksPath .ci/hooks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $(STAMP)
