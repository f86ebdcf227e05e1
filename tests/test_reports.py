"""Every report of a user of such a system has a test. Most tests bear its number, in their name, in a comment or in the
table of tests/runtime/server/test_reports.py; these do not:

R33   the budget ends inside the thinking            runtime/server/test_reasoning::test_a_budget_that_ends_inside_the_thought_gives_no_content
R57   a compile that ran out of time is tried again  grammar/test_compiler::test_a_time_out_is_tried_again
R63   the masks of many rows in one call             grammar/test_fill::test_copies_of_one_grammar_are_filled_at_once
R77   drafts under a grammar                         runtime/scheduler/test_drafts::test_drafts_are_verified_under_the_grammar
R101  cold, from the cache, cold                     e2e/test_same_text::test_forked
R109  a fork before any text                         lang/test_program::test_a_fork_before_any_text_works
R111  a blank in the prompt or in the options        lang/test_transcript::test_a_blank_in_the_prompt_or_in_the_options_gives_the_same_tokens
R115  images: none is taken, and that is said        lang/test_program::test_images
R117  a thousand async programs, few threads         lang/test_program::test_a_thousand_async_programs
R123  what is not enforced is named, never dropped   grammar/test_reports::test_no_keyword_is_dropped_in_silence
R125  a template is rendered in a sandbox            text/test_chat::test_the_sandbox_holds
"""  # noqa: E501 - a table

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = re.findall(r"^R(\d+) .* (\S+)::(\w+)$", __doc__ or "", re.MULTILINE)
# fmt: off
REPORTS = {
    1, 2, 3, 5, 7, 9, 11, 13, 15, 17, 19, 20, 21, 23, 25, 26, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 48,
    49, 51, 53, 55, 57, 59, 61, 63, 64, 65, 67, 69, 71, 73, 75, 77, 79, 81, 82, 83, 84, 85, 87, 89, 90, 91, 93,
    95, 97, 99, 101, 103, 105, 106, 107, 109, 111, 113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135,
    137, 139, 141, 143, 145,
}
# fmt: on


def test_every_report_has_a_test() -> None:
    named = {int(number) for number, _, _ in ROWS}
    for file in TESTS.rglob("test_*.py"):
        if file != Path(__file__):
            text = file.read_text(encoding="utf-8")
            named |= {int(number) for number in re.findall(r"\bR(\d{1,3})\b", text)}
            numbers = re.findall(r"def test((?:_r\d+)+)_", text)
            named |= {int(number) for several in numbers for number in several.split("_r")[1:]}
    assert named >= REPORTS


def test_the_tests_of_the_table_are_there() -> None:
    for _, file, name in ROWS:
        assert f"def {name}(" in (TESTS / f"{file}.py").read_text(encoding="utf-8"), f"{file} has no {name}"
