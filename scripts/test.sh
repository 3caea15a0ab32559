#!/usr/bin/env bash
# Runs the tests in .venv, which it makes if needed. Arguments go to pytest:
#
#   bash scripts/test.sh                       every contract, architecture, kernel and command
#   bash scripts/test.sh tests/ops -k padding  some of it
#   bash scripts/test.sh --fast                the part for the daily loop: about a minute, some cases of a test
#   bash scripts/test.sh --all                 also tests marked rare, and fifty rounds of the kill loop instead of two
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

# One thread per test process. Each imports everything, so there are two, which often start two processes themselves.
# A pool of compilers would import PyTorch in every one, and six programs would be compiled to test the instructions.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
# Zarr and Hydra bring plugins for pytest, which every process would import before it knows whether it needs them.
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
ruff check .
ruff format --check --quiet .
[[ " $* " == *" --fast "* ]] || mypy
exec python -m pytest -p xdist.plugin -n "${TEST_WORKERS:-2}" --dist worksteal --durations 25 "$@"
