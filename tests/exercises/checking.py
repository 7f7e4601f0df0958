"""The tests that each chapter's file runs on its own RIGHT and WRONG.

RIGHT (may be missing): [(exercise, another right answer)], besides the chapter's solution.
WRONG: {exercise: [(wrong answer, what its message must name)]}.
"""
import re
import warnings

import jupytext
import pytest
import torch

from companion import exercise
from notebooks import CHAPTERS, code_cells, tags

__all__ = ["test_a_right_answer_passes", "test_a_starter_is_not_attempted",
           "test_a_wrong_answer_is_told_where", "test_every_exercise_has_wrong_answers",
           "test_nonsense_gets_a_line_too"]


def solutions(chapter):
    """{exercise: source of its solution cell}, from the chapter's text."""
    found = {}
    for cell in code_cells(jupytext.read(CHAPTERS / f"{chapter}.md")):
        if "solution" in tags(cell):
            found |= {id: cell.source for id in re.findall(r'check\("([^"]+)"', cell.source)}
    return found


def said(id, answer, capsys):
    exercise.check(id, answer)
    return capsys.readouterr().out.strip()


def test_a_right_answer_passes(id, right, capsys):
    if isinstance(right, str):  # the solution's cell
        exec(right, {"check": exercise.check, "torch": torch})
        assert capsys.readouterr().out.strip() == f"{id}: right"
    else:
        assert said(id, right, capsys) == f"{id}: right"


@pytest.mark.parametrize("starter", [lambda *a, **k: ..., lambda *a, **k: None, ..., None])
def test_a_starter_is_not_attempted(id, starter, capsys):
    assert said(id, starter, capsys) == f"{id}: not attempted"


def test_every_exercise_has_wrong_answers(chapter, wrong_answers):
    assert set(wrong_answers) == {id for id in exercise._checks() if id.rpartition("-")[0] == chapter}
    assert all(len(wrong) >= 3 for wrong in wrong_answers.values())


def test_a_wrong_answer_is_told_where(id, wrong, named, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        line = said(id, wrong, capsys)
    assert line.startswith(f"{id}: not yet. ") and named in line, line


@pytest.mark.parametrize("nonsense", [
    3, "text", lambda *a, **k: "text", lambda *a, **k: float("nan"), lambda: 1])
def test_nonsense_gets_a_line_too(id, nonsense, capsys):
    line = said(id, nonsense, capsys)
    assert line.startswith(f"{id}: not yet. ") and "\n" not in line, line
