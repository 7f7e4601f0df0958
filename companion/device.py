"""Which device and which 16-bit format a chapter uses, by capability."""


def pick_device():
    """``cuda`` where there is a CUDA GPU, else ``cpu``.

    Apple's ``mps`` is left alone: the book's numbers were never checked there,
    and training on it has differed from the CPU without any error.
    """
    import torch
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(device=None):
    """The 16-bit format that ``device`` (default: ``pick_device()``) computes in.

    bfloat16 on a CPU and on GPUs of compute capability 8.0 or more, float16 on
    older GPUs: a T4 answers yes to ``is_bf16_supported`` but only emulates it.
    """
    import torch
    device = torch.device(device) if device is not None else pick_device()
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    return torch.bfloat16


def device_name(device=None):
    """What the machine calls ``device``; wrap it in ``measured`` to print it."""
    import torch
    device = torch.device(device) if device is not None else pick_device()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
