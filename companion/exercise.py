"""``check("memory-1", my_function)``: grade an exercise and say what was wrong.

The checkers live in ``companion.exercises.<chapter>``: a dictionary ``CHECKS``
from an exercise's id to a function of the reader's answer that raises ``Wrong``.
"""
import difflib
import dis
import importlib
import pkgutil


class Wrong(Exception):
    """What is not right yet about an answer, in one line for the reader."""


def _checks():
    from . import exercises
    found = {}
    for module in pkgutil.iter_modules(exercises.__path__):
        found |= importlib.import_module(f"companion.exercises.{module.name}").CHECKS
    return found


def _one_line(error):
    return " ".join(str(error).split()) or "no message"


def check(id, answer):
    """Grade ``answer`` (usually the reader's function) for exercise ``id``; print one line.

    An answer that is None or Ellipsis, or a function that returns Ellipsis or has an
    empty body, counts as not attempted. Raises ValueError for an unknown id only:
    whatever the reader's own function raises becomes part of the line.
    """
    checks = _checks()
    if id not in checks:
        near = difflib.get_close_matches(str(id), checks, n=1)
        raise ValueError(f"check: no exercise {id!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    try:
        attempted = answer is not None and answer is not ...
        message = checks[id](_Attempt(answer)) if attempted else "not attempted"
    except _NotAttempted:
        message = "not attempted"
    except Wrong as wrong:
        message = f"not yet. {_one_line(wrong)}"
    except Exception as error:
        message = f"not yet. Your code raised {type(error).__name__}: {_one_line(error)}"
    print(f"{id}: {message or 'right'}")


class _NotAttempted(Exception):
    pass


class _Attempt:
    """The reader's answer; calling it tells an untouched starter from a wrong value."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, *args, **kwargs):
        if not callable(self.answer):
            raise Wrong(f"expected a function, got {type(self.answer).__name__}")
        value = self.answer(*args, **kwargs)
        if value is ... or (value is None and _does_nothing(self.answer)):
            raise _NotAttempted
        return value


_NOTHING = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "LOAD_CONST", "POP_TOP", "RETURN_CONST", "RETURN_VALUE"}


def _does_nothing(function):
    """True for a body of ``...``, ``pass`` or a docstring only, as starters have."""
    code = getattr(function, "__code__", None)
    return code is not None and all(step.opname in _NOTHING for step in dis.get_instructions(code))
