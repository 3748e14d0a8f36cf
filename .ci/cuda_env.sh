#!/usr/bin/env bash
# Makes the virtual environment that `pytest -m cuda_wheel` runs in: torch's CUDA build (4.7 GB, about a minute) over the
# packages of the environment that has everything else. It needs no device.
#
#   VENV=.venv ATROPOS_CUDA_VENV=.venv-cuda bash .ci/cuda_env.sh
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the build cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

base="$(realpath "${VENV:-.venv}")"
venv="${ATROPOS_CUDA_VENV:-.venv-cuda}"
# Three equal signs: `==2.13.0` would also be met by 2.13.0+cpu.
package="torch===2.13.0"
stamp="$venv/.made-from"

say() { printf 'cuda_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "the dry run on pretended CUDA devices cannot run on this machine"
    exit 1
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "$package $base" ]]; then
    say "$venv is ready ($package)"
    exit 0
fi

[[ "$(uname -sm)" == "Linux x86_64" ]] || fail "no CUDA wheel for $(uname -sm) is tried here"
[[ -x "$base/bin/python" ]] || fail "no virtual environment at $base"

say "making $venv: $package"
rm -rf "$venv"
"$base/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"
seconds_before=$SECONDS
bash .ci/install.sh "$venv" "$package" || fail "could not install $package"
say "installed in $((SECONDS - seconds_before)) s"

# Everything but torch and what it brought comes from the other environment, whose folder is searched last.
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages "$base" >"$(packages "$venv")/everything_else.pth"

"$venv/bin/python" -c "
import torch, transformers, pytest
assert torch.version.cuda, f'not a CUDA build: {torch.__version__}'
" >"$venv/import.log" 2>&1 || { tail -n 20 "$venv/import.log" >&2; fail "torch does not import"; }

printf '%s' "$package $base" >"$stamp"
say "$venv is ready, $(du -sh "$venv" | cut -f1)"
