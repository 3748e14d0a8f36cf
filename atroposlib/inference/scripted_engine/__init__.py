"""`ScriptedEngine`, an engine with a made-up model for tests, faults and benchmarks, and its script."""

from atroposlib.inference.scripted_answers import ByteTokenizer, made_up_logprobs, made_up_tokens
from atroposlib.inference.scripted_engine.script import Fault, Latency, Script
from atroposlib.inference.scripted_engine.server import ScriptedEngine, ServedRequest

__all__ = [
    "ByteTokenizer",
    "Fault",
    "Latency",
    "Script",
    "ScriptedEngine",
    "ServedRequest",
    "made_up_logprobs",
    "made_up_tokens",
]
