"""What the checkers of exercises on real ranks share."""
import dis
import marshal

from . import ranks
from .exercise import Wrong, _does_nothing, _NotAttempted

_ANSWER = """
import marshal, types
import torch.nn.functional as F
answer = types.FunctionType(marshal.loads(code), globals(), "answer", defaults,
                            tuple(map(types.CellType, cells)))
"""


def on_ranks(what, answer, nproc, cell, **values):
    """Run ``cell`` on real ranks, with the reader's function as ``answer``; its ``report`` by rank.

    The function travels as code, with what it closes over; there it finds torch, dist, F, rank
    and world_size. values: more names for the cell. A failure becomes a Wrong that names ``what``.
    """
    function = answer.answer
    if not hasattr(function, "__code__"):
        raise Wrong(f"{what}: expected a plain function, got {type(function).__name__}")
    if _is_starter(function):
        raise _NotAttempted
    values |= {"code": marshal.dumps(function.__code__), "defaults": function.__defaults__,
               "cells": [c.cell_contents for c in function.__closure__ or ()]}
    try:
        outcome = ranks.run(_ANSWER + cell, nproc, values=values, get=["report"], backend="gloo")
    except ranks.RanksFailed as failed:
        raise Wrong(f"{what}: {failed}") from failed
    return outcome.values["report"]


def _is_starter(function):
    """Whether its body is empty; to return a constant is an answer, if a wrong one."""
    return _does_nothing(function) and [
        step.argval for step in dis.get_instructions(function)
        if "CONST" in step.opname][-1] in (None, ...)
