#!/usr/bin/env bash
# Installs the Debian packages that tests use and this machine lacks. A package that cannot be installed fails nothing:
# a line starting with !! names the tests that will be skipped.
#
#   bash .ci/debian_packages.sh
set -uo pipefail

# package, a program of it, the tests that need it
packages=(
    "bubblewrap|bwrap|tests/envs/test_sandbox.py[bubblewrap], tests/environments/: terminal, swe, harbor"
    "postgresql|postgres|tests of the hub's PostgreSQL store"
    "prometheus|promtool|tests/contract/test_deploy.py: the parts of the compose file as processes"
    "nginx|nginx|tests/contract/test_operating.py: a hub behind nginx"
    "slurm-wlm|slurmctld|tests of jobs on SLURM"
    "munge|munged|tests of jobs on SLURM"
    "chromium|chromium|tests of the viewer in a browser"
    "chromium-driver|chromedriver|tests of the viewer in a browser"
)

say() { printf 'debian_packages: %s\n' "$*" >&2; }

# Debian keeps PostgreSQL's server outside PATH.
has() { PATH="$PATH:/usr/sbin:/sbin:$(printf '%s:' /usr/lib/postgresql/*/bin)" command -v "$1" >/dev/null; }

missing=()
for row in "${packages[@]}"; do
    IFS='|' read -r package program _ <<<"$row"
    has "$program" || missing+=("$package")
done

if ((${#missing[@]})); then
    if ! command -v apt-get >/dev/null; then
        say "cannot install ${missing[*]}: there is no apt-get"
    elif ((EUID != 0)); then
        say "cannot install ${missing[*]}: only root can (sudo bash .ci/debian_packages.sh)"
    else
        say "installing ${missing[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq >&2
        for package in "${missing[@]}"; do # one by one: one that is unavailable keeps none of the others out
            apt-get install -qq --yes --no-install-recommends "$package" >/dev/null || say "apt-get could not install $package"
        done
    fi
fi

for row in "${packages[@]}"; do
    IFS='|' read -r package program tests <<<"$row"
    has "$program" || printf '!! %s is missing; these DO NOT RUN: %s\n' "$package" "$tests" >&2
done
if has bwrap && ! bwrap --ro-bind / / --unshare-all --proc /proc true 2>/dev/null; then
    printf '!! bubblewrap may not create namespaces here; its tests FAIL where CI is set, and are skipped elsewhere\n' >&2
fi
