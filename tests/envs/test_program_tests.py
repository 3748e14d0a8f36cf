"""Comparing what a program prints with what it should print."""

import time

import pytest

from atroposlib.envs.program_tests import is_same_text, is_same_value

BIG = "1" * 400_000


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("yes \n no\n", "yes\nno", True),
        ("1  2", "1 2", True),
        ("8.0", "8", True),
        ("0.3333333333", "0.333333", True),
        ("123456789012.5", "123456789012.7", True),
        ("1e-7", "0", True),
        ("+5 -0", "5 0", True),
        ("1e3", "1000.0", True),
        ("0", "0.00001", False),
        ("0.00001", "0.00002", False),
        ("0.5001", "0.5", False),
        ("1000000000", "1000000001", False),
        ("12345678901234567890", "12345678901234567891", False),
        (BIG, BIG + ".0", False),
        (BIG, BIG[:-1] + "2", False),
        ("nan", "0", False),
        ("inf", "1e999", False),
        ("1e999999999", "1e999999998", False),
        ("1e99999999999999999999", "1", False),
        ("1_0", "10", False),
        ("a 1.0", "a 1", False),
        ("1 2", "1", False),
        ("1\n", "1\n2", False),
        ("", "0", False),
    ],
)
def test_integers_are_equal_and_decimals_near(printed: str, expected: str, is_same: bool) -> None:
    begin = time.process_time()
    assert is_same_text(printed, expected) is is_same
    assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("debug\n[1, 2.0]\n", "[1.0,2]", True),
        ("[0.30000000000000004]", "[0.3]", True),
        ('{"a": [1e22], "b": null}', '{"b": null, "a": [10000000000000000000000]}', True),
        ("NaN", "NaN", True),
        ("0", "0.00001", False),
        ("0.3001", "0.3", False),
        ("9007199254740993", "9007199254740992", False),
        ("1" * 4_000, "1.5", False),
        ("1" * 9_000, "1.5", False),
        ("1e999", "1.5", False),
        ("true", "1", False),
        ("1.0", "true", False),
        ('"1"', "1", False),
        ("[1]", "[1, 2]", False),
        ('{"a": 1}', '{"b": 1}', False),
        ("[" * 90_000, "[]", False),
        ("null", "[]", False),
        ("[1, 2", "[1, 2]", False),
    ],
)
def test_values_are_equal_and_floats_near(printed: str, expected: str, is_same: bool) -> None:
    assert is_same_value(printed, expected) is is_same
