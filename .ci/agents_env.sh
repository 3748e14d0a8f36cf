#!/usr/bin/env bash
# Makes what `pytest -m agents` runs: a virtual environment with the clients that agents are written with (half a
# minute), and beside it, in `$ATROPOS_AGENTS_VENV-node`, agents for the command line (1.2 GB). Without npm, those are left out.
#
#   VENV=.venv ATROPOS_AGENTS_VENV=.venv-agents bash .ci/agents_env.sh
#
# Running it again is free: a finished folder carries a stamp with what it was made from. Exits non-zero, saying why,
# where the packages cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

base="$(realpath "${VENV:-.venv}")"
venv="${ATROPOS_AGENTS_VENV:-.venv-agents}"
node="$venv-node"
packages=("openai==3.54.0" "anthropic==2.12.0" "litellm==1.83.0" "mini-swe-agent==2.4.6" "smolagents==1.26.0"
    "openai-agents==0.24.0" "langchain-openai==1.7.3" "pydantic-ai-slim[openai]==2.68.0" "dspy==3.4.1")
modules=(openai anthropic litellm minisweagent smolagents agents langchain_openai pydantic_ai dspy)
programs=("@openai/codex@0.169.0" "@anthropic-ai/claude-code@2.1.331" "opencode-ai@1.18.33")

say() { printf 'agents_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "real clients cannot be run on this machine"
    exit 1
}

# is_made FOLDER WHAT: whether the folder was made from this.
is_made() {
    [[ -f "$1/.made-from" && "$(cat "$1/.made-from")" == "$2" ]] && say "$1 is ready ($2)"
}

# made FOLDER WHAT: note what the folder was made from.
made() {
    printf '%s' "$2" >"$1/.made-from"
    say "$1 is ready after $SECONDS s, $(du -sh "$1" | cut -f1)"
}

make_venv() {
    [[ -x "$base/bin/python" ]] || fail "no virtual environment at $base"
    say "making $venv: ${packages[*]}"
    rm -rf "$venv"
    "$base/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"
    # pip takes minutes to choose among their versions.
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check "uv==0.13.9" || fail "pip could not install uv"
    "$venv/bin/uv" pip install -q --system-certs --python "$venv/bin/python" "${packages[@]}" \
        || fail "uv could not install them"
    printf 'import %s\n' "${modules[@]}" | "$venv/bin/python" - >"$venv/import.log" 2>&1 \
        || { tail -n 20 "$venv/import.log" >&2; fail "they cannot be imported"; }
}

make_node() {
    say "making $node: ${programs[*]}"
    rm -rf "$node"
    mkdir -p "$node"
    # Which scripts of packages npm runs depends on its version; these two put the programs in place.
    npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$node" "${programs[@]}" \
        && node "$node/node_modules/@anthropic-ai/claude-code/install.cjs" \
        && node "$node/node_modules/opencode-ai/postinstall.mjs" \
        || fail "npm could not install them"
}

if ! is_made "$venv" "${packages[*]} $base"; then
    make_venv
    made "$venv" "${packages[*]} $base"
fi
if ! command -v npm >/dev/null; then
    say "no npm on this machine: agents for the command line (${programs[*]}) are left out"
elif ! is_made "$node" "${programs[*]}"; then
    make_node
    made "$node" "${programs[*]}"
fi
