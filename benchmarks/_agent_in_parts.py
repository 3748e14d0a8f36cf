"""An agent with two conversations per run: each half of a word is reversed in a conversation of its own."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

import aiohttp

from atroposlib.envs.agent_env import AgentEnv

QUESTION = "Write backwards: "
LETTERS = "abcdefghijkl"
NUM_HELDOUT_HALVES = 30
NUM_ROWS = {"train": 2000, "eval": 200}


class AgentInParts(AgentEnv):
    """Score 1 if both answers, put together, are the reversed word; no held-out half is trained on."""

    name = "agent_in_parts"

    def load_rows(self, split: str) -> list[str]:
        rng = random.Random(0)
        halves = ["".join(pair) for pair in itertools.permutations(LETTERS, 2)]
        rng.shuffle(halves)
        at = NUM_HELDOUT_HALVES
        halves = halves[at:] if split == "train" else halves[:at]
        return ["".join(rng.choices(halves, k=2)) for _ in range(NUM_ROWS[split])]

    async def setup(self) -> None:
        await super().setup()
        self.client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def run_agent(self, row: str, base_url: str, api_key: str) -> str:
        headers = {"Authorization": f"Bearer {api_key}"}

        async def ask(half: str) -> str:
            content = {"role": "user", "content": QUESTION + half}
            body = {"model": "tiny", "messages": [content]}
            url = f"{base_url}/chat/completions"
            async with self.client.post(url, json=body, headers=headers) as reply:
                reply.raise_for_status()
                return str((await reply.json())["choices"][0]["message"]["content"])

        first, second = await asyncio.gather(ask(row[:2]), ask(row[2:]))
        return second + first

    def score(self, row: str, answer: Any) -> float:
        return float(answer == row[::-1])

    async def close(self) -> None:
        await self.client.close()
        await super().close()


if __name__ == "__main__":
    AgentInParts.cli()
