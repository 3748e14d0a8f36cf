"""Tokens, scopes, the run in the path, and what is allowed without tokens."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import stat
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route as StarletteRoute
from starlette.types import Receive, Send
from starlette.types import Scope as AsgiScope

from atroposlib.api.http.handlers import ROUTES
from atroposlib.api.http.metrics import HubMetrics, Observe
from atroposlib.api.http.routes import Route, split_run
from atroposlib.api.http.security import Access, Scope, Token, TokenSet
from atroposlib.api.run.types import Quota
from atroposlib.api.server import create_app
from atroposlib.cli.hub_settings import add_token, token_set_of
from atroposlib.errors import ConfigError
from tests.api.helpers_api import (
    Answers,
    Hub,
    group,
    registration,
    running_hub,
    unexpected_receive,
)

EVERY_SCOPE = list(Scope)


def secret_of(name: str) -> str:
    return f"secret-of-{name}"


def token(name: str, *scopes: Scope, runs: list[str] | None = None) -> Token:
    digest = hashlib.sha256(secret_of(name).encode()).hexdigest()
    held = None if runs is None else frozenset(runs)
    return Token(name=name, sha256=digest, scopes=frozenset(scopes), runs=held)


ONE_PER_SCOPE = TokenSet(token(scope.value, scope) for scope in EVERY_SCOPE)


class Inside:
    """The application behind `Access`: notes what reaches it, and reads no body."""

    def __init__(self) -> None:
        self.scope: AsgiScope | None = None

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        self.scope = scope
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


async def call(
    method: str,
    path: str,
    *,
    tokens: TokenSet | None = None,
    secret: str | None = None,
    peer: str = "127.0.0.1",
    headers: dict[str, str] | None = None,
    inside: Inside | None = None,
    base_url: str = "http://hub",
) -> httpx.Response:
    transport = httpx.ASGITransport(Access(inside or Inside(), ROUTES, tokens), client=(peer, 1))
    sent = dict(headers or {})
    if secret is not None:
        sent["Authorization"] = f"Bearer {secret}"
    async with httpx.AsyncClient(transport=transport, base_url=base_url) as http:
        return await http.request(method, path, headers=sent)


def filled(route: Route) -> str:
    return route.template.replace("{batch_id}", "7").replace("{run}", "math")


@pytest.mark.parametrize(
    "route", list(ROUTES), ids=lambda route: f"{route.method} {route.template}"
)
async def test_each_route_lets_in_exactly_its_scopes_and_admin(route: Route) -> None:
    path = filled(route)
    for scope in EVERY_SCOPE:
        response = await call(
            route.method, path, tokens=ONE_PER_SCOPE, secret=secret_of(scope.value)
        )
        is_let_in = not route.scopes or scope in route.scopes or scope is Scope.ADMIN
        assert response.status_code == (204 if is_let_in else 403), scope
    without = await call(route.method, path, tokens=ONE_PER_SCOPE)
    wrong = await call(route.method, path, tokens=ONE_PER_SCOPE, secret="unknown-secret")
    assert without.status_code == wrong.status_code == (401 if route.scopes else 204)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/nowhere"),
        ("POST", "/batch"),
        ("HEAD", "/ledger"),
        ("OPTIONS", "/scored_data"),
        ("GET", "/status/"),
        ("GET", "http://hub//status"),
        ("GET", "/STATUS"),
        ("GET", "/runs/a%2Fstatus/x"),
        ("POST", "/batches//ack"),
        ("POST", "/batches/1/2/ack"),
        ("POST", "/batches/1/ack%0A"),
        ("GET", "/runs/a"),
    ],
)
async def test_what_the_table_does_not_name_needs_admin(method: str, path: str) -> None:
    every_other = TokenSet([token("all", Scope.PRODUCE, Scope.CONSUME, Scope.READ)])
    assert (await call(method, path, tokens=every_other)).status_code == 401
    refused = await call(method, path, tokens=every_other, secret=secret_of("all"))
    assert refused.status_code == 403
    # With the right to it, it gets no further: what the table does not find, the application could. One slash too many
    # is redirected by the application.
    for rights in ({}, {"tokens": ONE_PER_SCOPE, "secret": secret_of("admin")}):
        answer = await call(method, path, **rights)
        assert answer.status_code in ((204,) if path == "/status/" else (404, 405))


async def test_refusals_are_json_and_say_what_is_wanted() -> None:
    tokens = TokenSet([token("eve", Scope.READ, runs=["math"])])
    missing = await call("GET", "/ledger", tokens=tokens)
    assert missing.headers["www-authenticate"] == "Bearer"
    assert missing.json() == {"detail": "this hub requires a token: Authorization: Bearer TOKEN"}
    lacking = await call("GET", "/runs/math/batch", tokens=tokens, secret=secret_of("eve"))
    assert lacking.json() == {"detail": "token 'eve' lacks the scope consume"}
    elsewhere = await call("GET", "/ledger", tokens=tokens, secret=secret_of("eve"))
    assert (elsewhere.status_code, elsewhere.json()) == (
        403,
        {"detail": "token 'eve' is not for the run 'default'"},
    )


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        *[(each, 401) for each in ("", "Bearer", "Bearer ", "secret-of-read")],
        *[(each, 401) for each in ("Basic secret-of-read", "Bearer secret-of-rea")],
        *[(each, 401) for each in ("Bearer secret-of-read x", "Bearer Bearer secret-of-read")],
        ("bEARER   secret-of-read ", 204),  # the scheme is read in any case
    ],
)
async def test_malformed_authorization_is_401(authorization: str, status: int) -> None:
    headers = {"Authorization": authorization}
    response = await call("GET", "/ledger", tokens=ONE_PER_SCOPE, headers=headers)
    assert response.status_code == status


async def test_two_authorization_headers_are_401() -> None:
    transport = httpx.ASGITransport(Access(Inside(), ROUTES, ONE_PER_SCOPE))
    headers = [("Authorization", f"Bearer {secret_of(name)}") for name in ("read", "admin")]
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as http:
        assert (await http.get("/ledger", headers=headers)).status_code == 401


async def test_refusal_comes_before_the_body_is_read() -> None:
    sent = Answers()
    scope = {"type": "http", "method": "POST", "path": "/scored_data", "headers": []}
    await Access(Inside(), ROUTES, ONE_PER_SCOPE)(scope, unexpected_receive, sent.send)
    assert sent[0]["status"] == 401


async def test_websockets_are_closed() -> None:
    sent, inside = Answers(), Inside()
    scope = {"type": "websocket", "path": "/status", "headers": []}
    await Access(inside, ROUTES, None)(scope, unexpected_receive, sent.send)
    assert sent == [{"type": "websocket.close", "code": 1008}]
    assert inside.scope is None


# Runs


@pytest.mark.parametrize(
    ("path", "run", "rest"),
    [
        ("/batch", "default", "/batch"),
        ("/runs/math/batch", "math", "/batch"),
        ("/runs/math", "math", "/runs/math"),
        ("/runs/math/", "math", "/"),
        ("/runs/M-2_x.7/batches/3/ack", "M-2_x.7", "/batches/3/ack"),
        ("/runsx/batch", "default", "/runsx/batch"),
        ("/runs/" + "a" * 64 + "/info", "a" * 64, "/info"),
    ],
)
def test_run_is_taken_off_the_path(path: str, run: str | None, rest: str) -> None:
    assert split_run(path) == (run, rest)


@pytest.mark.parametrize(
    "path",
    ["/runs/" + "a" * 65 + "/info", "/runs/../info", "/runs/.hidden/info", "/runs//info"]
    + ["/runs/a b/info", "/runs/a\n/info", "/runs/\u00e4/info"]
    + ["/runs/a/runs/b", "/runs/a/runs/b/status", "/runs/a/runs/a", "/runs/a/runs/"],
)
def test_path_of_no_run_or_of_two_belongs_to_none(path: str) -> None:
    assert split_run(path) == (None, path)


async def test_application_sees_the_run_and_the_plain_path() -> None:
    inside = Inside()
    await call("GET", "/runs/math/batch?wait=1", inside=inside)
    assert inside.scope is not None
    seen = {key: inside.scope[key] for key in ("run", "path", "raw_path", "query_string")}
    assert seen == {
        "run": "math",
        "path": "/batch",
        "raw_path": b"/batch",
        "query_string": b"wait=1",
    }


@pytest.mark.parametrize("name", ["..%2F..%2Fetc", "ballast", "ballast.probe", "a%0A"])
async def test_impossible_run_is_404(name: str) -> None:
    response = await call("GET", f"/runs/{name}/status")
    assert (response.status_code, response.json()) == (404, {"detail": "not the name of a run"})


async def test_token_for_some_runs_opens_no_other() -> None:
    tokens = TokenSet([token("math", Scope.ADMIN, runs=["math", "code"])])
    opened = [
        (await call(method, path, tokens=tokens, secret=secret_of("math"))).status_code
        for method, path in [
            ("GET", "/runs/math/batch"),
            ("DELETE", "/runs/code"),
            ("GET", "/runs/other/batch"),
            ("DELETE", "/runs/other"),
            ("GET", "/batch"),
            ("GET", "/runs/default/batch"),
        ]
    ]
    assert opened == [204, 204, 403, 403, 403, 403]


async def test_a_token_begins_as_many_runs_and_holds_as_many_bytes_as_its_quota() -> None:
    small = msgspec.structs.replace(token("small", *EVERY_SCOPE), max_bytes=1000)
    tokens = TokenSet([small, token("other", *EVERY_SCOPE)])
    tokens.default_quota = Quota(max_runs=2)
    hub_tokens = {
        name: {"Authorization": f"Bearer {secret_of(name)}"} for name in ("small", "other")
    }

    async def post(hub: Hub, path: str, body: Any, *, by: str) -> httpx.Response:
        native = {"Atropos-Client": "test"}
        return await hub.http.post(path, json=body, headers=hub_tokens[by] | native)

    async with running_hub(tokens=tokens) as hub:
        for name in ("a", "b"):
            reply = await post(hub, f"/runs/{name}/register", registration(), by="small")
            assert reply.is_success
        refused = await post(hub, "/runs/c/register", registration(), by="small")
        assert (refused.status_code, refused.json()["detail"]["type"]) == (403, "too_many_runs")
        assert "--max-token-runs (now 2)" in refused.json()["detail"]["msg"]
        assert (await post(hub, "/runs/c/register", registration(), by="other")).is_success
        answers = [
            await post(hub, f"/runs/{name}/scored_data", group(4), by="other") for name in "abc" * 5
        ]
        assert {answer.status_code for answer in answers[2::3]} == {200}
        assert {answer.status_code for answer in answers[-3:-1]} == {507}
        explained = await hub.http.get("/runs/b/explain", headers=hub_tokens["other"])
        for text in (answers[-2].json()["detail"]["msg"], explained.json()["refusal"]):
            assert "token 'small' uses 1 of 1 MiB" in text
            assert "change max_bytes in the token file or --max-token-bytes (now 1000)" in text
        assert (await hub.http.get("/runs/a/batch", headers=hub_tokens["small"])).json()["batch"]
        tokens.default_quota = Quota()
        assert (await post(hub, "/runs/d/register", registration(), by="small")).is_success


async def test_metrics_show_the_runs_of_the_token() -> None:
    tokens = TokenSet(
        [
            token("admin", Scope.ADMIN),
            token("all", Scope.READ),
            token("trainer", Scope.CONSUME, runs=["math"]),
            token("math", Scope.READ, runs=["math", "absent"]),
        ]
    )
    async with running_hub(tokens=tokens) as hub:
        for run in ("math", "code"):
            await hub.http.post(
                f"/runs/{run}/register",
                json=registration(),
                headers={"Authorization": f"Bearer {secret_of('admin')}"},
            )
        seen: dict[tuple[str, str], set[str | None]] = {}
        for name, path in [
            ("all", "/metrics"),
            ("math", "/metrics"),
            ("math", "/runs/math/metrics"),
        ]:
            bearer = {"Authorization": f"Bearer {secret_of(name)}"}
            text = (await hub.http.get(path, headers=bearer)).text
            families = list(text_string_to_metric_families(text))
            runs = {sample.labels.get("run") for each in families for sample in each.samples}
            seen[name, path] = runs
            assert any(each.name == "atropos_queued_sequences" for each in families)
        assert seen == {
            ("all", "/metrics"): {None, "default", "math", "code"},
            ("math", "/metrics"): {"math"},
            ("math", "/runs/math/metrics"): {"math"},
        }
        for name, path in (("trainer", "/metrics"), ("math", "/runs/code/metrics")):
            bearer = {"Authorization": f"Bearer {secret_of(name)}"}
            assert (await hub.http.get(path, headers=bearer)).status_code == 403


# Without tokens


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/reset_data"), ("POST", "/dead/requeue"), ("DELETE", "/runs/math")],
)
async def test_without_tokens_only_this_machine_may_destroy(
    method: str, path: str, peer: str
) -> None:
    assert (await call(method, path, peer=peer)).status_code == 204
    for far in ("10.0.0.7", "2001:db8::1", "::ffff:10.0.0.7", "testclient", ""):
        response = await call(method, path, peer=far)
        assert response.status_code == 403
        assert "--token" in response.json()["detail"]
    assert (await call("GET", "/status", peer="10.0.0.7")).status_code == 204


@pytest.mark.parametrize("name", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
async def test_without_tokens_no_client_behind_a_proxy_may_destroy(name: str) -> None:
    headers = {name: "127.0.0.1"}
    assert (await call("GET", "/reset_data", headers=headers)).status_code == 403
    assert (await call("GET", "/status", headers=headers)).status_code == 204


async def test_with_tokens_the_machine_does_not_matter() -> None:
    for peer in ("127.0.0.1", "10.0.0.7"):
        answer = await call("GET", "/reset_data", tokens=ONE_PER_SCOPE, peer=peer)
        assert answer.status_code == 401
        answer = await call(
            "GET", "/reset_data", tokens=ONE_PER_SCOPE, peer=peer, secret=secret_of("admin")
        )
        assert answer.status_code == 204


async def test_without_tokens_web_pages_of_other_sites_are_kept_out() -> None:
    sites = [("cross-site", 403), ("same-site", 403), ("same-origin", 204), ("none", 204)]
    for site, status in sites:
        response = await call("GET", "/reset_data", headers={"Sec-Fetch-Site": site})
        assert response.status_code == status


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8000", 204), ("127.0.0.1", 204), ("[::1]:8000", 204), ("hub.localhost:1", 204)]
    + [("evil.example:8000", 403), ("127.0.0.1.evil.example", 403), ("[::1", 403), ("", 403)],
)
async def test_without_tokens_names_made_to_point_here_are_refused(host: str, status: int) -> None:
    response = await call(
        "GET", "/status", base_url="http://127.0.0.1:8000", headers={"Host": host}
    )
    assert response.status_code == status
    response = await call(
        "GET",
        "/status",
        tokens=TokenSet([token("admin", Scope.ADMIN)]),
        secret=secret_of("admin"),
        base_url="http://127.0.0.1:8000",
        headers={"Host": host},
    )
    assert response.status_code == 204


# Token files


def test_added_token_is_found_and_its_secret_is_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tokens.yaml"
    first = add_token(path, name="env", scopes=[Scope.PRODUCE], runs=["math"])
    second = add_token(path, name="ops", scopes=[Scope.ADMIN, Scope.READ], runs=None)
    assert len({first, second}) == 2
    assert min(len(first), len(second)) >= 43  # 256 bits
    text = path.read_text()
    assert first not in text
    assert second not in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    tokens = TokenSet.load(path)
    found = tokens.find(first.encode())
    assert found is not None
    assert (found.name, found.scopes, found.runs) == ("env", {Scope.PRODUCE}, {"math"})
    other = tokens.find(second.encode())
    assert other is not None
    assert (other.name, other.runs) == ("ops", None)
    assert tokens.find(b"") is None
    assert tokens.find(first.encode()[:-1]) is None
    assert list(tmp_path.glob("deep/*")) == [path]


def test_adding_keeps_comments_of_yaml_and_the_form_of_json(tmp_path: Path) -> None:
    entry = {"name": "a", "sha256": "0" * 64, "scopes": ["read"]}
    yaml_path = tmp_path / "tokens.yaml"
    yaml_path.write_text(f"# ours\n- {json.dumps(entry)}")
    in_yaml = add_token(yaml_path, name="b", scopes=[Scope.READ], runs=None)
    assert yaml_path.read_text().startswith(f"# ours\n- {json.dumps(entry)}\n- ")
    json_path = tmp_path / "tokens.json"
    json_path.write_text(json.dumps([entry]))
    in_json = add_token(json_path, name="b", scopes=[Scope.READ], runs=None)
    assert [row["name"] for row in json.loads(json_path.read_text())] == ["a", "b"]
    for path, secret in ((yaml_path, in_yaml), (json_path, in_json)):
        assert TokenSet.load(path).find(secret.encode()) is not None


def test_taken_name_is_refused_and_the_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "tokens.yaml"
    add_token(path, name="env", scopes=[Scope.PRODUCE], runs=None)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="'env' is taken"):
        add_token(path, name="env", scopes=[Scope.READ], runs=None)
    with pytest.raises(ConfigError, match=r"\[1\]\.runs"):
        add_token(path, name="x", scopes=[Scope.READ], runs=["a/b"])
    assert path.read_bytes() == before


HEX = "ab" * 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no token"),
        ("[]", "holds no token"),
        ("{name: a}", "Expected `array`"),
        (f"- {{name: a, sha256: {HEX}}}", "missing required field `scopes`"),
        (f"- {{name: a, sha256: {HEX}, scopes: []}}", r"length >= 1 - at `\$\[0\].scopes"),
        (f"- {{name: a, sha256: {HEX}, scopes: [write]}}", r"\$\[0\].scopes\[0\]"),
        (f"- {{name: a, sha256: {HEX[1:]}, scopes: [read]}}", r"\[0\].sha256"),
        (f"- {{name: '', sha256: {HEX}, scopes: [read]}}", r"\[0\].name"),
        (f"- {{name: a, sha256: {HEX}, scopes: [read], runs: []}}", r"\[0\].runs"),
        (f"- {{name: a, sha256: {HEX}, scopes: [read], runs: [/]}}", r"\[0\].runs"),
        (f"- {{name: a, sha256: {HEX}, scopes: [read], run: [b]}}", "unknown field `run`"),
        ("- {name: a, secret: my-own-secret", "not valid YAML or JSON"),
    ],
)
def test_wrong_token_file_is_refused_without_quoting_it(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "tokens.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as refusal:
        TokenSet.load(path)
    assert "my-own-secret" not in str(refusal.value)


def test_plain_token_may_do_everything_and_is_not_kept() -> None:
    tokens = token_set_of("correct horse battery")
    found = tokens.find(b"correct horse battery")
    assert found is not None
    assert found.allows(frozenset([Scope.PRODUCE]))
    assert found.covers("any")
    assert "horse" not in repr(vars(tokens))
    for bad in ("", "short", "with\nnewline and more", "pass\u00e9-partout-long"):
        with pytest.raises(ConfigError) as refusal:
            token_set_of(bad)
        assert not bad or bad not in str(refusal.value)


async def test_tokens_are_never_logged_or_echoed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    app = Observe(Access(Inside(), ROUTES, ONE_PER_SCOPE), HubMetrics(dict))
    transport = httpx.ASGITransport(app)
    answers = []
    async with httpx.AsyncClient(transport=transport, base_url="http://hub") as http:
        for secret in ("secret-of-read", "unknown-secret"):
            for headers in (
                {"Authorization": f"Bearer {secret}"},
                {"Authorization": secret},
                {"Authorization": f"Bearer {secret}", "Cookie": secret, "X-Token": secret},
            ):
                paths = ("/batch", "/reset_data", f"/status?token={secret}")
                answers += [await http.get(path, headers=headers) for path in paths]
    assert {answer.status_code for answer in answers} == {204, 401, 403}
    said = caplog.text + "".join(f"{answer.headers}{answer.text}" for answer in answers)
    said = re.sub(r"HTTP Request: .*", "", said)  # the test's own client logs its URL
    assert "status=401" in said
    assert "secret-of" not in said
    assert "token=read" in said  # the name is shown, for the administrator


# The hub as a whole


def test_table_of_rights_names_every_route_of_the_hub() -> None:
    served = {
        f"{method} {route.path}"
        for route in create_app().routes
        if isinstance(route, StarletteRoute)
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert served == {f"{route.method} {route.template}" for route in ROUTES}


async def test_a_path_through_one_run_deletes_no_other() -> None:
    tokens = TokenSet([token("a", Scope.ADMIN, runs=["a"]), token("all", Scope.ADMIN)])
    async with running_hub(tokens=tokens) as hub:
        http = hub.http
        everywhere = {"Authorization": f"Bearer {secret_of('all')}"}
        for run in ("a", "b"):
            path = f"/runs/{run}/register"
            started = await http.post(path, headers=everywhere, json=registration())
            assert started.status_code == 200
        only_a = {"Authorization": f"Bearer {secret_of('a')}"}
        for path in (
            *("/runs/a/runs/b", "/runs/a/runs/default", "/runs/a/runs/a", "/runs/a%2Fruns%2Fb"),
            *("/runs/a/%72uns/b", "/runs/a//runs/b", "/runs/a/runs/a/runs/b"),
        ):
            assert (await http.delete(path, headers=only_a)).status_code in (403, 404), path
            assert (await http.delete(path, headers=everywhere)).status_code == 404, path
        assert hub.runs == ["a", "b", "default"]
        assert hub.app.state.hub.runs["default"] is hub.coordinator
        assert (await http.delete("/runs/b", headers=only_a)).status_code == 403
        assert (await http.delete("/runs/a", headers=only_a)).status_code == 200
        assert hub.runs == ["b", "default"]


async def test_trailing_slash_never_leads_to_another_run() -> None:
    async with running_hub() as hub:
        assert (await hub.http.get("/runs/math/status/")).status_code == 404
