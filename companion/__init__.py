"""Helpers that the chapters of *Scaling and Efficiency* share.

    from companion import measured, claim, check, pick_device

Names load on first use, so that importing the package costs milliseconds and
never imports torch. In a notebook the import also registers ``%%needs_gpu``.
"""
import importlib
import sys

# public name -> the module that defines it
_EXPORTS = {
    "measured": "report",
    "claim": "report",
    "ClaimFailed": "report",
    "check": "exercise",
    "pick_device": "device",
    "pick_dtype": "device",
    "device_name": "device",
    "Film": "counting",
    "saved_tensors": "counting",
    "storage_bytes": "counting",
    "GPUS": "hardware",
    "gpu": "hardware",
    "plan": "planner",
    "fashion_mnist": "datasets",
    "smollm2": "pretrained",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name):
    if name not in _EXPORTS:
        raise AttributeError(f"module 'companion' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"companion.{_EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


def _register_magics():
    """Only inside a running IPython; elsewhere there is nothing to register."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython and hasattr(ipython, "get_ipython") else None
    if shell is not None:
        from .magics import register
        register(shell)


_register_magics()
