"""Where a measurement came from: written beside every result in benchmarks/results."""
import hashlib
import json
import platform
import re
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"


def provenance(script):
    """When, on what, with which versions, and a hash of the script that measured."""
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    packages = {"torch": torch.__version__, "python": platform.python_version()}
    for name in ("triton", "numpy"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return {
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "device": ", ".join(gpus) or "CPU", "versions": packages, "command": re.sub(r" ?--out \S+", "", " ".join(sys.argv[1:])),
        "script": Path(script).name, "script_sha256": hashlib.sha256(Path(script).read_bytes()).hexdigest()[:16],
    }


def save(name, script, results, folder=RESULTS):
    """Write ``results`` with their provenance to ``<folder>/<name>.json``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"provenance": provenance(script), "results": results}, indent=1) + "\n"
    temporary = folder / f".{name}.json"
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(folder / f"{name}.json")
