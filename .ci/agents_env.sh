#!/usr/bin/env bash
# Makes the virtual environment that `pytest -m agents` runs in: the clients that agents are written with (half a minute).
#
#   VENV=.venv ATROPOS_AGENTS_VENV=.venv-agents bash .ci/agents_env.sh
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the packages cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

base="$(realpath "${VENV:-.venv}")"
venv="${ATROPOS_AGENTS_VENV:-.venv-agents}"
packages=("openai==3.54.0" "anthropic==2.12.0" "litellm==1.83.0" "mini-swe-agent==2.4.6" "smolagents==1.26.0"
    "openai-agents==0.24.0" "langchain-openai==1.7.3" "pydantic-ai-slim[openai]==2.68.0")
modules=(openai anthropic litellm minisweagent smolagents agents langchain_openai pydantic_ai)
stamp="$venv/.made-from"

say() { printf 'agents_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "real clients cannot be run on this machine"
    exit 1
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "${packages[*]} $base" ]]; then
    say "$venv is ready (${packages[*]})"
    exit 0
fi

[[ -x "$base/bin/python" ]] || fail "no virtual environment at $base"

say "making $venv: ${packages[*]}"
rm -rf "$venv"
"$base/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"
seconds_before=$SECONDS
# pip takes minutes to choose among their versions.
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "uv==0.13.9" || fail "pip could not install uv"
"$venv/bin/uv" pip install -q --system-certs --python "$venv/bin/python" "${packages[@]}" \
    || fail "uv could not install them"
printf 'import %s\n' "${modules[@]}" | "$venv/bin/python" - >"$venv/import.log" 2>&1 \
    || { tail -n 20 "$venv/import.log" >&2; fail "they cannot be imported"; }
printf '%s' "${packages[*]} $base" >"$stamp"
say "$venv is ready after $((SECONDS - seconds_before)) s, $(du -sh "$venv" | cut -f1)"
