"""A taskset of verifiers v1, and a harness that needs no download: repeat a word, then say goodbye."""

from __future__ import annotations

import os

import verifiers.v1 as vf
from openai import AsyncOpenAI


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def repeated(self, trace: vf.Trace) -> float:
        answers = [str(message.content) for message in trace.assistant_messages]
        if "crash" in answers[0]:
            os._exit(3)
        if "unjudged" in answers[0]:
            raise ValueError("no judge today")
        return float(answers[0] == self.data.word)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class WordsConfig(vf.TasksetConfig):
    num_tasks: int = 6


class WordsTaskset(vf.Taskset[WordTask, WordsConfig]):
    def load(self) -> list[WordTask]:
        names = [f"word{i}" for i in range(self.config.num_tasks)]
        return [WordTask(WordData(prompt=f"Repeat {name}.", word=name)) for name in names]


class TwoTurnsHarness(vf.Harness[vf.HarnessConfig]):
    """Asks the task, then thanks."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # type: ignore[no-untyped-def]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            messages = [{"role": "user", "content": data.prompt}]
            for question in ("Thank you.", None):
                answer = await client.chat.completions.create(model=ctx.model, messages=messages)
                messages.append({"role": "assistant", "content": answer.choices[0].message.content})
                messages.append({"role": "user", "content": question})
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["TwoTurnsHarness", "WordsTaskset"]
