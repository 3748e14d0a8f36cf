"""The rules, and the report: one finding per rule with evidence, as text or JSON. `check.py` judges."""

from __future__ import annotations

import enum
import re
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

MAX_EVIDENCE = 5


class Status(enum.Enum):
    PASS = "pass"
    FAIL = "fail"
    NOT_CHECKED = "not checked"


class Rule(NamedTuple):
    """One requirement on environments."""

    name: str
    claim: str
    """What holds when the rule passes."""
    advice: str
    """What to change when it fails; evidence of a known cause has a hint instead."""
    unseen: str
    """Why it was not checked if nothing was seen that could break it."""
    is_optional: bool
    """Whether the rule does not apply to an environment in which nothing was seen."""


_TABLE = """
starts: config_init, the constructor and setup() work without a network
    load what the environment needs in setup(); give `check` small local data by flags
gives_items: get_next_item() returns an item, and soon
    return an item; None means 'nothing now' and ends `process`
rows_work: every row has a prompt, and its gold answer earns the reward
    name the row's fault, or return None from parse_row to leave the row out
    does not apply if it has no list of rows (DatasetEnv)
evaluation_held_out: no evaluation row is a training row
    take the rows of load_rows('eval') out of those of load_rows('train')
    does not apply if it has no list of evaluation rows
collects: collect_trajectories() works and turns items into groups
    let it return (group, backlog); None only where an item is worth nothing
tools_work: every tool gives a result for arguments of its schema, and for those of right answers
    correct what the tool raises or make it return in time: in training the model gets the error as its result
    does not apply if it has no tools
group_size: a group has config.group_size sequences, or says otherwise in group_overrides
    sample config.group_size completions, or state group_overrides={'group_size': n}
aligned: tokens, masks and logprobs agree, and only sampled tokens are trained
    take tokens, masked_tokens and logprobs from managed.get_state()['nodes'] as they are
token_exact: the tokens sent back are the tokens that were sampled, in every turn
    never turn sampled text into tokens again: use managed_server() and its nodes
reward_repeatable: the same completions earn the same rewards when they are scored again
    score from item and completion alone: no unseeded randomness, no clock, no memory
reward_ignores_order: a completion's reward does not depend on its place in the group
    score every completion by itself, or in a way that any order gives the same
reward_varies: different completions earn different rewards
    if no answer tried can be right, define example_answers(self, item) -> list[str]; else correct the reward
reward_finite: every score is a finite number
    return 0 for an answer without a number; NaN is not equal to, above or below anything
grader_survives: scoring raises for no answer, and leaves none that exhausts it without a score
    score an answer that cannot be read as a wrong one: catch what parsing it raises
answer_runs_no_code: no answer is run as code by what scores it
    never eval, exec, parse_expr or unpickle an answer; read literals by AST, run programs by sandbox.run_code
empty_unrewarded: an empty answer earns less than half of what can be earned
    score an empty completion as a wrong one (`'' in text` is always true)
    not checked if no group had such an answer
echo_unrewarded: repeating the question earns less than half of what can be earned
    look for the answer where the model has to put it, not anywhere in its text
    not checked if no group had such an answer
copy_unrewarded: a result that the prompt states earns less than half of what can be earned
    show worked examples of other questions, and score the completion without the prompt
    does not apply if the prompts state no result
wrong_unrewarded: a wrong result in the form of a right one earns less than half
    compare with the whole result of this item, not with a part of it
    not checked if no gold answer is known (gold_answer(row), or a field `answer`) that earns the reward
list_unrewarded: several results, one of them right, earn less than half, in one notation or in two
    accept one result: refuse an answer that states several, or judge the last alone
    not checked if no gold answer is known (gold_answer(row), or a field `answer`) that earns the reward
retraction_unrewarded: a right result that is taken back for a wrong one earns less than half
    judge the last result of an answer
    not checked if no gold answer is known (gold_answer(row), or a field `answer`) that earns the reward
restatement_unrewarded: a term that equals the right number, such as 24*16-9, earns less than half
    require a number where the right result is a number: refuse operators
    does not apply if no gold answer that earns the reward is a whole number
variants_rewarded: a right result in the form that the prompt asks for earns what it earned
    read what the prompt asks for; other usual ways to write a result that earn less are noted
    does not apply if the result is not marked by a box, a tag or words
no_leaked_tasks: no asyncio task outlives its item
    create tasks in an asyncio.TaskGroup, or await them in a finally block
no_leaked_handles: no file, socket or pipe stays open after its item
    open in `with`, or once in setup(); `python -X dev` names what is dropped unclosed
no_leaked_processes: no child process outlives its item
    wait for every process in a finally block, or score in envs.rewards.RewardWorkers
loop_stays_free: no call blocks the event loop for more than 100 ms
    use asyncio.to_thread or envs.rewards.RewardWorkers; await, never time.sleep
evaluates: evaluate() works and writes metrics
    end evaluate() with await self.evaluate_log({'eval/...': value})
checkpoint_is_json: save_checkpoint() saves plain JSON values
    save numbers, strings, lists and dicts; rebuild the rest from them in setup()
checkpoint_restores: a fresh environment that loads a checkpoint has the attributes that were saved
    save under the attribute's name (load_checkpoint sets attributes), with string keys, or override load_checkpoint
"""
"""Each rule's name and claim, below them its advice, and for some rules what leaves nothing to judge."""

