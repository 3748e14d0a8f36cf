"""The request fields for reasoning of each API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from atroposlib.inference.servers.reasoning import (
    EFFORT_TO_MAX_TOKENS,
    VALID_REASONING_EFFORTS,
    ReasoningConfig,
)

OPENAI = "https://api.openai.com/v1"
ROUTER = "https://openrouter.ai/api/v1"


def test_efforts_and_their_token_numbers_are_the_originals() -> None:
    assert tuple(EFFORT_TO_MAX_TOKENS) == VALID_REASONING_EFFORTS
    assert EFFORT_TO_MAX_TOKENS == {
        "none": 1024,
        "minimal": 3200,
        "low": 6400,
        "medium": 16000,
        "high": 25600,
        "xhigh": 30400,
    }


@pytest.mark.parametrize(
    ("options", "url", "use_max_tokens", "expected"),
    [
        ({}, OPENAI, False, None),
        ({}, ROUTER, True, None),
        ({"enabled": True}, OPENAI, False, {"reasoning_effort": "medium"}),
        ({"effort": "xhigh"}, OPENAI, True, {"reasoning_effort": "xhigh"}),
        ({"max_tokens": 500}, OPENAI, False, {"reasoning_effort": "medium"}),
        ({"enabled": True}, ROUTER, False, {"reasoning": {"enabled": True}}),
        ({"enabled": True}, None, False, {"reasoning": {"enabled": True}}),
        ({"effort": "none"}, ROUTER, False, {"reasoning": {"enabled": True, "effort": "none"}}),
        ({"effort": "low"}, ROUTER, True, {"reasoning": {"enabled": True, "max_tokens": 6400}}),
        ({"max_tokens": 500}, None, False, {"reasoning": {"enabled": True, "max_tokens": 500}}),
        (
            {"effort": "high", "max_tokens": 500},
            ROUTER,
            False,
            {"reasoning": {"enabled": True, "effort": "high"}},
        ),
        (
            {"effort": "high", "max_tokens": 500},
            ROUTER,
            True,
            {"reasoning": {"enabled": True, "max_tokens": 25600}},
        ),
    ],
)
def test_each_api_gets_its_own_fields(
    options: dict[str, Any], url: str | None, use_max_tokens: bool, expected: Any
) -> None:
    config = ReasoningConfig(**options)
    assert config.build_extra_body(url, use_max_tokens) == expected
    assert config.is_reasoning_kwargs_active() is (expected is not None)


def test_without_reasoning_a_request_stays_as_it_is() -> None:
    assert ReasoningConfig().apply({"max_tokens": 5}, base_url=OPENAI) == {"max_tokens": 5}


def test_an_unknown_effort_is_refused_by_name_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match="'maximal'.*none, minimal, low, medium, high, xhigh"):
        ReasoningConfig(effort="maximal")


def test_it_is_read_from_an_environments_config() -> None:
    env = SimpleNamespace(thinking_mode=True, reasoning_effort="low", max_reasoning_tokens=7)
    config = ReasoningConfig.from_env_config(env)
    assert (config.enabled, config.effort, config.max_tokens) == (True, "low", 7)
    assert not ReasoningConfig.from_env_config(SimpleNamespace()).enabled


def test_a_request_to_openai_keeps_the_callers_body_untouched() -> None:
    body = {"temperature": 0.1, "max_tokens": 5}
    sent = ReasoningConfig(enabled=True).apply(body, base_url=OPENAI)
    assert sent == {"temperature": 1.0, "max_completion_tokens": 5, "reasoning_effort": "medium"}
    assert body == {"temperature": 0.1, "max_tokens": 5}
