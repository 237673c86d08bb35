"""Kernels that may not be had on this machine: tried once, told once, and left to another from then on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from kvboost.kernels.cuda.compiler import CudaUnavailable

log = logging.getLogger("kvboost")

Key = TypeVar("Key")


def can_be_had(failed: dict[Key, str], key: Key, make: Callable[[], Any], loss: str) -> bool:
    """Whether `make` makes what `key` names. failed: what could not be made, and why; it is not tried again. loss: what the
    warning begins with, which each reason gets once."""
    if key in failed:
        return False
    try:
        make()
    except CudaUnavailable as error:
        if torch.cuda.is_current_stream_capturing():  # which may be why; it is tried again outside
            return False
        if str(error) not in failed.values():
            log.warning("%s: %s", loss, error)
        failed[key] = str(error)
        return False
    return True
