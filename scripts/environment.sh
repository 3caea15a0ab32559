# Sourced by the other scripts: makes the virtual environment .venv in the repository if it is not there, installs what
# requirements-dev.txt names, and puts it first on PATH. An installation that is up to date costs no time.
#
#   PYTHON=python3.12 bash scripts/test.sh     uses another interpreter (Python 3.11, 3.12 or 3.13)

repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
environment="$repository/.venv"

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.13 python3.12 python3.11 python3}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "Python 3.11, 3.12 or 3.13 is needed; set PYTHON to one, as in PYTHON=/usr/bin/python3.11" >&2
    return 1
}

wanted="$(cat "$repository/requirements-dev.txt" "$repository/pyproject.toml" | sha256sum)"
if [ "$(cat "$environment/installed" 2>/dev/null)" != "$wanted" ]; then
    python="$(find_python)" || exit 1
    echo "Installing into $environment with $("$python" --version); this takes a few minutes once." >&2
    rm -f "$environment/installed"
    "$python" -m venv "$environment" || {
        echo "could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        exit 1
    }
    (
        cd "$repository" &&
            "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
    ) || {
        echo "the installation failed; fix what pip says above and run the same command again" >&2
        exit 1
    }
    echo "$wanted" >"$environment/installed"
fi
export PATH="$environment/bin:$PATH"
