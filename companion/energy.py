"""The energy a GPU has drawn, read from the card's own counter.

    from companion.energy import joules
    torch.cuda.synchronize(); before = joules()
    ...                                             # seconds of work
    torch.cuda.synchronize(); spent = joules() - before

Limits: the counter moves in steps of some tens of milliseconds, so time seconds of work. It
counts the whole board, idle power included, and nothing of the host. Volta or newer.

Source: NVIDIA, NVML API, nvmlDeviceGetTotalEnergyConsumption.   Taught in: chapters/roofline.
"""
import ctypes

LIBRARY = "libnvidia-ml.so.1"  # comes with the driver


def joules(device=None):
    """Energy that ``device`` (default: torch's current GPU) drew since its driver started [J].

    Raises RuntimeError where there is no such counter: no driver, an old card, a slice of one.
    """
    import torch
    device = torch.cuda.current_device() if device is None else device
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    try:
        nvml = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise RuntimeError(f"energy: {LIBRARY} cannot be loaded: {error}") from error
    handle, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    _call(nvml, "nvmlInit_v2")
    try:
        _call(nvml, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}".encode(), ctypes.byref(handle))
        _call(nvml, "nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.byref(millijoules))
    finally:
        _call(nvml, "nvmlShutdown")
    return millijoules.value / 1e3


def _call(nvml, name, *arguments):
    code = getattr(nvml, name)(*arguments)
    if code:
        raise RuntimeError(f"energy: {name} failed with code {code}")
