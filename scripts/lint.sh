#!/usr/bin/env bash
set -euo pipefail
# lint.sh 'MODULES' checks formatting, go.mod and go.sum, the linters of .golangci.yaml, the imports, and what a user's modules are.
# Linters are built from the module cache, in the versions that tools/go.mod pins.

cd "$(dirname "$0")/.."
root=$PWD
modules=$1
go=${GO:-go}
tool() { "$go" tool -modfile="$root/tools/go.mod" "$@"; }

status=0
step() {
	echo "== $*"
	"$@" || status=1
}

formatted() {
	local unformatted
	unformatted=$(git ls-files -z '*.go' | xargs -0 "$go" tool -modfile="$root/tools/go.mod" gofumpt -l)
	[ -z "$unformatted" ] && return
	echo "not formatted (make fmt):"
	echo "$unformatted"
	return 1
}

step formatted
for module in $modules; do
	cd "$root/$module"
	echo "== module $module"
	step "$go" mod tidy -diff
	step "$go" vet ./...
	step tool golangci-lint run --config "$root/.golangci.yaml" ./...
done
cd "$root"
step "$go" test -count=1 -run 'Import|Modules' .
exit $status
