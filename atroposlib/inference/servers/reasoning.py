"""Reasoning effort, and the request fields that each API has for it. Pure; used for chat requests only."""

from __future__ import annotations

from typing import Any

VALID_REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

EFFORT_TO_MAX_TOKENS = {
    "none": 1024,
    "minimal": 3200,
    "low": 6400,
    "medium": 16000,
    "high": 25600,
    "xhigh": 30400,
}
"""Thinking budgets in tokens, for servers that take a number instead of a word; the original's values."""


def is_official_openai(base_url: str | None) -> bool:
    """Whether requests go to OpenAI's own API (also the meaning of an empty URL)."""
    return not base_url or "api.openai.com" in base_url


class ReasoningConfig:
    """Whether and how much a model reasons. Setting `effort` or `max_tokens` enables reasoning."""

    def __init__(
        self, enabled: bool = False, effort: str | None = None, max_tokens: int | None = None
    ) -> None:
        if effort is not None and effort not in VALID_REASONING_EFFORTS:
            raise ValueError(
                f"Invalid reasoning_effort {effort!r}; must be one of {', '.join(VALID_REASONING_EFFORTS)}"
            )
        self.effort = effort
        self.max_tokens = max_tokens
        self.enabled = enabled or effort is not None or max_tokens is not None

    @classmethod
    def from_env_config(cls, env_config: Any) -> ReasoningConfig:
        """Read `thinking_mode`, `reasoning_effort` and `max_reasoning_tokens` of an environment's config."""
        return cls(
            enabled=bool(getattr(env_config, "thinking_mode", False)),
            effort=getattr(env_config, "reasoning_effort", None),
            max_tokens=getattr(env_config, "max_reasoning_tokens", None),
        )

    def is_reasoning_kwargs_active(self) -> bool:
        return self.enabled

    def build_extra_body(
        self, base_url: str | None = None, use_max_tokens: bool = False
    ) -> dict[str, Any] | None:
        """Return the request fields that enable reasoning, or None when it is disabled.

        OpenAI takes `{"reasoning_effort": word}`; others (OpenRouter's convention) `{"reasoning": {...}}` with either
        the word or a number of tokens. `use_max_tokens` turns the word into its number.
        """
        if not self.enabled:
            return None
        if base_url and is_official_openai(base_url):
            return {"reasoning_effort": self.effort or "medium"}
        reasoning: dict[str, Any] = {"enabled": True}
        if self.effort is not None and use_max_tokens:
            reasoning["max_tokens"] = EFFORT_TO_MAX_TOKENS[self.effort]
        elif self.effort is not None:
            reasoning["effort"] = self.effort
        elif self.max_tokens is not None:
            reasoning["max_tokens"] = self.max_tokens
        return {"reasoning": reasoning}

    def apply(self, body: dict[str, Any], *, base_url: str | None) -> dict[str, Any]:
        """Return a chat body with the reasoning fields.

        OpenAI's reasoning models accept only temperature 1 and require `max_completion_tokens`.
        """
        extra = self.build_extra_body(base_url or "https://api.openai.com/v1")
        if extra is None:
            return body
        body = {**body, **extra}
        if is_official_openai(base_url):
            body["temperature"] = 1.0
            if "max_tokens" in body:
                body["max_completion_tokens"] = body.pop("max_tokens")
        return body
