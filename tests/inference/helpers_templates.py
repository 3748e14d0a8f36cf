"""Real transformers tokenizers with the chat templates that models have, and a harness that samples given ids.

The templates are short ones of our own that do what those of the named families do to the past of a conversation.
`Template.between` says by hand what stands between two turns of the assistant: the oracle of the tests.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from atroposlib.inference.answerer import Answers, Ask, Completion
from atroposlib.inference.harness import ServerHarness, answer_from_hash, made_up_logprobs
from atroposlib.inference.sessions.managed_server import ManagedServer
from atroposlib.inference.tools.parsers import STYLES

CORPUS = [
    "the answer is the sum of the other answers, and then there is nothing else to think about",
    "user assistant system tool function name arguments parameters properties description string",
    "Hello world! What is the weather like in Paris today? It is 21 degrees and sunny there.",
    "1 + 1 = 2, 10 + 20 = 30, 100 + 200 = 300, 3.14159, therefore the total is 42.",
    "\n\n\n  indented\n    more indented\n\nIn French: voil\u00e0, \u00e9t\u00e9, fa\u00e7ade. \U0001f642 \U0001f642",
]
EXTRA_SPECIAL = [
    "<|begin_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    *STYLES["gpt_oss"].markers,
]
TEXT_TOKENS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Single tokens, but not special ones: decoding keeps them."""


@functools.cache
def _backend() -> Tokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_special_tokens([AddedToken(text, special=True) for text in EXTRA_SPECIAL])
    backend.add_tokens([AddedToken(text, special=False) for text in TEXT_TOKENS])
    return backend


def make_tokenizer(
    chat_template: str, *, eos: str = "<|endoftext|>", bos: str | None = None
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer with merges, so that tokens and texts have different boundaries."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend().to_str()),
        eos_token=eos,
        bos_token=bos,
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Template:
    """A chat template whose conversations are one sequence."""

    name: str
    jinja: str
    end: str
    """What ends a turn of the assistant; "" if it is no token."""
    between: Callable[[str], str]
    """What stands between the end of a turn and the next turn, with this user message."""
    eos: str = "<|endoftext|>"
    bos: str | None = None
    has_system: bool = True
    lead: str = ""
    """What the template writes before `end`."""

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        return make_tokenizer(self.jinja, eos=self.eos, bos=self.bos)


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)

# R1: earlier thoughts are cut, and the model starts inside of one.
CUTS_THOUGHTS = (
    "{% for m in messages %}{% set c = m.content %}"
    "{% if m.role == 'assistant' %}{% set c = c.split('</think>')[-1] | trim %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + c + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# Qwen3: turns after the last question are written with a (here empty) thought, earlier ones without.
MOVES_THOUGHTS = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ (m.content.split('</think>')[-1] if m.role == 'assistant' else m.content) + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Qwen 2.5: a default system prompt, tools in it, calls and results as XML.
TOOLS = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}"
    "{% else %}{% set system = 'You are a helpful assistant.' %}{% endif %}"
    "{{ '<|im_start|>system\\n' + system }}"
    "{% if tools %}{{ '\\n\\n# Tools\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% for m in messages %}{% if m.role == 'system' %}"
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ '<|im_start|>' + m.role }}{% if m.content or not m.tool_calls %}{{ '\\n' + m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \''
    " + call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Gemma: no system role, roles must alternate, white space is trimmed.
NO_SYSTEM = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}"
)

# Llama 2: the system prompt goes into the first question.
SYSTEM_IN_FIRST = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + (('<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n') if loop.first and system else '')"
    " + m.content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)

