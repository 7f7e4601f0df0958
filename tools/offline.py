"""Cut this process and all it starts off the network, loopback excepted."""
import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

_CUT = "COMPANION_NETWORK"
_DEAD_PROXY = "http://127.0.0.1:9"  # the discard port: nothing answers


def cut_network():
    """Start this script again without a network; return how it was cut.

    "cut": a network namespace of its own (Linux, where users may make one).
    "proxies": where they may not, proxy variables that lead nowhere: they stop
    pip and Python's downloads, not a program that ignores them.
    """
    state = os.environ.get(_CUT)
    if state is None:
        unshare = ["unshare", "--map-root-user", "--net"]
        if shutil.which("unshare") and not subprocess.run([*unshare, "true"], capture_output=True).returncode:
            os.environ[_CUT] = "cut"
            os.execvp("unshare", [*unshare, sys.executable, *sys.argv])
        os.environ[_CUT] = state = "proxies"
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            os.environ[name] = _DEAD_PROXY
    elif state == "cut":
        _loopback_up()
    return state


def _loopback_up():
    """``ip link set lo up`` without needing ip: kernels are reached over loopback."""
    get_flags, set_flags, up = 0x8913, 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        request = struct.pack("16sH14s", b"lo", 0, b"")
        flags = struct.unpack("16sH14s", fcntl.ioctl(s, get_flags, request))[1]
        fcntl.ioctl(s, set_flags, struct.pack("16sH14s", b"lo", flags | up, b""))
