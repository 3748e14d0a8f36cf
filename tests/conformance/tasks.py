"""What `test_conformance.py` compares: tasks of lm-eval, rows, and answers in usual and odd forms.

In a form, RIGHT, OTHER and TEXT stand for the right answer, a wrong one, and the content of the right choice. Every
form is also made with right and wrong exchanged.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

CHOICE_FORMS = {
    "usual": "The answer is (RIGHT).",
    "after steps": "We compare all. OTHER is near.\nTherefore, the answer is (RIGHT).",
    "so": "Let us see. So the answer is (RIGHT).",
    "correct": "The correct answer is (RIGHT).",
    "with content": "The answer is (RIGHT) TEXT.",
    "best": "The best answer is RIGHT",
    "another rejected": "(OTHER) is wrong. The answer is (RIGHT).",
    "bold": "The answer is **(RIGHT)**.",
    "boxed": "The answer is $\\boxed{(RIGHT)}$.",
    "thinking": "<think>Maybe (OTHER)?</think>The answer is (RIGHT).",
    "line": "It follows.\n\n(RIGHT)",
    "no parentheses": "The answer is RIGHT.",
    "colon": "Answer: RIGHT",
    "bold colon": "**Answer: RIGHT**",
    "box alone": "$\\boxed{RIGHT}$",
    "tag": "<answer>RIGHT</answer>",
    "letter": "RIGHT",
    "option": "Option RIGHT is correct.",
    "content alone": "TEXT",
    "either": "The answer is (OTHER) or (RIGHT).",
    "changed": "The answer is (OTHER). Wait, no, the answer is (RIGHT).",
    "later mention": "The answer is (RIGHT). But (OTHER) is near.",
    "unclosed thinking": "<think>The answer is (RIGHT).",
    "none": "I cannot tell.",
}
LETTER_FORMS = {
    "usual": "RIGHT",
    "point": "RIGHT.",
    "parentheses": "(RIGHT).",
    "bold": "**RIGHT**",
    "more lines": "RIGHT.\n\nOTHER is near.",
    "quoted": '"RIGHT"',
    "with content": "RIGHT) TEXT",
    "lower case": "(right)",
    "option": "option RIGHT",
    "boxed": "$\\boxed{RIGHT}$",
    "either": "OTHER or RIGHT",
    "content alone": "TEXT",
    "none": "none of them",
}
NUMBER_FORMS = {
    "usual": "The answer is RIGHT.",
    "after steps": "First 3 + 4 = 7, then 7 * 2 = 14. The answer is RIGHT.",
    "boxed": "We have 2 + 2 = 4. So it is $\\boxed{RIGHT}$.",
    "box alone": "\\boxed{RIGHT}",
    "thinking": "<think>Is it OTHER?</think>The answer is \\boxed{RIGHT}.",
    "changed box": "\\boxed{OTHER}, no: \\boxed{RIGHT}",
    "ends": "7 * 2 = 14, so she has RIGHT",
    "ends with point": "It is RIGHT.",
    "hashes": "7 * 2 = 14\n#### RIGHT",
    "dollar sign": "He pays $RIGHT.",
    "dollars": "The answer is RIGHT dollars.",
    "bold": "The answer is **RIGHT**.",
    "formula": "The answer is $RIGHT$.",
    "alone": "RIGHT",
    "decimal": "The answer is RIGHT.00",
    "equation": "So $x = RIGHT$.",
    "later number": "The answer is RIGHT, found in 2 steps.",
    "unclosed thinking": "<think>The answer is RIGHT",
    "none": "I cannot tell.",
}
MATH_FORMS = {
    "usual": "Thus the answer is $\\boxed{RIGHT}$.",
    "box alone": "\\boxed{RIGHT}",
    "thinking": "<think>Is it $\\boxed{OTHER}$?</think>So $\\boxed{RIGHT}$.",
    "changed box": "$\\boxed{OTHER}$. No: $\\boxed{RIGHT}$.",
    "after steps": "We have $2 + 2 = 4$ and $y = 3$. Hence $\\boxed{RIGHT}$.",
    "display": "\\[\\boxed{RIGHT}\\]",
    "minerva": "Final Answer: The final answer is $RIGHT$. I hope it is correct.",
    "formula": "The answer is $RIGHT$.",
    "unclosed box": "The answer is $\\boxed{RIGHT$.",
    "none": "I cannot tell.",
}
MATH_VALUES: list[tuple[str, list[str], list[str]]] = [
    (
        "\\frac{1}{2}",
        ["\\frac{1}{2}", "\\dfrac{1}{2}", "1/2", "0.5"],
        ["\\frac{1}{3}", "2", "-0.5"],
    ),
    ("12", ["12", "12.0", "\\frac{24}{2}", "12\\text{ cm}"], ["-12", "13", "1.2"]),
    ("-5", ["-5", "x=-5", "-5.0"], ["5", "-4", "-\\frac{1}{5}"]),
    ("\\sqrt{2}", ["\\sqrt{2}", "\\sqrt2", "2^{1/2}"], ["2", "\\sqrt{3}", "1.4"]),
    ("x^2+1", ["x^2+1", "1+x^2", "x^{2}+1"], ["x^2-1", "x+1", "x^2"]),
    ("(3,4)", ["(3,4)", "(3, 4)", "\\left(3,4\\right)"], ["(4,3)", "3", "(3,5)"]),
    ("[2,5)", ["[2,5)", "\\left[2,5\\right)"], ["(2,5)", "[2,5]", "[2,6)"]),
    ("\\{1,2\\}", ["\\{1,2\\}", "\\{2,1\\}"], ["\\{1,3\\}", "1", "\\{1\\}"]),
    ("2\\pi", ["2\\pi", "\\pi\\cdot 2"], ["\\pi", "6.28", "2"]),
    ("70000", ["70000", "70,000", "7\\times10^4"], ["7000", "70", "70001"]),
    ("50\\%", ["50\\%", "50\\%"], ["5\\%", "49"]),
    ("3+4i", ["3+4i", "4i+3"], ["3-4i", "4+3i", "7i"]),
]
SPAN_FORMS = {
    "exact": "RIGHT",
    "case": "the RIGHT",
    "more words": "RIGHT in all",
    "far more words": "they say it was RIGHT that day",
    "wrong": "OTHER",
    "both": "RIGHT OTHER",
    "point": "RIGHT.",
    "quotes": '"RIGHT"',
    "hyphen": "RIGHT-yard",
    "percent": "RIGHT%",
    "comma": "RIGHT, OTHER",
    "word": "yards",
    "decimal": "RIGHT.0",
    "dollars": "$RIGHT",
}
SPANS = re.split(
    ",",
    "27,5 yards,1200,3.5,May 7,7 May 2014,Dina,New York,the red car,Hugo Chen,a week,-4,0,U.S. Navy,one-yard run,"
    "World War II,25%,1990s,12-yard,St. Louis,third quarter,16.2,John Carney,40,2002,88 points,Tom Brady,the Bears,"
    "field goal,Matt Bryant,31,nine,September,Raiders,5-yard pass,2.50,eight hours,Rome,Oslo",
)
FORMAL_FORMS = {
    "usual": "So the answer is RIGHT.",
    "capital": "We check. The answer is RIGHT.",
    "alone": "RIGHT",
    "line": "Step by step.\n\nthe answer is RIGHT",
    "bold": "So the answer is **RIGHT**.",
    "another first": "It may seem to be OTHER. But the answer is RIGHT.",
    "thinking": "<think>OTHER?</think>So the answer is RIGHT.",
    "tag": "<answer>RIGHT</answer>",
    "boxed": "The answer is $\\boxed{RIGHT}$.",
    "changed": "The answer is OTHER. Wait, no, the answer is RIGHT.",
    "later mention": "The answer is RIGHT, and OTHER is wrong.",
    "unclosed thinking": "<think>The answer is RIGHT.",
    "none": "I cannot tell.",
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    row: int
    form: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Task:
    """Answers to a task of lm-eval, and how it grades them."""

    env: str
    task: str
    rows: list[dict[str, Any]]
    answers: list[Answer]
    filter: str | None = "flexible-extract"
    prefix: str = ""
    """Begin of every answer, which lm-eval has in the prompt; the answers end at a point or an empty line."""
    metrics: list[str] = field(default_factory=lambda: ["exact_match"])
    shots: list[dict[str, Any]] = field(default_factory=list)
    processed: list[dict[str, Any]] | None = None
    """Rows as lm-eval has them after its `process_docs`, where that is random; None: it processes `rows`."""


def filled(
    forms: dict[str, str], row: int, right: str, other: str, text: str = ""
) -> Iterator[Answer]:
    """Yield an answer of every form."""
    for name, form in forms.items():
        said = form.replace("RIGHT", "\0").replace("right", "\1").replace("OTHER", other)
        said = said.replace("TEXT", text or right).replace("\1", right.lower())
        yield Answer(row=row, form=name, text=said.replace("\0", right))


def choices(
    rows: list[list[str]], golds: list[int], forms: dict[str, str] = CHOICE_FORMS
) -> list[Answer]:
    """Return answers with the right choice and with the next one in its place."""
    made = []
    for i, (options, gold) in enumerate(zip(rows, golds, strict=True)):
        letters = string.ascii_uppercase[: len(options)]
        wrong = (gold + 1) % len(options)
        for stated, other in ((gold, wrong), (wrong, gold)):
            made += filled(forms, i, letters[stated], letters[other], options[stated])
    return made


PLACES = re.split(
    ",", "Oslo,Rome,Cairo,Lima,Quito,Tokyo,Delhi,Paris,Accra,Hanoi,Dakar,Riga,Sofia,Bern,Baku,Doha"
)


def options_of(i: int, num: int) -> list[str]:
    """Return some options."""
    return [PLACES[(i + 3 * j) % len(PLACES)] + ("" if i % 2 else " city") for j in range(num)]


OPTIONS = [options_of(i, 4) for i in range(12)]
GOLDS = [i % 4 for i in range(12)]
TEN = [options_of(i, 10) for i in range(12)]
TEN_GOLDS = [(7 * i) % 10 for i in range(12)]
NUMBERS = [18, 3, 70000, 540, 1200, 64, 260, 45, 366, 694, 13, 5, 25, 104, 48]


def numbers(golds: list[int], forms: dict[str, str] = NUMBER_FORMS) -> list[Answer]:
    """Return answers with the gold number, also with thousands separators, and with another."""
    made = []
    for i, gold in enumerate(golds):
        for right, other in (
            (f"{gold}", f"{gold + 7}"),
            (f"{gold + 7}", f"{gold}"),
            (f"{gold:,}", "9"),
        ):
            made += filled(forms, i, right, other)
    return made


def formal(subset: str, golds: list[str], question: str) -> Task:
    """Return a task of BIG-Bench Hard whose rows differ in their gold answer."""
    rows = [
        {"input": f"{question} ({i}x)", "target": gold, "subset": subset}
        for i, gold in enumerate(golds)
    ]
    made = []
    for i, gold in enumerate(golds):
        other = next(each for each in (*golds, gold) if each != gold)
        for pair in ((gold, other), (other, gold)):
            made += filled(FORMAL_FORMS, i, *pair)
    return Task(
        env="bbh_eval.BBHEvalEnv", task=f"bbh/cot_zeroshot/{subset}.yaml", rows=rows, answers=made
    )


def mathematics() -> list[Answer]:
    made = []
    for i, (_, rights, wrongs) in enumerate(MATH_VALUES):
        for j, value in enumerate([*rights, *wrongs]):
            is_right = j < len(rights)
            made += filled(MATH_FORMS, i, value, wrongs[0] if is_right else rights[0])
    return made


def spans() -> list[Answer]:
    made = []
    for i, span in enumerate(SPANS):
        for answer in filled(SPAN_FORMS, i, span, SPANS[i - 1]):
            is_decimal = any(c in span for c in ".%") and any(c.isdigit() for c in span)
            made.append(replace(answer, form=answer.form + " of a decimal" * is_decimal))
    return made


INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("keywords:existence", {"keywords": ["Sea", "sun"]}),
    ("keywords:frequency", {"keyword": "sun", "frequency": 2, "relation": "at least"}),
    ("keywords:forbidden_words", {"forbidden_words": ["cat", "rain"]}),
    ("keywords:letter_frequency", {"letter": "a", "let_frequency": 5, "let_relation": "at least"}),
    ("language:response_language", {"language": "en"}),
    ("length_constraints:number_sentences", {"num_sentences": 3, "relation": "at least"}),
    ("length_constraints:number_words", {"num_words": 10, "relation": "less than"}),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
    ("detectable_format:constrained_response", {}),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}),
    ("detectable_format:multiple_sections", {"section_spliter": "Section", "num_sections": 2}),
    ("detectable_format:json_format", {}),
    ("detectable_format:title", {}),
    ("combination:two_responses", {}),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem"}),
    ("startend:end_checker", {"end_phrase": "The end"}),
    ("startend:quotation", {}),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
    ),
    ("change_case:english_capital", {}),
    ("change_case:english_lowercase", {}),
    ("punctuation:no_comma", {}),
]
TEXTS = [
    "The sun is over the sea. The sun is warm today, and we all sail away. It is calm.",
    "The cat sat in the rain and waited for the sun to come out again over the wide sea.",
    "It is a conCATenation of rainy days; the SUN and the SEA.",
    "Dear reader,\n\nSo we begin here. P.S. Write soon.",
    "One paragraph here.\n***\nAnother paragraph there.",
    "One.\n\n***\n\nTwo.\n\n***\n\nThree.",
    "Hello [name], welcome to [town]. P. P. S.",
    "* one item\n* another item",
    "- one item of the list\n- another item of the list\n- a third",
    "**bold** and *italic* words stand here in this line of text.",
    "Section 1\nThe begin of the story.\nSection 2\nThe end of it",
    "SECTION 1 is short. Section 2 is shorter.",
    '{"name": "sea", "list": [1, 2]}',
    '```json\n{"name": "sun"}\n```',
    "<<The old man and the sea>>\nHe was an old man who fished alone.",
    "First answer to the question.\n******\nSecond answer to the question.",
    "Same\n******\nSame",
    "Write a poem\nThe sun goes down over the sea at night.",
    "WRITE A POEM about rain. The end",
    "This is how the story goes, my friends. The end.",
    '"This whole text stands in quotation marks, the end"',
    "NASA and the U.S. sent a X-RAY telescope to SPACE.",
    "THIS TEXT IS WRITTEN IN CAPITAL LETTERS FOR ALL OF YOU TO READ.",
    "this text is written in small letters for all of you to read.",
    "My answer is yes.",
    "Well. My answer is maybe. I think.",
    "Die Sonne scheint heute den ganzen Tag, und wir fahren an das Meer.",
    "Dr. Smith met Mr. Jones at 5 p.m. in Washington D.C. They talked. They left!",
    "Why? Because it rains. Yes",
    "",
]
NONE = {"day": "", "month": "", "year": ""}
DATE_OPTIONS = "\nOptions:\n(A) 01/02/2015\n(B) 02/03/2016\n(C) 03/04/2017\n(D) 04/05/2018"

TASKS = {
    "mmlu": [
        Task(
            env="mmlu_eval.MMLUEvalEnv",
            task="mmlu/flan_cot_zeroshot/mmlu_astronomy.yaml",
            rows=[
                {
                    "question": f" Which {i}?",
                    "choices": options,
                    "answer": gold,
                    "subject": "astronomy",
                }
                for i, (options, gold) in enumerate(zip(OPTIONS, GOLDS, strict=True))
            ],
            answers=choices(OPTIONS, GOLDS),
        )
    ],
    "mmlu_pro": [
        Task(
            env="mmlu_pro_eval.MMLUProEvalEnv",
            task="mmlu_pro/mmlu_pro_law.yaml",
            rows=[
                {
                    "question": f"Which {i}?",
                    "options": options,
                    "answer": string.ascii_uppercase[gold],
                    "answer_index": gold,
                    "cot_content": "",
                    "category": "law",
                }
                for i, (options, gold) in enumerate(zip(TEN, TEN_GOLDS, strict=True))
            ],
            shots=[
                {
                    "question": f"And {i}?",
                    "options": TEN[i],
                    "answer": "B",
                    "answer_index": 1,
                    "cot_content": f"A: Let's think step by step. Reason {i}. The answer is (B).",
                    "category": "law",
                }
                for i in range(5)
            ],
            filter="custom-extract",
            answers=choices(TEN, TEN_GOLDS),
        )
    ],
    "gpqa": [
        Task(
            env="gpqa_eval.GPQAEvalEnv",
            task="gpqa/cot_zeroshot/gpqa_diamond_cot_zeroshot.yaml",
            rows=[
                {
                    "Question": f"Which {i}?",
                    "Correct Answer": options[0],
                    **{f"Incorrect Answer {j}": options[j] for j in (1, 2, 3)},
                }
                for i, options in enumerate(OPTIONS)
            ],
            answers=[],
        )
    ],
    "arc": [
        Task(
            env="arc_eval.ARCEvalEnv",
            task="arc/arc_challenge_chat.yaml",
            rows=[
                {
                    "question": f"Which {i}?",
                    "choices": {"text": options, "label": list("ABCD" if i % 3 else "1234")},
                    "answerKey": ("ABCD" if i % 3 else "1234")[gold],
                }
                for i, (options, gold) in enumerate(zip(OPTIONS * 2, GOLDS * 2, strict=True))
            ],
            filter="remove_whitespace",
            prefix="The best answer is ",
            answers=choices(OPTIONS * 2, GOLDS * 2, LETTER_FORMS),
        )
    ],
    "hellaswag": [
        Task(
            env="hellaswag_eval.HellaSwagEvalEnv",
            task="hellaswag/hellaswag.yaml",
            rows=[
                {
                    "activity_label": "Baking",
                    "ctx_a": f"[header] How to  bake {i} [title] Heat the oven.",
                    "ctx_b": f"{PLACES[i]} and then",
                    "endings": [
                        f" [step] goes on [title] {place} [odd] ends." for place in PLACES[:4]
                    ],
                    "label": str(i % 4),
                }
                for i in range(12)
            ],
            answers=[],  # graded by likelihood
        )
    ],
    "gsm8k": [
        Task(
            env="gsm8k_eval.GSM8KEvalEnv",
            task="gsm8k/gsm8k-cot-zeroshot.yaml",
            rows=[
                {"question": f"How many {i}?", "answer": f"So.\n#### {n:,}"}
                for i, n in enumerate(NUMBERS)
            ],
            answers=numbers(NUMBERS),
        )
    ],
    "math500": [
        Task(
            env="math500_eval.MATH500EvalEnv",
            task="minerva_math/minerva_math500.yaml",
            rows=[
                {
                    "problem": f"Find ${gold}$.",
                    "answer": gold,
                    "solution": f"It is $\\boxed{{{gold}}}$.",
                }
                for gold, *_ in MATH_VALUES
            ],
            filter=None,
            metrics=["math_verify"],
            answers=mathematics(),
        )
    ],
    "aime": [
        Task(
            env="aime_eval.AIMEEvalEnv",
            task="aime/aime24.yaml",
            rows=[
                {
                    "problem": f"Find {n}.",
                    "Problem": f"Find {n}.",
                    "answer": f"{n}",
                    "Answer": f"{n}",
                    "year": "2024",
                }
                for n in range(20, 960, 62)
            ],
            filter=None,
            answers=numbers(list(range(20, 960, 62))),
        )
    ],
    "bbh": [
        formal("date_understanding", ["(A)", "(B)", "(C)", "(D)"], f"Which day?{DATE_OPTIONS}\n"),
        formal("boolean_expressions", ["True", "False"], "not ( True ) and ( True ) is"),
        formal("causal_judgement", ["Yes", "No"], "Did he cause it?\nOptions:\n- Yes\n- No"),
        formal("multistep_arithmetic_two", ["-50", "8", "123", "0", "-7"], "((-1 + 2) * 3) ="),
        formal(
            "formal_fallacies", ["valid", "invalid"], "Is it valid?\nOptions:\n- valid\n- invalid"
        ),
        formal("web_of_lies", ["Yes", "No"], "Does Ann tell the truth?"),
        formal("object_counting", ["3", "12", "7"], "How many fruits?"),
    ],
    "drop": [
        Task(
            env="drop_eval.DROPEvalEnv",
            task="drop/default.yaml",
            rows=[
                {
                    "query_id": str(i),
                    "passage": "He ran.",
                    "question": f"What {i}?",
                    "answer": {"number": "", "spans": [span], "date": NONE},
                    "validated_answers": {
                        "number": ["", ""],
                        "spans": [[span], [span.lower()]],
                        "date": [NONE, NONE],
                    },
                }
                for i, span in enumerate(SPANS)
            ],
            filter=None,
            metrics=["f1", "em"],
            answers=spans(),
        )
    ],
    "ifeval": [
        Task(
            env="ifeval_eval.IFEvalEnv",
            task="ifeval/ifeval.yaml",
            rows=[
                {
                    "key": i,
                    "prompt": f"Write {i}.",
                    "instruction_id_list": [name],
                    "kwargs": [arguments],
                }
                for i, (name, arguments) in enumerate(INSTRUCTIONS)
            ],
            filter=None,
            metrics=["prompt_level_strict_acc"],
            answers=[
                Answer(row=i, form=name, text=text)
                for i, (name, _) in enumerate(INSTRUCTIONS)
                for text in TEXTS
            ],
        )
    ],
}
"""By benchmark."""
