#!/usr/bin/env bash
# As `pip install` into a virtual environment, by uv: 6 CPU seconds where pip takes 70, most of which chooses versions
# and compiles modules that no test imports. Where there is no uv, or it fails, by pip, which then says why.
#
#   UV=.venv-uv/bin/uv bash .ci/install.sh .venv-bridges/openenv openenv==0.10.0
set -uo pipefail

venv="$1"
shift
# uv reads no settings of pip; folders of wheels and the file of versions are handed on.
if [[ -n "${UV-}" ]]; then
    UV_FIND_LINKS="${UV_FIND_LINKS-${PIP_FIND_LINKS-}}" UV_CONSTRAINT="${UV_CONSTRAINT-${PIP_CONSTRAINT-}}" \
        "$UV" pip install --quiet --system-certs --python "$venv/bin/python" "$@" && exit 0
    echo "install: uv could not, now pip: $*" >&2
fi
exec "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-compile "$@"
