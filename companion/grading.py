"""What the checkers of the exercises share: run an answer, and name the input that broke it."""
from .exercise import Wrong, _NotAttempted


def run(what, answer, *arguments, **options):
    """``answer(...)``; whatever it raises becomes a Wrong that names the input ``what``."""
    try:
        return answer(*arguments, **options)
    except (Wrong, _NotAttempted):
        raise
    except Exception as error:
        raise Wrong(f"{what}: your code raised {type(error).__name__}: {error}") from error


def refuses(what, answer, *arguments, **options):
    """``answer(...)`` must raise a ValueError, as for an impossible input; Wrong if it does not."""
    try:
        got = answer(*arguments, **options)
    except ValueError:
        return
    except (Wrong, _NotAttempted):
        raise
    except Exception as error:
        raise Wrong(f"{what} should be a ValueError, not {type(error).__name__}: {error}") from error
    raise Wrong(f"{what} should be a ValueError, not {got!r:.60}")


def number(what, got):
    """``got`` as a plain number (numpy's and 0-d tensors too); Wrong for anything else."""
    if hasattr(got, "item") and getattr(got, "ndim", 1) == 0:
        got = got.item()
    if got is None:
        raise Wrong(f"{what}: your function returned None; is a return missing?")
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        raise Wrong(f"{what}: expected a number, got {got!r}")
    return got
