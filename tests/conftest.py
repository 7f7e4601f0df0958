import sys
from pathlib import Path

for folder in ("tools", "."):  # the tools' modules and the package, of this checkout
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))
