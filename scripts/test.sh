#!/usr/bin/env bash
set -euo pipefail
# test.sh 'MODULES' FLAGS... runs the tests of each module, and says at the end which were skipped for want of a version:
# go test does not show that of its own accord.

cd "$(dirname "$0")/.."
modules=$1
shift

skips=$(mktemp)
trap 'rm -f "$skips"' EXIT
export TESTENV_SKIPS=$skips

status=0
for module in $modules; do
	[ "$module" = . ] || echo "== module $module"
	# Benchmarks run once each, so that they are known to work. Their numbers are of no use here.
	bench=()
	[ "$module" = . ] || bench=(-bench=. -benchtime=1x)
	(cd "$module" && "${GO:-go}" test "${bench[@]}" "$@" ./...) || status=1
done

if [ -s "$skips" ]; then
	echo "== $(wc -l <"$skips") tests were SKIPPED because a version is missing here:"
	sed 's/^[^:]*: //' "$skips" | sort | uniq -c
fi
exit $status
