#!/usr/bin/env bash
# Runs the tests in .venv, which it makes if needed. Arguments go to pytest:
#
#   bash scripts/test.sh                       every contract, architecture, kernel and command
#   bash scripts/test.sh tests/ops -k padding  some of it
#   bash scripts/test.sh --fast                the part for the daily loop: what is not marked slow, or is marked quick
#   bash scripts/test.sh --all                 also what is marked rare, and fifty rounds of the kill loop instead of two
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh

# One thread per test process: the suite runs three of them, which often wait for the processes they start.
# A pool of compilers would import PyTorch in every one, and six programs would be compiled to test the instructions.
export OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 TORCHINDUCTOR_VEC_ISA_OK=1
export HF_HUB_OFFLINE=1 WANDB_MODE=offline
ruff check .
ruff format --check --quiet .
mypy
if [ "${1:-}" = --fast ]; then
    shift
    set -- -m "not slow or quick" "$@"
fi
exec python -m pytest -n "${TEST_WORKERS:-3}" --dist worksteal --durations 25 "$@"
