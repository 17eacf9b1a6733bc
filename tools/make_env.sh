#!/usr/bin/env bash
# make_env.sh DIRECTORY PYTHON PIP-ARGUMENTS…: a virtual environment, made from nothing.
set -euo pipefail
directory=$1 python=$2
shift 2
[ -n "$python" ] # find_python.sh has said what is missing
errors=$(mktemp)
trap 'rm -f "$errors"' EXIT

echo "Making $directory with $("$python" --version): $*"
rm -rf "$directory"
"$python" -m venv "$directory"
quiet=${CI:+--quiet}
if ! "$directory/bin/python" -m pip install $quiet --disable-pip-version-check --no-input "$@" \
    2> >(tee "$errors" >&2); then
    sleep 1 # lets tee finish
    if grep -Eq '(distribution.*|Cannot install )torch==' "$errors"; then
        cat >&2 <<'MESSAGE'

pip does not find the CPU build of PyTorch that requirements/torch.txt pins. Two ways on:
  - let pip also look at PyTorch's own package index for the CPU, which "Get started" on pytorch.org
    names: set PIP_EXTRA_INDEX_URL (or, for a folder of wheels, PIP_FIND_LINKS) and run make again;
  - or take the default build, which on Linux brings CUDA and needs several gigabytes:
    make TORCH=torch==2.13.0 and the same target.
MESSAGE
    fi
    exit 1
fi
