#!/usr/bin/env bash
# Compiles the kernels with every Triton that a user may have, each installed beside the others. Needs the package index, no GPU.
#
#   bash scripts/test_tritons.sh              the versions below: those that come with torch 2.11, 2.13 and 2.15
#   bash scripts/test_tritons.sh 3.7.1 3.8.0  … or these
#
# Per version: the tiles of every kernel fit the shared memory of every generation of GPU, and the products of the Hopper kernels stay
# in flight. A test that is skipped is a failure here. The versions are kept in .venv/tritons; about six minutes each.
set -euo pipefail
if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2,8s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "$0")/.."
source scripts/environment.sh
results="$(mktemp -d)"
trap 'rm -rf "$results"' EXIT
export OMP_NUM_THREADS=1 TRITON_CACHE_DIR="$results/cache"

[ $# -gt 0 ] || set -- 3.6.0 3.7.1 3.9.0
failed=()
for version in "$@"; do
    # What is not there whole is deleted and installed again, so this must not be another folder.
    [[ "$version" =~ ^[0-9][0-9A-Za-z.+]*$ ]] || { echo "'$version' is not a version of Triton, such as 3.6.0" >&2 && exit 2; }
    folder="$environment/tritons/$version"
    if [ ! -e "$folder/installed" ]; then
        rm -rf "$folder"
        python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "triton==$version" || {
            echo "Triton $version cannot be installed; see what pip says above" >&2
            failed+=("$version")
            continue
        }
        touch "$folder/installed"
    fi
    printf '\n\033[1m== Triton %s\033[0m\n' "$version"
    PYTHONPATH="$folder${PYTHONPATH:+:$PYTHONPATH}" python - "$version" "$results/$version.xml" <<'PYTHON' || failed+=("$version")
import sys
import xml.etree.ElementTree as xml

import pytest
import triton

version, report = sys.argv[1:]
if triton.__version__ != version:
    sys.exit(f"Triton {triton.__version__} of {triton.__file__} was imported, and not {version}")
status = pytest.main(["-q", "-p", "no:cacheprovider", "--all", f"--junitxml={report}", "tests/ops/test_forgetting_attention_compiles.py", "tests/ops/test_kernels_compile.py"])
counts = xml.parse(report).getroot().find("testsuite").attrib
if int(counts["skipped"]):
    sys.exit(f"{counts['skipped']} tests were skipped")
sys.exit(status)
PYTHON
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed with Triton: ${failed[*]}" >&2
    exit 1
fi
echo "the kernels compile with Triton: $*"
