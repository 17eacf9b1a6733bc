#!/bin/sh
# summarise_checks.sh DIRECTORY NAME…: one line per check, and the closing line of each that ran tests.
directory=$1
shift
echo "=== summary"
for name in "$@"; do
    if [ -f "$directory/$name.status" ]; then
        echo "$name: $(cat "$directory/$name.status")"
    else
        echo "$name: NOT RUN, its environment could not be made"
    fi
done
for name in "$@"; do
    grep -h -E '^=+ .*(passed|failed|skipped|error).* in .*=+$' "$directory/$name.txt" 2>/dev/null | tail -n 1
done
exit 0
