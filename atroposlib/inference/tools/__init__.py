"""Convert tool calls between the OpenAI form and the text that a model writes."""

__all__ = ["parsers", "tool_messages", "translator"]
