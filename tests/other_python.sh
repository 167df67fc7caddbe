#!/usr/bin/env bash
# The shorter leg of the tests on the other Python (3.12, or 3.11 where the main tests ran on 3.12), which brings
# another JAX. Makes its own virtual environment. Where that Python is not installed, says so in one line.
set -euo pipefail
cd "$(dirname "$0")/.."

main_python="${BIN:-.venv/bin}/python"
[ -x "$main_python" ] || main_python="${PYTHON:-python3}"
main=$("$main_python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
other=3.12
[ "$main" = 3.12 ] && other=3.11
venv=".venv${other/./}"

# What touches JAX most closely, and so differs most between its versions.
tests=(
    tests/collectives tests/gather tests/optimizer tests/plan/test_memory.py
    tests/step/test_bad_input.py tests/step/test_compiled.py tests/test_engine.py
)

runs() { # a version manager's shim may stand on the path and yet not run
    [ "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$other" ]
}

find_python() {
    local candidate
    for candidate in "python$other" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$other"*/bin/python; do
        if runs "$candidate"; then
            echo "$candidate"
            return
        fi
    done
}

python=$(find_python)
if [ -z "$python" ]; then
    echo "other_python: Python $other is not installed here: its leg of the tests did not run"
    exit 0
fi

if [ ! -e "$venv/.installed" ] || [ pyproject.toml -nt "$venv/.installed" ]; then
    "$python" -m venv "$venv"
    "$venv/bin/pip" install -q --upgrade pip
    "$venv/bin/pip" install -q -e '.[test]'
    touch "$venv/.installed"
fi

echo "other_python: Python $other, jax $("$venv/bin/python" -c 'import jax; print(jax.__version__)'): ${tests[*]}"
JAX_PLATFORMS=cpu "$venv/bin/python" -m pytest -q -n "${WORKERS:-2}" -m "not slow and not full" "${tests[@]}"