_ROW = re.compile(r"(\w+): (.*)\n    (.*)\n(?:    (?:not checked|(does not apply)) if (.*)\n)?")
RULES = tuple(
    Rule(name, claim, advice, unseen or "nothing was seen that could break it", bool(optional))
    for name, claim, advice, optional, unseen in _ROW.findall(_TABLE)
)
NAMES = tuple(rule.name for rule in RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where and how a rule was broken."""

    what: str
    item: int | None = None
    """Index of the item in the order of `get_next_item`, from 0."""
    sequence: int | None = None
    """Index in the group."""
    hint: str = ""
    """What to change, for this cause."""

    def __str__(self) -> str:
        places = {"item": self.item, "sequence": self.sequence}
        known = [f"{name} {index}" for name, index in places.items() if index is not None]
        return f"{', '.join(known)}: {self.what}" if known else self.what


@dataclass(slots=True, kw_only=True)
class Finding:
    """The verdict of one rule: it passes only if something was seen that could have broken it."""

    rule: Rule
    num_looks: int = 0
    """Number of answers, sequences, runs or calls that could have broken it and did not."""
    reason: str = ""
    """Why it was not checked; "" if it was."""
    is_exempt: bool = False
    """Whether `reason` says that the environment has nothing that the rule is about."""
    evidence: list[Evidence] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What the author should know although it is no fault."""

    @property
    def status(self) -> Status:
        if self.evidence:
            return Status.FAIL
        return Status.PASS if self.num_looks and not self.reason else Status.NOT_CHECKED

    @property
    def applies(self) -> bool:
        """Whether the environment has what the rule is about."""
        return not self.is_exempt and bool(
            self.num_looks or self.reason or self.evidence or not self.rule.is_optional
        )

    @property
    def why_not_checked(self) -> str:
        """The reason, if the status is `NOT_CHECKED`."""
        is_checked = self.status is not Status.NOT_CHECKED
        return "" if is_checked else self.reason or self.rule.unseen


@dataclass(slots=True, kw_only=True)
class Report:
    """The verdicts on one environment: a finding per rule, filled while the environment is judged."""

    environment: str
    findings: list[Finding] = field(default_factory=lambda: [Finding(rule=rule) for rule in RULES])
    num_items: int = 0
    num_groups: int = 0
    duration_s: float = 0.0

    def finding(self, name: str) -> Finding:
        """Return the verdict of the rule called `name`."""
        return self.findings[NAMES.index(name)]

    def look(self, name: str, count: int = 1) -> None:
        """Note that `count` things were seen that could have broken a rule."""
        self.finding(name).num_looks += count

    def note(self, name: str, what: str) -> None:
        """Say more about a rule than its verdict."""
        self.finding(name).notes.append(what)

    def fail(
        self,
        name: str,
        what: str,
        *,
        item: int | None = None,
        sequence: int | None = None,
        hint: str = "",
    ) -> None:
        """Add evidence against a rule, unless the rule is not judged."""
        finding = self.finding(name)
        if not finding.reason:
            finding.evidence.append(Evidence(what=what, item=item, sequence=sequence, hint=hint))

    def skip(self, reason: str, *names: str, is_exempt: bool = False) -> None:
        """Do not judge these rules, except those that failed or were skipped before."""
        for finding in map(self.finding, names):
            if not finding.evidence and not finding.reason:
                finding.reason, finding.is_exempt = reason, is_exempt

    def end_budget(self) -> None:
        """Do not judge the rules that saw nothing before the check's time was used up."""
        unseen = [each.rule.name for each in self.findings if not each.num_looks]
        self.skip("the check's time was used up before (--budget SECONDS)", *unseen)

    def dismiss(self, cause: str, *names: str) -> None:
        """If the rule `cause` failed, drop what was found about these: it follows from that fault."""
        if self.has_failed(cause):
            for name in names:
                self.finding(name).evidence.clear()
            self.skip(f"{cause} fails", *names)

    def has_failed(self, name: str) -> bool:
        return self.finding(name).status is Status.FAIL

    @property
    def is_ok(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> list[str]:
        """Names of the rules that failed."""
        return self._named(Status.FAIL)

    @property
    def not_checked(self) -> list[str]:
        """Names of the rules that apply and could not be judged, or were skipped."""
        return [name for name in self._named(Status.NOT_CHECKED) if self.finding(name).applies]

    def _named(self, status: Status) -> list[str]:
        return [finding.rule.name for finding in self.findings if finding.status is status]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "environment": self.environment,
            "ok": self.is_ok,
            "items": self.num_items,
            "groups": self.num_groups,
            "duration_s": round(self.duration_s, 3),
            "rules": [
                {
                    "name": finding.rule.name,
                    "claim": finding.rule.claim,
                    "status": finding.status.value,
                    "applies": finding.applies,
                    "looks": finding.num_looks,
                    "reason": finding.why_not_checked,
                    "notes": finding.notes,
                    "evidence": [asdict(evidence) for evidence in finding.evidence],
                    "advice": finding.rule.advice if finding.status is Status.FAIL else "",
                }
                for finding in self.findings
            ],
        }

    def to_text(self) -> str:
        """Return the report as text: a line per rule, with evidence and advice under each that failed."""
        width = max(len(finding.rule.name) for finding in self.findings)
        lines = []
        for finding in self.findings:
            rule = finding.rule
            verdict = "not checked" if finding.applies else "does not apply"
            about = f"{verdict}: {reason}" if (reason := finding.why_not_checked) else rule.claim
            mark = {Status.NOT_CHECKED: "-"}.get(finding.status, finding.status.name)
            lines.append(f"{mark:4} {rule.name:{width}}  {about}")
            lines += [f"{'':5}  {note}" for note in finding.notes]
            lines += [f"{'':5}- {evidence}" for evidence in finding.evidence[:MAX_EVIDENCE]]
            if len(finding.evidence) > MAX_EVIDENCE:
                lines.append(f"{'':5}- and {len(finding.evidence) - MAX_EVIDENCE} more")
            hints = dict.fromkeys(evidence.hint or rule.advice for evidence in finding.evidence)
            lines += [f"{'':5}> {hint}" for hint in hints]
        num_passed = len(self._named(Status.PASS))
        lines.append(
            f"{self.environment}: {num_passed} passed, {len(self.failed)} failed,"
            f" {len(self.not_checked)} not checked"
            f" ({self.num_items} items, {self.num_groups} groups, {self.duration_s:.1f} s)"
        )
        return "\n".join(lines)
