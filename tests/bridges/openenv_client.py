"""A trainer's side of OpenEnv: sample every request at an engine, answer, print the episodes as JSON.

Runs in OpenEnv's virtual environment: `openenv_client.py SERVER ENGINE NUM_EPISODES`. It knows nothing of this project.
"""

import asyncio
import json
import sys
import urllib.request

from openenv.core import GenericEnvClient


def sample(engine, observation):
    """Return the engine's tokens after exactly the observed prompt."""
    body = {
        "input_ids": observation["prompt_ids"],
        "sampling_params": {"max_new_tokens": observation["sampling"]["max_tokens"]},
        "return_logprob": True,
    }
    request = urllib.request.Request(
        f"{engine}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    meta = json.load(urllib.request.urlopen(request))["meta_info"]
    logprobs, tokens = zip(*((p[0], p[1]) for p in meta["output_token_logprobs"]), strict=True)
    return {
        "token_ids": list(tokens),
        "logprobs": list(logprobs),
        "finish_reason": meta["finish_reason"]["type"],
    }


async def main(server, engine, num_episodes):
    async with GenericEnvClient(base_url=server) as env:
        for seed in range(int(num_episodes)):
            result = await env.reset(seed=seed)
            prompts = []
            while not result.done:
                prompts.append(result.observation["prompt_ids"])
                result = await env.step(sample(engine, result.observation))
            episode = {"reward": result.reward, "group": result.observation["group"]}
            print(json.dumps({**episode, "prompts": prompts}))


asyncio.run(main(*sys.argv[1:]))
