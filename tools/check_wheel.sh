#!/usr/bin/env bash
# check_wheel.sh ENVIRONMENT BACKEND WHEEL: installs the wheel beside one backend and tries it there.
set -euo pipefail
environment=$PWD/$1 backend=$2 wheel=$PWD/$3 checkout=$PWD

"$environment/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall "$wheel"
"$environment/bin/python" -m pip check --disable-pip-version-check
# -I leaves the current folder and PYTHONPATH out, so that only the installed package is found.
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
cd "$elsewhere"
KERAS_BACKEND=$backend TF_CPP_MIN_LOG_LEVEL=3 \
    "$environment/bin/python" -I "$checkout/tools/check_wheel.py" "$wheel" "$checkout" "$backend"
