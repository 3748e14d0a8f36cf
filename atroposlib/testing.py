"""What the tests of an environment import: `check_env` tries it, `replay_scores` scores a pinned rollout again."""

from atroposlib.checker import check_env
from atroposlib.runtime.replay import replay_scores

__all__ = ["check_env", "replay_scores"]
