"""`check_env(MyEnv)`: conformance checks for environments; also `python my_env.py check`."""

from atroposlib.checker.check import check_env
from atroposlib.checker.report import RULES, Evidence, Finding, Report, Rule, Status

__all__ = [
    "RULES",
    "Evidence",
    "Finding",
    "Report",
    "Rule",
    "Status",
    "check_env",
]
