"""Print constraints: every version installed in the environments named, one a line."""
import subprocess
import sys

lines = {}
for python in sys.argv[1:]:
    frozen = subprocess.run([python, "-m", "pip", "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    for line in frozen.splitlines():
        name, _, version = line.partition("==")
        if name == "pip":
            continue
        if lines.setdefault(name.lower(), line) != line:
            sys.exit(f"pins: {line} in {python}, but {lines[name.lower()]} elsewhere")
print("# Written by `make pins`: the versions of everything that the requirements bring along.")
print("\n".join(lines[name] for name in sorted(lines)))
