#!/usr/bin/env bash
# Runs the fast tests with the oldest and with the newest version of each package that pyproject.toml allows. Needs the package index.
#
#   bash scripts/test_versions.sh                    both
#   bash scripts/test_versions.sh oldest tests/data  one of them, arguments go to pytest
#
# "oldest" is the lowest versions that pyproject.toml names, resolved together, with the newest of what those need; "newest" the highest of
# everything. uv resolves both. PyTorch is the exception: it is the version of requirements-dev.txt in both, because the index has older
# and newer ones with CUDA only, gigabytes of it. TORCH=2.11.0 takes another one. Two packages for GPUs are left out: flash-linear-attention,
# which pyproject.toml pins, and Triton, for which there is scripts/test_tritons.sh. The environments are kept in .venv/versions.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
source scripts/environment.sh
versions="$environment/versions"
wishes=(oldest newest)
if [ "${1:-}" = oldest ] || [ "${1:-}" = newest ]; then
    wishes=("$1")
    shift
fi
[ $# -gt 0 ] || set -- -n "${TEST_WORKERS:-3}" --dist worksteal -m "not slow or quick"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 WANDB_MODE=offline

torch="torch==${TORCH:-$(sed -n 's/^torch==//p' requirements-dev.txt)}"
if [ ! -x "$versions/uv/bin/uv" ]; then
    python -m venv "$versions/uv"
    "$versions/uv/bin/python" -m pip install --quiet --disable-pip-version-check uv
fi

# What requirements-dev.txt names, without its pins.
printf '%s\n' "-e .[train,data,wandb,eval,sweep,gpt2]" "accelerate>=1.3" "peft>=0.21" "pytest>=8" "pytest-xdist>=3.6" "triton>=3.6; platform_system == 'Linux'" >"$versions/wanted.txt"
failed=()
for wish in "${wishes[@]}"; do
    folder="$versions/$wish"
    printf '\n\033[1m== the %s versions\033[0m\n' "$wish"
    [ -x "$folder/bin/python" ] || python -m venv "$folder"
    # By pip first, as everywhere else: where it finds a build without CUDA, that one stays.
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$torch"
    "$folder/bin/python" -c 'from importlib.metadata import version; print("torch==" + version("torch"))' >"$versions/torch.txt"
    resolution=highest
    [ "$wish" = newest ] || resolution=lowest-direct
    "$versions/uv/bin/uv" pip install --quiet --python "$folder/bin/python" --upgrade --resolution "$resolution" \
        --override "$versions/torch.txt" -r "$versions/wanted.txt"
    "$folder/bin/python" -m pip list --format freeze --disable-pip-version-check >"$folder/installed.txt"
    PATH="$folder/bin:$PATH" "$folder/bin/python" -m pytest -p no:cacheprovider "$@" || failed+=("$wish")
    echo "what was installed is in ${folder#"$repository"/}/installed.txt"
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed with the ${failed[*]} versions" >&2
    exit 1
fi
