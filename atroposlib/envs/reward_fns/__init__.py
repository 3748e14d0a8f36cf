"""Ready-made reward functions, one per file, found by name through `registry`.

A reward function takes a list of completions and returns one number for each. Modules are imported when a name is first
asked for; what needs an extra imports it when it first computes.
"""

from atroposlib.envs.reward_fns.combined_reward import CombinedReward
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CombinedReward", "RewardFunction", "registry"]
