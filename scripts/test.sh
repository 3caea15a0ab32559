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

# One thread per test process: the suite runs three of them, which often wait for the processes they start.
# A pool of compilers would import PyTorch in every one, and six programs would be compiled to test the instructions.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
ruff check .
ruff format --check --quiet .
workers=3
if [[ " $* " == *" --fast "* ]]; then
    workers=2 # each imports everything
else
    mypy
fi
exec python -m pytest -n "${TEST_WORKERS:-$workers}" --dist worksteal --durations 25 "$@"
