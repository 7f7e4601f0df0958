"""What the checkers of exercises on real ranks share."""
import dis
import marshal

from . import ranks
from .exercise import Wrong, _does_nothing, _NotAttempted

SECONDS = 15  # that a cell with an answer may take; a right one takes about one

# within() runs an answer that may hang on a thread, since a send in C++ hears no signal, and says
# in which line of the answer it was. Without it a cell that hangs is ended after SECONDS.
_ANSWER = """
import marshal, sys, threading, types
import torch.nn.functional as F
answer = types.FunctionType(marshal.loads(code), globals(), "answer", defaults,
                            tuple(map(types.CellType, cells)))


def within(seconds, job, hint):
    ended = {}

    def run():
        try:
            ended["value"] = job()
        except Exception as error:
            ended["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        frame, code = sys._current_frames()[thread.ident], answer.__code__
        while frame.f_back and frame.f_code.co_filename != code.co_filename:
            frame = frame.f_back
        raise TimeoutError(f"no end within {seconds:g} s: still in line "
                           f"{frame.f_lineno - code.co_firstlineno + 1} of your function; {hint()}")
    if "error" in ended:
        raise ended["error"]
    return ended["value"]
"""


def on_ranks(what, answer, nproc, cell, **values):
    """Run ``cell`` on real ranks, with the reader's function as ``answer``; its ``report`` by rank.

    The function travels as code, with what it closes over; there it finds torch, dist, F, rank,
    world_size and within. values: more names for the cell. A failure becomes a Wrong that names
    ``what``.
    """
    function = answer.answer
    if not hasattr(function, "__code__"):
        raise Wrong(f"{what}: expected a plain function, got {type(function).__name__}")
    if _is_starter(function):
        raise _NotAttempted
    values |= {"code": marshal.dumps(function.__code__), "defaults": function.__defaults__,
               "cells": [c.cell_contents for c in function.__closure__ or ()]}
    try:
        outcome = ranks.run(_ANSWER + cell, nproc, values=values, get=["report"], backend="gloo",
                            timeout=SECONDS)
    except ranks.RanksFailed as failed:
        raise Wrong(f"{what}: {failed}") from failed
    return outcome.values["report"]


def _is_starter(function):
    """Whether its body is empty; to return a constant is an answer, if a wrong one."""
    return _does_nothing(function) and [
        step.argval for step in dis.get_instructions(function)
        if "CONST" in step.opname][-1] in (None, ...)
