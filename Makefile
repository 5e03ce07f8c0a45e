# make reproduce   install if needed, then from the micro models to tables/ and figures/
# make test        install if needed, then every check there is
# make hooks       check that notebooks, modules and README agree before each commit
# make notebooks   re-run all notebooks (micro profile) and store their outputs
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

.PHONY: reproduce test hooks notebooks
.DEFAULT_GOAL := reproduce

reproduce: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume

test: $(STAMP)
	$(BIN)/stepwise-routing test

notebooks: $(STAMP)
	$(BIN)/stepwise-routing reproduce --profile micro --resume --write-back
	$(BIN)/stepwise-routing lessons
	$(BIN)/nbdev_clean
	$(BIN)/stepwise-routing readme

hooks:
	git config core.hooksPath .ci/hooks

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -e '.[dev]' -c constraints.txt
	touch $(STAMP)
