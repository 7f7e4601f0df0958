"""Run chapters as a Tesla T4 would meet them: on a GPU if there is one, else without GPU cells.

    t4.py [CHAPTER...]

Colab lends a T4: compute capability 7.5, no bfloat16 or fp8 units, no flash attention, 16 GB,
two CPU cores, and here Triton cannot be imported. On another GPU, torch is made to describe a
T4, its memory is capped, and what a T4's units cannot do raises. On a machine without a GPU only
the choices by capability are tried. Claims about speed may miss their bands: they are counted,
not errors, since the speed is another card's.
"""
import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time

from notebooks import CHAPTERS, ROOT, Refused, code_cells, is_gpu, pick
from sync import read_text

POSE = r'''
import json, os, sys, types
import matplotlib
matplotlib.use("Agg")
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
MEMORY = 15_828_320_256
if torch.cuda.is_available():
    properties = torch.cuda.get_device_properties(0)
    real, uuid = properties.total_memory, properties.uuid
    real_name = torch.cuda.get_device_name()
    torch.cuda.set_per_process_memory_fraction(MEMORY / real)
else:
    uuid = None
sys.modules["triton"] = None  # importing it fails
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_capability = lambda *_: (7, 5)
torch.cuda.is_bf16_supported = lambda *_, **__: True  # by emulation, as a T4 answers
torch.cuda.get_device_name = lambda *_: "Tesla T4"
torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(
    name="Tesla T4", major=7, minor=5, total_memory=MEMORY, multi_processor_count=40, uuid=uuid,
    L2_cache_size=4 * 2**20, shared_memory_per_multiprocessor=64 * 2**10, warp_size=32,
    shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=64 * 2**10,
    regs_per_multiprocessor=65536, max_threads_per_multi_processor=1024)
real_info = torch.cuda.mem_get_info
torch.cuda.mem_get_info = lambda *_: (MEMORY - real_info()[1] + real_info()[0], MEMORY)

HEAVY = {"mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product_efficient_attention"}


class NoUnits(TorchDispatchMode):
    """Products in bf16 and fp8 on the GPU raise: a T4 has no units for them."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator._schema.name.split("::")[1]
        if name == "_scaled_mm" or name in HEAVY and any(
                isinstance(a, torch.Tensor) and a.is_cuda and a.dtype == torch.bfloat16 for a in args):
            raise RuntimeError(f"{name}: a T4 has no units for this format")
        return operator(*args, **(kwargs or {}))


from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
sys.path.insert(0, os.environ["CHECKOUT"])
from companion import hardware, pick_dtype
if torch.cuda.is_available():  # its speed is held against its own data sheet, less what a T4 lacks
    import dataclasses
    look_up = hardware.gpu
    t4, own = look_up("T4"), look_up(real_name)  # ValueError: add the card to the registry
    lacks = {f.name: None for f in dataclasses.fields(t4) if getattr(t4, f.name) is None}
    posing = dataclasses.replace(own, sms=t4.sms, **lacks)
    hardware.gpu = lambda name: posing if name == "Tesla T4" else look_up(name)
assert pick_dtype("cuda") == torch.float16
for number, source in enumerate(json.load(sys.stdin)):
    print(f"\n@cell {number}", flush=True)
    if torch.cuda.is_available() and source.startswith("%%needs_gpu"):
        with NoUnits(), sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
            result = shell.run_cell(source)  # a T4 has no flash attention
    else:
        result = shell.run_cell(source)
    if not result.success:
        sys.exit(f"code cell {number} failed: {result.error_in_exec or result.error_before_exec!r}")
print("\nall ran")
'''


def on_a_t4(sources, folder):
    """Run cells in one IPython posing as on a T4: (the last line it said, all that it said)."""
    environment = {**os.environ, "CHECKOUT": str(ROOT), "IPYTHONDIR": str(folder),
                   "COMPANION_STRICT": "0", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2",
                   "PYTHONWARNINGS": "ignore::UserWarning"}
    done = subprocess.run([sys.executable, "-c", POSE], input=json.dumps(sources), cwd=folder,
                          capture_output=True, text=True, env=environment)
    said = (done.stderr if done.returncode else done.stdout).strip() or f"exit {done.returncode}"
    return said.splitlines()[-1], done.stdout + done.stderr


def report(name, has_gpu):
    """Run one chapter; print a line, then what each GPU cell said that it cannot show. True: all ran."""
    cells = code_cells(read_text(CHAPTERS / f"{name}.md"))[1:]  # without the set-up cell
    if not has_gpu:
        cells = [c for c in cells if not is_gpu(c)]
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        last, text = on_a_t4([c.source for c in cells], folder)
    missed = re.findall(r"^✗ (C\d+)", text, re.M)
    print(f"{name}: {last}; {len(cells)} cells, {sum(map(is_gpu, cells))} of them for a GPU, "
          f"{time.perf_counter() - started:.1f} s; bands missed: {' '.join(missed) or 'none'}", flush=True)
    for line in re.findall(r"^.*(?:needs? (?:compute|a GPU|Triton|2|sm)|capability).*$", text, re.M):
        print(f"    {line.strip()[:160]}")
    if last != "all ran":
        print("    " + "\n    ".join(text.strip().splitlines()[-12:]))
    return last == "all ran"


def main(argv):
    import torch
    parser = argparse.ArgumentParser(prog="t4", description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*")
    names = pick(parser.parse_args(argv).chapters)
    results = [report(name, torch.cuda.is_available()) for name in names]
    return 0 if all(results) else 1


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Refused as refused:
        sys.exit(f"t4: {refused}")
    except KeyboardInterrupt:
        sys.exit("t4: interrupted")