# Mistral v3: the system prompt goes into the last question; calls come before results, with ids.
SYSTEM_IN_LAST = (
    "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0].content %}"
    "{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}"
    "{% if m.role == 'user' %}{{ '[INST] ' }}{% if loop.last and system %}{{ system + '\\n\\n' }}{% endif %}"
    "{{ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

# Mistral: only a message with calls may stand between a question and a result.
CALLS_BEFORE_RESULTS = (
    "{{ bos_token }}{% set ns = namespace(i=0) %}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.i = ns.i + 1 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}{% for call in m.tool_calls %}"
    "{{ call.function | tojson + (']' if loop.last else ', ') }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)

# Gemma 4: a result is written by the call before it, and the turn goes on behind it.
RESULTS_BELONG_TO_CALLS = (
    "{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' }}{% endif %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<tool_call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\\n</tool_call>[TOOL_RESULTS]' }}"
    "{% if not loop.last and messages[loop.index0 + 1].role == 'tool' %}"
    "{{ messages[loop.index0 + 1].content + '[/TOOL_RESULTS]' }}{% endif %}"
    "{% else %}{{ m.content + '<|im_end|>\\n' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# A result stands within the turn that called, and nowhere else.
RESULTS_IN_CALLS = (
    "{% for m in messages if m.role != 'tool' %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{{ '<tool_call>\\n' + {'name': f.name, 'arguments': f.arguments} | tojson + '\\n</tool_call>' }}"
    "{% for r in messages if r.role == 'tool' and r.tool_call_id == m.tool_calls[0].id %}"
    "{{ '\\nresult: ' + r.content }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# DeepSeek R1: a message with any content, even an empty one, is shown without its calls.
TEXT_OR_CALLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.content is defined and m.content is not none %}{{ m.content }}"
    "{% else %}{{ m.tool_calls[0].function | tojson }}{% endif %}{{ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# gpt-oss: a result bears the name of what was called. DeepSeek: arguments are added as text.
RESULTS_NAME_CALLS = (
    "{% set ns = namespace(name='') %}{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call before a result') }}{% endif %}"
    "{{ '<|im_start|>' + ns.name + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% elif m.tool_calls %}{% set ns.name = m.tool_calls[0].function.name %}"
    '{{ \'<|im_start|>assistant\\n<tool_call>\\n{"name": "\' + ns.name + \'", "arguments": \''
    " + m.tool_calls[0].function.arguments + '}\\n</tool_call><|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# gpt-oss: a turn is messages, of which only the final one and the calls are shown again.
CHANNELS = (
    "{% set ns = namespace(name='') %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    "{% if m.content %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + m.content + '<|end|>' }}{% endif %}"
    "{% set ns.name = f.name %}{{ '<|start|>assistant to=functions.' + f.name + '<|channel|>commentary json<|message|>'"
    " + f.arguments | tojson + '<|call|>' }}"
    "{% elif m.role == 'assistant' %}{% set ns.name = '' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call before a result') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' }}"
    "{{ m.content | tojson + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)

NO_RESULTS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

TRIMS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

LINE_BEFORE_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '\\n<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

PLAIN_TEXT = (
    "{% for m in messages %}{{ '### ' + m.role + ':\\n' + m.content + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)


def chatml_between(text: str) -> str:
    return f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


TEMPLATES = [
    Template("chatml", CHATML, "<|im_end|>", chatml_between, eos="<|im_end|>"),
    Template("eos_is_not_the_end_of_turn", CHATML, "<|im_end|>", chatml_between),
    Template(
        "llama3",
        LLAMA3,
        "<|eot_id|>",
        lambda text: (
            f"<|start_header_id|>user<|end_header_id|>\n\n{text.strip()}<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n"
        ),
        bos="<|begin_of_text|>",
    ),
    Template(
        "cuts_thoughts",
        CUTS_THOUGHTS,
        "<|im_end|>",
        lambda text: chatml_between(text) + "<think>\n",
    ),
    Template("moves_thoughts", MOVES_THOUGHTS, "<|im_end|>", chatml_between, eos="<|im_end|>"),
    Template("tools_and_default_system", TOOLS, "<|im_end|>", chatml_between, eos="<|im_end|>"),
    Template(
        "no_system",
        NO_SYSTEM,
        "<|im_end|>",
        lambda text: f"\n<|im_start|>user\n{text.strip()}<|im_end|>\n<|im_start|>model\n",
        bos="<|begin_of_text|>",
        has_system=False,
    ),
    Template(
        "system_in_first",
        SYSTEM_IN_FIRST,
        "<|endoftext|>",
        lambda text: f"<|begin_of_text|>[INST] {text.strip()} [/INST]",
        bos="<|begin_of_text|>",
        lead=" ",
    ),
    Template("trims", TRIMS, "<|im_end|>", lambda text: chatml_between(text.strip())),
    Template(
        "line_before_end",
        LINE_BEFORE_END,
        "<|im_end|>",
        lambda text: f"\n<|im_start|>user\n{text}\n<|im_end|>\n<|im_start|>assistant\n",
        lead="\n",
    ),
    Template(
        "plain_text", PLAIN_TEXT, "", lambda text: f"\n\n### user:\n{text}\n\n### assistant:\n"
    ),
]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class ToldEngine(ServerHarness):
    """A harness that samples the token ids of `answers`."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(respond=answer_from_hash)
        self.tokenizer = tokenizer
        self.answers: list[tuple[list[int], str]] = []
        """(ids, finish reason) of the next completions, used up in order."""

    @property
    def sent(self) -> list[list[int]]:
        """[num_calls][P] the prompts."""
        return [request["input_ids"] for request in self.requests]

    async def _begin(self, kwargs: dict[str, Any]) -> int:
        await asyncio.sleep(0)  # concurrent calls overlap
        return await super()._begin(kwargs)

    async def answer(self, ask: Ask) -> Answers:
        prompt = list(ask.prompt_tokens or ())
        return Answers(prompt, [self._told(prompt) for _ in range(ask.n)])

    def _told(self, prompt: list[int]) -> Completion:
        ids, reason = self.answers.pop(0)
        spans = self._spans_of(len(ids))
        return Completion(
            tokens=list(ids),
            logprobs=made_up_logprobs(prompt, ids, spans=spans),
            finish_reason=reason,
            weight_versions=spans,
            text=None,
        )

    def tell(self, *texts: str, end: str = "<|im_end|>", reason: str = "") -> None:
        """Answer these texts, each ended by `end`."""
        for text in texts:
            ids = self.tokenizer.encode(text + end, add_special_tokens=False)
            self.answers.append((ids, reason or ("stop" if end else "length")))


def told_session(tokenizer: Any, **options: Any) -> tuple[ToldEngine, ManagedServer]:
    """Return an engine and a session at it."""
    engine = ToldEngine(tokenizer)
    return engine, ManagedServer(engine, **options)
