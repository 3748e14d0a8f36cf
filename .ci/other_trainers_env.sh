#!/usr/bin/env bash
# Makes the virtual environment that `pytest -m other_trainers` runs in: TRL, the Tinker client, verl's agent loops and
# torchao, which takes two CPU seconds of every process that loads a model where it is installed, over the packages of
# the environment that has everything else (about a minute).
#
#   VENV=.venv ATROPOS_OTHER_TRAINERS_VENV=.venv-other-trainers bash .ci/other_trainers_env.sh
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the packages cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

base="$(realpath "${VENV:-.venv}")"
venv="${ATROPOS_OTHER_TRAINERS_VENV:-.venv-other-trainers}"
packages=("trl==1.16.0" "tinker==0.38.0" "torchao==0.18.0")
# Without what it depends on, which would be another version of transformers, and more than its agent loops import.
verl=("verl==0.9.1" "ray==2.60.0" "tensordict==0.10.0" "hydra-core==1.3.8" "omegaconf==2.4.0"
    "antlr4-python3-runtime==4.9.3" "codetiming==1.4.0" "msgpack==1.2.4" "pyvers==0.2.3" "cachetools==8.0.2")
stamp="$venv/.made-from"

say() { printf 'other_trainers_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "the adapters for other trainers cannot be run on this machine"
    exit 1
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "${packages[*]} ${verl[*]} $base" ]]; then
    say "$venv is ready (${packages[*]})"
    exit 0
fi

[[ -x "$base/bin/python" ]] || fail "no virtual environment at $base"

say "making $venv: ${packages[*]}"
rm -rf "$venv"
"$base/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"

# torch and all else comes from the other environment, whose folder is searched last.
packages_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages_of "$base" >"$(packages_of "$venv")/everything_else.pth"

# By pip, which counts what lies in the other folder as installed.
seconds_before=$SECONDS
"$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "${packages[@]}" || fail "could not install them"
bash .ci/install.sh "$venv" --no-deps "${verl[@]}" || fail "could not install verl"
say "installed in $((SECONDS - seconds_before)) s"

"$venv/bin/python" -c "import pytest, tinker, torch, verl.experimental.agent_loop; from trl.experimental.async_grpo import AsyncGRPOTrainer" \
    >"$venv/import.log" 2>&1 || { tail -n 20 "$venv/import.log" >&2; fail "they do not import"; }

printf '%s' "${packages[*]} ${verl[*]} $base" >"$stamp"
say "$venv is ready, $(du -sh "$venv" | cut -f1)"
