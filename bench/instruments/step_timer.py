"""The step timer: wall-clock time of a step between two waits for the device."""

import time

import torch


class StepTimer:
    """Times one step at a time; a CUDA device is waited for at both ends, a CPU needs no wait."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._begin = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._wait()
        self._begin = time.perf_counter()

    def stop(self) -> float:
        """End the step and return its time in s."""
        self._wait()
        return time.perf_counter() - self._begin

    def _wait(self) -> None:
        if self._device is not None:
            torch.cuda.synchronize(self._device)
