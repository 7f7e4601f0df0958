"""What nbval lacks for this book: GPU cells skipped by tag, pictures counted, dead kernels noticed."""
import time
from collections import Counter
from queue import Empty

import pytest
from nbval.kernel import RunningKernel

from notebooks import GPU_TAGS, tags


class BookPlugin:
    """Register with ``pytest.main(plugins=[...])``; afterwards holds what happened.

    name: the chapter; gpus: how many this runner has (0 on the CPU runner).
    """

    def __init__(self, name, gpus=0):
        self.name, self.gpus = name, gpus
        self.skipped, self.compared, self.failures = Counter(), 0, []

    def counts(self):
        return {"compared": self.compared, "skipped": dict(self.skipped), "failed": len(self.failures)}

    def pytest_collection_modifyitems(self, items):
        for item in items:
            needed = max((n for n, tag in GPU_TAGS.items() if tag in tags(item.cell)), default=0)
            if needed > self.gpus:
                reason = f"needs {needed} GPU" + "s" * (needed > 1)
                item.add_marker(pytest.mark.skip(reason=reason))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        if item.cell.execution_count is None and item.cell.source.strip():
            # nbval would compare nothing and pass.
            pytest.fail("the cell was never executed", pytrace=False)
        result = yield
        stored, seen = _pictures(item.cell.outputs), _pictures(item.test_outputs)
        if stored != seen:
            pytest.fail(f"{seen} pictures now, {stored} stored", pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if hasattr(report, "wasxfail"):  # nbval expects cells after one that hung to fail, and says no more
            report.outcome = "failed"
            report.longrepr = "does not count: an earlier cell hung"
            del report.wasxfail
        if report.skipped:
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        elif report.failed:
            why = "\n".join([str(report.longrepr), *_stderr(item.test_outputs)])
            self.failures.append((item.cell_num, item.cell.source, why))
        elif call.when == "call":
            self.compared += 1
        return report


def _stderr(outputs):
    """What the cell wrote there: nbval only says that it wrote something."""
    return ["stderr: " + o["text"] for o in outputs or [] if o.get("name") == "stderr"]


def _pictures(outputs):
    return sum(key.startswith("image/") for o in outputs or [] for key in o.get("data", {}))


def notice_dead_kernels():
    """Make nbval's wait for a message end when the kernel has died.

    Without this it waits the whole cell time-out for a kernel that is gone.
    """
    wait = RunningKernel.get_message

    def get_message(self, stream, timeout=None):
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while True:
            try:
                return wait(self, stream, timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            except Empty:
                if not self.is_alive():
                    raise RuntimeError("the cell killed its kernel (out of memory? a crash in C?)") from None
                if time.monotonic() >= deadline:
                    raise
    RunningKernel.get_message = get_message
