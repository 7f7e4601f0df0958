"""No exercise without a solution, no chapter without a file of answers."""
from pathlib import Path

from companion import exercise
from notebooks import CHAPTERS

from .checking import solutions


def test_every_exercise_has_a_solution_and_a_checker():
    found = {id for text in CHAPTERS.glob("*.md") for id in solutions(text.stem)}
    assert found == set(exercise._checks())


def test_every_chapter_has_a_file_here():
    files = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files - {"all"} == {id.rpartition("-")[0] for id in exercise._checks()}
