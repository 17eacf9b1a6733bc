#!/bin/sh
# find_python.sh 3.11 3.12 …: prints the first interpreter of one of these versions that can make
# virtual environments: python3 itself if it is one of them, then by the order of the arguments.
wanted="$*"

usable() {
    "$1" - "$wanted" >/dev/null 2>&1 <<'PYTHON'
import ensurepip, sys, venv
sys.exit("%d.%d" % sys.version_info[:2] not in sys.argv[1].split())
PYTHON
}

if usable python3; then
    command -v python3
    exit 0
fi
for version in $wanted; do
    for candidate in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python; do
        if usable "$candidate"; then
            command -v "$candidate"
            exit 0
        fi
    done
done
echo "No Python of these versions can make virtual environments here: $wanted." >&2
echo "Install one (on Debian and Ubuntu with its venv package), or name it: make PYTHON=/path/to/python …" >&2
exit 1
