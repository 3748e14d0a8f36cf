"""Which servers an environment uses: its defaults, overridden by YAML, then by flags.

Called by the environment command line; `resolve_openai_configs` is the original's name for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from atroposlib.config import build
from atroposlib.errors import ConfigError
from atroposlib.inference.config import APIServerConfig, ServerBaseline

ServerConfigs = ServerBaseline | APIServerConfig | list[APIServerConfig]

NAMESPACE = "openai"


def resolve_servers(
    default: ServerConfigs,
    from_yaml: Any,
    typed: Mapping[str, Any],
    *,
    namespace: str = NAMESPACE,
) -> ServerConfigs:
    """Merge YAML and flags into the environment's servers.

    One server (bare or in a list) is overridden field by field; a `ServerBaseline` with overrides becomes one server.
    A YAML list replaces all servers. Flags are refused for several servers, because they name no server.
    """
    entries = from_yaml if isinstance(from_yaml, list) else [from_yaml] if from_yaml else []
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError(f"{namespace}: the YAML section must be a mapping or a list of mappings")
    several = len(entries) > 1 or (not entries and isinstance(default, list) and len(default) > 1)
    if several and typed:
        names = ", ".join(f"--{namespace}.{name}" for name in typed)
        raise ConfigError(f"{names}: there are several servers; describe them as a list in YAML")
    if len(entries) > 1:
        return [_server(namespace, entry) for entry in entries]
    if several or not (entries or typed):
        return default
    base = default[0] if isinstance(default, list) and default else default
    own = {} if isinstance(base, list) else base.model_dump()
    server = _server(namespace, own, *entries, typed)
    return [server] if isinstance(default, list) else server


def _server(namespace: str, *layers: Mapping[str, Any]) -> APIServerConfig:
    return build(APIServerConfig, *layers, namespace=namespace + ".")


def resolve_openai_configs(
    default_server_configs: ServerConfigs,
    openai_config_dict: Mapping[str, Any] | None,
    yaml_config: Mapping[str, Any] | None,
    cli_passed_flags: Mapping[str, Any] | None,
    logger: logging.Logger | None = None,
) -> ServerConfigs:
    """Return the servers for the whole YAML document and the flags by full name (`openai.base_url`).

    `openai_config_dict` holds the merged values of one server; YAML and flags override them. They apply only if YAML
    or flags are given and the result is one server. `logger` is unused; the original takes it.
    """
    prefix = f"{NAMESPACE}."
    typed = {
        name.removeprefix(prefix): value
        for name, value in (cli_passed_flags or {}).items()
        if name.startswith(prefix)
    }
    from_yaml = (yaml_config or {}).get(NAMESPACE)
    servers = resolve_servers(default_server_configs, from_yaml, typed)
    is_one_in_list = isinstance(servers, list) and len(servers) == 1
    if not (openai_config_dict and (from_yaml or typed)) or not (
        is_one_in_list or isinstance(servers, APIServerConfig)
    ):
        return servers
    entries = from_yaml if isinstance(from_yaml, list) else [from_yaml] if from_yaml else []
    server = _server(NAMESPACE, openai_config_dict, *entries, typed)
    return [server] if is_one_in_list else server
