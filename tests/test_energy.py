"""The energy counter, on a made-up driver: units, errors, and that it is shut down again."""
import ctypes
from types import SimpleNamespace

import pytest
import torch

from companion import energy

UUID = "4f5bd7dd-0123-4567-89ab-cdef01234567"


class Driver:
    """Answers like NVML; ``fails`` maps a function to the code it returns."""

    def __init__(self, millijoules=0, fails=()):
        self.millijoules, self.fails, self.calls = millijoules, dict(fails), []

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            if name == "nvmlDeviceGetHandleByUUID":
                self.uuid = arguments[0]
            if name == "nvmlDeviceGetTotalEnergyConsumption":
                arguments[1]._obj.value = self.millijoules
            return self.fails.get(name, 0)
        return function


@pytest.fixture
def use(monkeypatch):
    def install(driver, uuid=UUID):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(torch.cuda, "get_device_properties",
                            lambda device: SimpleNamespace(uuid=uuid, device=device))
        monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
        return driver
    return install


# Catches millijoules handed on as joules, and a counter that passes 32 bits cut short.
@pytest.mark.parametrize("millijoules", [0, 1500, 2**32 + 500])
def test_joules(use, millijoules):
    driver = use(Driver(millijoules))
    assert energy.joules() == millijoules / 1000
    assert driver.calls[0] == "nvmlInit_v2" and driver.calls[-1] == "nvmlShutdown"


# torch gives the number bare; NVML wants its prefix, once.
@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
def test_the_card_is_found_by_its_number(use, uuid):
    driver = use(Driver(1), uuid)
    energy.joules(0)
    assert driver.uuid == f"GPU-{UUID}".encode()


@pytest.mark.parametrize("function", ["nvmlInit_v2", "nvmlDeviceGetHandleByUUID",
                                      "nvmlDeviceGetTotalEnergyConsumption"])
def test_a_failing_driver_is_named(use, function):
    driver = use(Driver(1, {function: 3}))
    with pytest.raises(RuntimeError, match=f"{function} failed with code 3"):
        energy.joules()
    assert ("nvmlShutdown" in driver.calls) == (function != "nvmlInit_v2")


def test_no_driver(use, monkeypatch):
    use(Driver())

    def missing(name):
        raise OSError("no such file")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(RuntimeError, match="libnvidia-ml.so.1 cannot be loaded: no such file"):
        energy.joules()
