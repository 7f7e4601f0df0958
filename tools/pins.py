"""Write the version of everything installed beside this interpreter.

    .venv/test/bin/python tools/pins.py constraints.txt
"""
import subprocess
import sys

from notebooks import ROOT, write_text

frozen = subprocess.run([sys.executable, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
head = "# Written by `make pins`: the versions of all that the requirements bring along.\n"
write_text(ROOT / sys.argv[1], head + frozen)
print(f"{sys.argv[1]}: {frozen.count('==')} versions")
