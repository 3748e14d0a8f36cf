"""An environment whose reward any model can move: the fraction of sampled tokens with an even id."""

import random
from typing import Any

from atroposlib.envs.base import (
    APIServerConfig,
    BaseEnv,
    BaseEnvConfig,
    ScoredDataGroup,
)


class ParityEnv(BaseEnv):
    """Random letters in, any tokens out; a random model's groups differ in score, so nothing is dropped."""

    name = "parity"

    @classmethod
    def config_init(cls) -> tuple[BaseEnvConfig, list[APIServerConfig]]:
        config = BaseEnvConfig(
            group_size=4, max_token_length=32, use_wandb=False, total_steps=1000, steps_per_eval=0
        )
        return config, [APIServerConfig(server_type="vllm", model_name="tiny")]

    async def setup(self) -> None:
        self.random = random.Random(0)

    async def get_next_item(self) -> str:
        return "".join(self.random.choices("abcdefgh", k=6))

    async def collect_trajectories(self, item: str) -> tuple[ScoredDataGroup, list[Any]]:
        group = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[])
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            await managed.completion(
                prompt=item, n=self.config.group_size, max_tokens=12, temperature=1.0
            )
            nodes = managed.get_state()["nodes"]
        for node in nodes:
            sampled = [t for t in node.masked_tokens if t != -100]
            group["tokens"].append(node.tokens)
            group["masks"].append(node.masked_tokens)
            group["inference_logprobs"].append(node.logprobs)
            group["scores"].append(sum(t % 2 == 0 for t in sampled) / len(sampled))
        spans = [span for node in nodes for span in node.metadata.get("weight_versions") or []]
        versions = {int(span["weight_version"]) for span in spans}
        # Sampled across a hand-over: no single policy's logprobs, so the trainer must not compare them with one.
        group["policy_version"] = versions.pop() if len(versions) == 1 else None
        return group, []

    async def evaluate(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is held out."""


if __name__ == "__main__":
    ParityEnv.cli()
