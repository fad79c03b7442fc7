"""Patterns of hostile configs are refused before they run; patterns of real configs are not."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.formats.samples import census, checkpoint, gptq_config, pack_gptq, truth
from w4plugin import module_rules, name_pattern
from w4plugin.errors import CorruptError, UnsafeError, W4Error
from w4plugin.module_rules import Expected

REAL = [
    r".*\.18\..*gate.*",
    r"-:.*\.1\..*".removeprefix("-:"),
    r".*layers\.\d+\.mlp\..*",
    r"^(?!.*(?:down_proj|up_proj)).*$",
    r"model\.(?:language_model\.)?layers\.\d+\.(?:mlp|self_attn)\..*",
    r".*\.layers\.\d+\..*\.experts\.\d+\.(gate|up|down)_proj",
    r"model\.layers\.(?:" + "|".join(map(str, range(60))) + r")\.mlp\..*",
    r"(?i).*VISION[_.]tower.*",
    r".*self_attn\.[qkv]_proj$",
    r".*self_attn.o_proj*",
    r".*\.(?:1[6-9]|20|21)\..*",
    r"^(?!.*self_attn\.(?:q_proj|k_proj|v_proj|b_proj|f_a_proj)$).*$",
    r"^(?!.*\.mlp\.experts(?:\.|$)).*$",
    r"^(?!.*(?:self_attn\.(?:q_proj|k_proj|v_proj)|vision_tower\..*|mm_projector\..*)$).*$",
    r"model\.layers\.[0-9]{1,2}\..*",
    r"(^|.*\.)lm_head",
    r".*(?<!shared_)experts.*",
    r"(?P<block>.*)\.mlp\.gate$",
    "|".join(rf"model\.visual\.blocks\.{i}\.attn\.qkv" for i in range(120)),
]

HOSTILE = [
    r"(a+)+b",
    r"(a*)*b",
    r"(a|a)*b",
    r"(a|aa)+$",
    r"([a-z]+)*\.x",
    r"(?:(?:a?){9}){9}b",
    r"(?:a?){64}b",
    "a?" * 40 + "a" * 40,
    "(?:a|a)" * 40 + "b",
    r".*a.*a.*a.*a.*a.*a.*a.*b",
    r"(.*)(.*)(.*)(.*)(.*)(.*)x",
    r"(?=(a+)+b)a",
    r"(?x)(a+)+b",
    r"(?:a{0,200}){50}b",
    r"(a{2,}){2,}b",
    r"((a{1,9}){1,9}){1,9}b",
    r"(?:){1000000000}a",
    r"((x{1000}){1000}){1000}",
    r"x{4294967294}",
    "(" * 500 + "a" + ")" * 500,
    "a" * 20_000,
    r"(?(1)a|b)",
]


@pytest.mark.parametrize("pattern", REAL)
def test_patterns_of_real_configs_pass(pattern: str) -> None:
    assert name_pattern.compiled("dynamic", pattern) == re.compile(pattern)


@pytest.mark.parametrize("pattern", HOSTILE, ids=lambda p: p[:24])
def test_hostile_patterns_are_refused_at_once(pattern: str) -> None:
    start = time.process_time()
    for anywhere in (False, True):
        with pytest.raises(UnsafeError, match="dynamic") as error:
            name_pattern.compiled("dynamic", pattern, anywhere=anywhere)
    assert time.process_time() - start < 1
    assert error.value.todo
    assert len(str(error.value)) < 400


@pytest.mark.parametrize("pattern", [r"a*a*a*a*b", r"[^b]*.*[a-z]*.*b", "a*a*" + "a?" * 7 + "b"])
def test_the_worst_that_may_pass_comes_back(pattern: str) -> None:
    found = name_pattern.compiled("dynamic", pattern)
    start = time.process_time()
    assert found.match("a" * name_pattern.LONGEST_NAME) is None
    assert time.process_time() - start < 30


@pytest.mark.parametrize("pattern", ["(", "a)", "[", "*", "(?P<1>a)", "a{3,2}", r"\9", "(?<=a*)b"])
def test_what_is_no_regex_is_said_to_be_none(pattern: str) -> None:
    with pytest.raises(CorruptError, match="an invalid regular expression"):
        name_pattern.compiled("ignore", pattern)


@settings(deadline=None, max_examples=500)
@given(st.text(alphabet="ab.*+?|(){}[]\\^$1,:!=<P>-", max_size=24), st.text(alphabet="ab.1", max_size=40))
def test_any_pattern_is_a_bounded_one_or_one_of_our_errors(pattern: str, name: str) -> None:
    try:
        found = name_pattern.compiled("dynamic", pattern, anywhere=True)
    except W4Error:
        return
    found.search(name)


RULES: list[dict[str, Any]] = [
    {"dynamic": {"-:(a+)+b": {}}},
    {"dynamic": {"+:(a|a)*b": {"bits": 8}}},
    {"extra_config": {"(a+)+b": {"bits": 8}}},
    {"ignore": ["re:(a+)+b"]},
    {"config_groups": {"g": {"targets": ["re:(a+)+b"], "weights": {"num_bits": 4}}}},
]


@pytest.mark.parametrize("rules", RULES, ids=lambda r: next(iter(r)))
def test_every_key_that_holds_patterns_is_guarded(rules: dict[str, Any]) -> None:
    t = truth(lowest=1)
    names = {"a" * 60: pack_gptq(t), "model.layers.0.up": pack_gptq(t)}
    with pytest.raises(UnsafeError, match=next(iter(rules))):
        census(checkpoint(**names), gptq_config(t, **rules))


def test_patterns_do_not_run_on_absurd_names() -> None:
    rules = module_rules.parse({"dynamic": {"-:.*a.*b": {}}})
    with pytest.raises(UnsafeError, match="a name of 300 characters"):
        rules.expect("a" * 300, Expected(None, 4, 128, True, False))


def test_the_sum_over_names_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_rules, "PATIENCE", 0.05)
    rules = module_rules.parse({"dynamic": {"-:a*a*a*b": {}}})
    names = ["a" * 250 + str(i) for i in range(1000)]
    with pytest.raises(UnsafeError, match="patterns that have taken"):
        rules.hits_any(rules.rules[0], names)
