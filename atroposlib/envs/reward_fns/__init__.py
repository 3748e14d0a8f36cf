"""Ready-made reward functions, one per file, found by name through `registry`.

A reward function takes a list of completions and returns one number for each. Modules are imported when their name is
first looked up; an extra is imported when the reward is first computed.
"""

from atroposlib.envs.reward_fns.combined_reward import CombinedReward
from atroposlib.envs.reward_fns.registry import registry
from atroposlib.envs.reward_fns.reward_function import RewardFunction

__all__ = ["CombinedReward", "RewardFunction", "registry"]
