"""The settings of `run-api`: its flags, and what they say about tokens, TLS and limits. `run_api.py` serves."""

from __future__ import annotations

import json
import os
import secrets
import ssl
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, model_validator

from atroposlib.api.http.security import Scope, Token, TokenSet, digest_of, parse_tokens, read_text
from atroposlib.api.run.hub import DEFAULT_RUN
from atroposlib.api.run.types import Quota, RunPolicy
from atroposlib.api.stores.kinds import STORES
from atroposlib.errors import ConfigError
from atroposlib.http_guard import is_loopback
from atroposlib.utils.files import replace_file

TOKEN_VARIABLE = "ATROPOS_HUB_TOKEN"
MIN_SECRET_CHARS = 8
QUEUED_BYTES_IN_MEMORY = 4 * 2**30
QUEUED_BYTES_ON_DISK = 64 * 2**30
_POLICY = RunPolicy()


class RunApiConfig(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port; 0 chooses a free one."""
    data_dir: Path = Path("atropos-data")
    """Where runs are stored, one directory each."""
    store: Annotated[str, AfterValidator(STORES.checked)] = "disk"
    """Where runs are kept: disk, memory, or a store that an installed package registers."""
    memory: bool = False
    """Keep runs in memory: they end with the process. The same as --store memory."""
    database: str | None = None
    """Keep runs in this PostgreSQL, in place of a directory: postgresql://USER@HOST/NAME. The password: PGPASSWORD,
    PGPASSFILE, or the whole URL in ATROPOS_DATABASE."""
    advertise: str | None = None
    """With --database: URL at which the other hubs of the database reach this one. None: --host, or this machine's
    name, and --port."""
    fresh: bool = False
    """Erase every stored run at startup."""
    durability: Literal["power", "process"] = "power"
    """Whether accepted groups survive loss of power, or only the end of the process."""
    min_free_bytes: int | None = Field(default=None, ge=0)
    """Refuse groups if less than this would remain free on the disk, also that of a database on this machine.
    None: 2 % of the disk, at least 1 GiB."""
    max_memory_bytes: int | None = Field(default=None, ge=1)
    """With --memory: refuse groups if all runs would take more. None: half of the machine's memory."""
    max_database_bytes: int | None = Field(default=None, ge=1)
    """With --database: refuse groups if it would be larger. None: no bound, except on this machine."""
    token: SecretStr | None = None
    """One token with all rights; prefer ATROPOS_HUB_TOKEN, which process lists do not show."""
    tokens: Path | None = None
    """File of tokens with scopes and runs; see --add-token."""
    insecure: bool = False
    """Allow other machines to reach a hub without a token."""
    ssl_certfile: Path | None = None
    """Serve HTTPS with this certificate."""
    ssl_keyfile: Path | None = None
    """Private key, unless it is in the certificate file."""
    ssl_ca_certs: Path | None = None
    """Accept only clients with a certificate of these authorities."""
    lease_ttl_s: float = Field(default=_POLICY.lease_ttl_s, gt=0, allow_inf_nan=False)
    """A batch returns to the queue if its trainer sends nothing for this time."""
    env_timeout_s: float = Field(default=_POLICY.env_timeout_s, gt=0, allow_inf_nan=False)
    """An environment that sends nothing for this time counts as disconnected."""
    max_staleness: int | None = Field(default=_POLICY.max_staleness, ge=0)
    """Groups that are more policy versions old than this expire."""
    max_queued_bytes: int | None = Field(default=None, ge=1)
    """Per run; above it environments are slowed down. None: 64 GiB, 4 GiB with --memory."""
    max_queued_sequences: int | None = Field(default=_POLICY.max_queued_sequences, ge=1)
    """The same limit in sequences."""
    max_queued_groups: int | None = Field(default=_POLICY.max_queued_groups, ge=1)
    """The same limit in groups."""
    max_deliveries: int = Field(default=_POLICY.max_deliveries, ge=1)
    """A group delivered this often without an acknowledgement is set aside."""
    max_runs: int = Field(default=_POLICY.max_runs, ge=1)
    """Runs that may be open at once; the next one is refused."""
    idle_run_s: float = Field(default=_POLICY.idle_run_s, gt=0, allow_inf_nan=False)
    """A run without leases is closed after this time without a request; the next one opens it again."""
    keep_set_aside: int | None = Field(default=_POLICY.keep_set_aside, ge=0)
    """Earlier experiments kept per run; older ones are deleted. None: all."""
    keep_set_aside_days: float | None = Field(default=_POLICY.keep_set_aside_days, gt=0)
    """Delete an earlier experiment this long after it was set aside. None: never."""
    max_token_runs: int | None = Field(default=None, ge=0)
    """Open runs begun by one token that has no max_runs in the --tokens file. None: half of --max-runs."""
    max_token_bytes: int | None = Field(default=None, ge=0)
    """Refuse groups to runs begun by one token if they would hold more; max_bytes in the --tokens file. Beyond queued
    groups a run keeps up to 2 GiB. None: no bound."""
    keep_acked_batches: int = Field(default=_POLICY.keep_trained_batches, ge=0)
    """Acknowledged batches kept without a checkpoint, for a trainer that rolls back."""
    list_runs: bool = Field(default=False, alias="list")
    """Also --list: show the stored runs, including those set aside."""
    forget: str | None = None
    """Delete this stored run and exit."""
    backup: Path | None = None
    """Copy the stored run --run to this file and exit; a hub may serve the run meanwhile."""
    run: str = DEFAULT_RUN
    """With --backup: the run."""
    reload: bool = False
    """Accepted for compatibility; does nothing."""
    add_token: str | None = None
    """Create a token of this name, add its hash to the --tokens file, print it, exit."""
    scopes: list[Scope] = Field(default_factory=list)
    """With --add-token: the token's scopes."""
    runs: list[str] | None = None
    """With --add-token: the token's runs; default: all."""

    @model_validator(mode="after")
    def _take_memory(self) -> Self:
        if self.memory:
            if self.store not in ("disk", "memory"):
                raise ValueError(f"--memory and --store {self.store}: drop one")
            self.store = "memory"
        return self


def policy_of(config: RunApiConfig) -> RunPolicy:
    default_bytes = QUEUED_BYTES_IN_MEMORY if config.store == "memory" else QUEUED_BYTES_ON_DISK
    return RunPolicy(
        lease_ttl_s=config.lease_ttl_s,
        env_timeout_s=config.env_timeout_s,
        max_staleness=config.max_staleness,
        max_deliveries=config.max_deliveries,
        keep_trained_batches=config.keep_acked_batches,
        max_queued_bytes=config.max_queued_bytes or default_bytes,
        max_queued_sequences=config.max_queued_sequences,
        max_queued_groups=config.max_queued_groups,
        max_runs=config.max_runs,
        idle_run_s=config.idle_run_s,
        keep_set_aside=config.keep_set_aside,
        keep_set_aside_days=config.keep_set_aside_days,
    )


def tokens_of(config: RunApiConfig) -> TokenSet | None:
    if config.token is not None and config.tokens is not None:
        raise ConfigError("--token and --tokens: give one of them")
    if config.tokens is not None:
        tokens = TokenSet.load(config.tokens)
        max_runs = config.max_token_runs
        tokens.default_quota = Quota(
            max_runs=max(1, config.max_runs // 2) if max_runs is None else max_runs,
            max_bytes=config.max_token_bytes,
        )
        return tokens
    if config.max_token_runs is not None or config.max_token_bytes is not None:
        raise ConfigError("--max-token-runs and --max-token-bytes need --tokens")
    secret = os.environ.get(TOKEN_VARIABLE) or None
    if config.token is not None:
        secret = config.token.get_secret_value()
    return None if secret is None else token_set_of(secret)


def token_set_of(secret: str) -> TokenSet:
    """Return a set of one token that may do everything. Raises ConfigError for a short secret."""
    if len(secret) < MIN_SECRET_CHARS or not secret.isascii() or not secret.isprintable():
        raise ConfigError(
            f"a token needs at least {MIN_SECRET_CHARS} printable ASCII characters, for example"
            " from: openssl rand -hex 32"
        )
    everything = frozenset([Scope.ADMIN])
    return TokenSet([Token(name="token", sha256=digest_of(secret.encode()), scopes=everything)])


def add_token(
    path: Path, *, name: str, scopes: Collection[Scope], runs: Collection[str] | None
) -> str:
    """Make a random secret, add its hash to the token file, and return the secret.

    The file is created if absent, replaced atomically, and readable by its owner only. Raises ConfigError for a name
    already taken, an empty list, or a run that cannot exist.
    """
    secret = f"atropos-{secrets.token_urlsafe(32)}"
    text = read_text(path) if path.exists() else ""
    num_earlier = len(parse_tokens(text, path))
    row: dict[str, Any] = {"name": name, "sha256": digest_of(secret.encode())}
    row["scopes"] = sorted(scopes)
    if runs is not None:
        row["runs"] = sorted(runs)
    is_json = text.lstrip().startswith("[") or (num_earlier == 0 and path.suffix == ".json")
    if is_json:  # a JSON list cannot be extended by a line
        text = json.dumps([*(yaml.safe_load(text) or []), row], indent=1) + "\n"
    else:
        text += "" if text.endswith("\n") or not text else "\n"
        text += f"- {json.dumps(row)}\n"
    if len(parse_tokens(text, path)) != num_earlier + 1:
        raise ConfigError(
            f"the token file {str(path)!r} is not a plain list; add the token by hand"
        )
    try:
        replace_file(path, text, is_durable=True, mode=0o600)
    except OSError as e:
        raise ConfigError(f"cannot write the token file {str(path)!r}: {e.strerror}") from e
    return secret


def check_exposure(config: RunApiConfig, tokens: TokenSet | None) -> str | None:
    """Raise ConfigError if other machines can reach the hub without a token; return a warning if one is due."""
    if is_loopback(config.host):
        return None
    if tokens is None and not config.insecure:
        raise ConfigError(
            f"--host {config.host} is reachable from other machines and the hub has no token: give"
            f" it one (--token, --tokens FILE, or {TOKEN_VARIABLE}), or listen on 127.0.0.1;"
            " --insecure starts it anyway"
        )
    if tokens is None:
        return f"--insecure: anyone who reaches {config.host} can read and add data"
    if config.ssl_certfile is None:
        return "tokens and data are sent unencrypted; use --ssl-certfile or a proxy with TLS"
    return None


def check_tls(config: RunApiConfig) -> None:
    """Raise ConfigError, naming the flag, for certificates that cannot be loaded."""
    if config.ssl_certfile is None:
        if config.ssl_keyfile is not None or config.ssl_ca_certs is not None:
            raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except OSError as e:  # ssl.SSLError is one
        raise ConfigError(
            f"--ssl-certfile {config.ssl_certfile}: cannot be loaded with its key ({e})"
        ) from e
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except OSError as e:
            raise ConfigError(f"--ssl-ca-certs {config.ssl_ca_certs}: {e}") from e


class _Element(NamedTuple):
    tag: int
    content: bytes


def _elements(der: bytes) -> list[_Element]:
    """Return the elements that follow each other in DER (X.690, 8.1)."""
    found = []
    while der:
        length, start = der[1], 2
        if length & 0x80:
            start += length & 0x7F
            length = int.from_bytes(der[2:start], "big")
        found.append(_Element(der[0], der[start : start + length]))
        der = der[start + length :]
    return found


def certificate_end(path: Path) -> float:
    """Return when the first certificate of a PEM file ends (RFC 5280, 4.1), in seconds since 1970.

    Raises OSError, and ValueError for a file that holds none.
    """
    head, tail = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
    text = path.read_text()
    der = ssl.PEM_cert_to_DER_cert(text[text.index(head) : text.index(tail) + len(tail)])
    [certificate] = _elements(der)
    fields = _elements(_elements(certificate.content)[0].content)
    has_version = fields[0].tag == 0xA0  # it is left out of version 1
    not_after = _elements(fields[3 + has_version].content)[1]
    century = "20" if not_after.tag == 0x17 else ""  # UTCTime has two digits of the year
    ends = datetime.strptime(f"{century}{not_after.content.decode()}", "%Y%m%d%H%M%SZ")
    return ends.replace(tzinfo=UTC).timestamp()


def replica_tls(config: RunApiConfig) -> ssl.SSLContext | None:
    """Return how this hub calls the others: it trusts their certificates if they use the same files."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context()
    context.load_verify_locations(config.ssl_ca_certs or config.ssl_certfile)
    context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    return context
