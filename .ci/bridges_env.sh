#!/usr/bin/env bash
# Makes the virtual environments that `pytest -m bridges` runs in, one per library, because their pins exclude each
# other (four minutes, 2.4 GB).
#
#   VENV=.venv ATROPOS_BRIDGES_VENVS=.venv-bridges bash .ci/bridges_env.sh            # all of them
#   VENV=.venv ATROPOS_BRIDGES_VENVS=.venv-bridges bash .ci/bridges_env.sh verifiers  # the named ones
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the packages cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

base="$(realpath "${VENV:-.venv}")"
venvs="${ATROPOS_BRIDGES_VENVS:-.venv-bridges}"
stamp_name=".made-from"

# name of the folder -> packages; name -> modules that must import
declare -A packages=(
    [verifiers]="verifiers==0.4.0 uv==0.13.9"
    [verifiers_old]="verifiers==0.1.9.post2"
    [verifiers_newest_old]="verifiers==0.1.14"
    [openenv]="openenv==0.10.0"
)
declare -A modules=(
    [verifiers]="verifiers.v1"
    [verifiers_old]="verifiers"
    [verifiers_newest_old]="verifiers"
    [openenv]="openenv.core"
)

say() { printf 'bridges_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "the bridges cannot be run on this machine"
    exit 1
}

make_one() {
    local name="$1" venv="$venvs/$1" wanted="${packages[$1]} $base"
    if [[ -f "$venv/$stamp_name" && "$(cat "$venv/$stamp_name")" == "$wanted" ]]; then
        say "$venv is ready (${packages[$name]})"
        return
    fi
    say "making $venv: ${packages[$name]}"
    rm -rf "$venv"
    "$base/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"
    local seconds_before=$SECONDS
    # shellcheck disable=SC2086  # several packages in one string
    bash .ci/install.sh "$venv" ${packages[$name]} \
        || fail "could not install ${packages[$name]}"
    # shellcheck disable=SC2086
    printf 'import %s\n' ${modules[$name]} | "$venv/bin/python" - >"$venv/import.log" 2>&1 \
        || { tail -n 20 "$venv/import.log" >&2; fail "${modules[$name]} cannot be imported"; }
    printf '%s' "$wanted" >"$venv/$stamp_name"
    say "$venv is ready after $((SECONDS - seconds_before)) s, $(du -sh "$venv" | cut -f1)"
}

[[ -x "$base/bin/python" ]] || fail "no virtual environment at $base"
names=("$@")
[[ $# -gt 0 ]] || names=("${!packages[@]}")
for name in "${names[@]}"; do
    [[ -n "${packages[$name]:-}" ]] || fail "unknown: $name (known: ${!packages[*]})"
    make_one "$name"
done
