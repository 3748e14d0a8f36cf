"""Render the prompts of lm-eval's tasks and grade answers by them. Runs in the interpreter of `.ci/conformance_env.sh`.

Reads from stdin, by name: `task` (a file of lm-eval), `rows`, `shots` (few-shot rows), `filter` (None: the answer as it
is), `metrics`, and `answers`, which are pairs of a row's index and a text. Writes by name: `prompts` of all rows, and
`verdicts`, the metrics of every answer.
"""

import contextlib
import json
import random
import sys
from pathlib import Path
from typing import Any


def task_of(spec: dict[str, Any]) -> Any:
    import datasets
    from lm_eval import tasks
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    config = load_yaml(Path(tasks.__file__).parent / spec["task"])
    if spec["processed"]:
        config.pop("process_docs")
    rows = datasets.Dataset.from_list(spec["processed"] or spec["rows"])
    named = {config.get(f"{key}_split") for key in ("test", "validation", "training", "fewshot")}
    splits = dict.fromkeys(named - {None}, rows)
    if spec["shots"]:
        splits[config["fewshot_split"]] = datasets.Dataset.from_list(spec["shots"])
    # From here on, `custom_dataset` stands for the download.
    config |= {"custom_dataset": lambda **_: splits, "num_fewshot": len(spec["shots"])}
    return ConfigurableTask(config=config)


def graded(spec: dict[str, Any]) -> dict[str, Any]:
    from lm_eval.api.instance import Instance

    task = task_of(spec)
    docs = list(task.eval_docs)
    prompts = [task.fewshot_context(doc, len(spec["shots"])) for doc in docs]
    made = [
        Instance(
            request_type="generate_until", doc=docs[i], arguments=("", {}), idx=0, resps=[text]
        )
        for i, text in spec["answers"]
    ]
    name = spec["filter"]
    for each in task._filters if made else ():
        if name in (each.name, None):
            each.apply(made)
    if "math_verify" in spec["metrics"]:  # its other metric takes a tenth of a second for an answer
        task.config.process_results.__globals__["is_equiv"] = lambda *_: False
    verdicts = []
    for one in made:
        found = one.filtered_resps[name] if name else one.resps[0]
        metrics = task.process_results(one.doc, [found])
        verdicts.append([float(metrics[metric]) for metric in spec["metrics"]])
    return {"prompts": prompts, "verdicts": verdicts}


def prepare_ifeval() -> None:
    """Split sentences by the same model from another package, and detect the same languages in every run."""
    import langdetect
    import nltk
    import punkt

    langdetect.DetectorFactory.seed = 0
    nltk.data.find = lambda name, *_: name
    nltk.data.load = lambda name, *_: punkt.tokenizer_for("english")
    nltk.word_tokenize = lambda text: nltk.NLTKWordTokenizer().tokenize(text)


if __name__ == "__main__":
    random.seed(0)
    specs = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        prepare_ifeval()
        answer = {name: graded(spec) for name, spec in specs.items()}
    json.dump(answer, sys.stdout)
