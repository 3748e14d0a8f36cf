"""Convert tool calls between the OpenAI form and the text that a model writes; which part of it is a thought."""

__all__ = ["messages", "parsers", "thoughts", "tool_messages", "translator"]
