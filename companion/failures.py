"""Failures of a large job: how often, what they cost, and how often to save.

    from companion.failures import best_interval, lost_share, simulate
    best_interval(save=60, mtbf=11_135)          # seconds of training between saves
    lost_share(1156, save=60, mtbf=11_135)       # of all time, by the exact formula

Times are seconds. A job trains for ``interval``, saves for ``save`` (training stands still),
and so on. Failures come at random, ``mtbf`` apart on average, while it trains or saves; what
was done since the last save is lost, and the job is back after ``restart``, during which
nothing fails.

Standard library only.   Taught in: chapters/composing.
"""
import math
import random

__all__ = ["best_interval", "lost_share", "simulate"]


def _check(**values):
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"failures: {name} must be above 0 s, got {value!r}")


def best_interval(save, mtbf):
    """Young's interval, sqrt(2 * save * mtbf): the first-order optimum.

    Source: J. W. Young, CACM 17(9), 1974, doi:10.1145/361147.361115.
    """
    _check(save=save, mtbf=mtbf)
    return math.sqrt(2 * save * mtbf)


def lost_share(interval, save, mtbf, restart=0.0):
    """Share of all time that is not training that counts: saves, lost work, restarts.

    Exact for exponential failures: an interval that must run interval + save without failing
    takes (mtbf + restart) * (exp((interval + save) / mtbf) - 1) on average.
    Source: J. T. Daly, FGCS 22(3), 2006, doi:10.1016/j.future.2004.11.016.
    """
    _check(interval=interval, save=save, mtbf=mtbf)
    return 1 - interval / ((mtbf + restart) * math.expm1((interval + save) / mtbf))


def simulate(interval, save, mtbf, restart=0.0, failures=10_000, seed=0):
    """The same share, by playing a job through ``failures`` failures drawn from ``seed``."""
    _check(interval=interval, save=save, mtbf=mtbf)
    draw = random.Random(seed)
    total = kept = 0.0
    for _ in range(failures):
        alive = draw.expovariate(1 / mtbf)
        kept += interval * (alive // (interval + save))
        total += alive + restart
    return 1 - kept / total
