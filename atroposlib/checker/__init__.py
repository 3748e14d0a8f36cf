"""`check_env(MyEnv)`: a conformance kit for authors, and what `python my_env.py check` runs."""

from atroposlib.checker.check import check_env, offline_class
from atroposlib.checker.report import RULES, Evidence, Finding, Report, Rule, Status

__all__ = [
    "RULES",
    "Evidence",
    "Finding",
    "Report",
    "Rule",
    "Status",
    "check_env",
    "offline_class",
]
