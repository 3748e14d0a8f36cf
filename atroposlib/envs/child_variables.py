"""The environment variables of processes that meet a model's text: reward workers, sandboxes, agents.

An allow-list, because a secret may have any name (DATABASE_URL, SENTRY_DSN, a webhook): such a process gets what it
needs to start, and what the author names. Used by `rewards`, `sandbox`, `agent_env` and `bridge`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_PASSED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|TERM|LANG|LANGUAGE|LC_\w+|TZ|TMPDIR|TEMP|TMP|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH"
    r"|(HTTPS?|ALL|NO)_PROXY|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|XDG_\w+_(HOME|DIR)|PYTHON(PATH|HASHSEED|UTF8|WARNINGS)"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR)_NUM_THREADS|OPENBLAS_CORETYPE|HF_HOME|HF_(HUB|DATASETS)_(OFFLINE|CACHE)|NLTK_DATA"
    r"|CUDA_VISIBLE_DEVICES|ATROPOS_REQUIRE_ISOLATION",
    re.IGNORECASE,
)
_PASSWORD_IN_URL = re.compile(r"(?<=://)[^/@\s]*@")


def child_variables(named: Iterable[str] = ()) -> dict[str, str]:
    """Return this process's variables that are on the list or `named`; proxies lose user and password.

    A `named` variable that is not set is left out.
    """
    also = set(named)
    kept = {
        name: _PASSWORD_IN_URL.sub("", value) if name.upper().endswith("_PROXY") else value
        for name, value in os.environ.items()
        if _PASSED.fullmatch(name)
    }
    return {**kept, **{name: os.environ[name] for name in also if name in os.environ}}


def reaching_loopback(variables: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables with which HTTP_PROXY is not used for this machine."""
    local = ",".join(filter(None, [variables.get("NO_PROXY"), "127.0.0.1,localhost"]))
    return {**variables, "NO_PROXY": local, "no_proxy": local}
