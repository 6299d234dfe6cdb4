"""Wait for and write 32-bit words in the order of a CUDA stream, without a kernel.

The driver's cuStreamBatchMemOp: operations run in order, a stream capture records them as one node,
and addresses may lie on a peer's device. A write is preceded by a system-wide memory barrier, so what
the stream wrote before is seen by whoever sees the word. (CUDA driver API, "Stream Memory Operations".)
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch


class MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: a union of 48 bytes; wait and write share this head."""

    _fields_ = [
        ("operation", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("pad", ctypes.c_uint64),
    ]


WAIT_VALUE_32, WRITE_VALUE_32 = 1, 2  # CUstreamBatchMemOpType
WAIT_EQUAL, WRITE_DEFAULT = 1, 0  # CU_STREAM_WAIT_VALUE_EQ, CU_STREAM_WRITE_VALUE_DEFAULT


def wait_equal(address: int, value: int) -> MemOp:
    return MemOp(WAIT_VALUE_32, address, value, WAIT_EQUAL, 0, 0)


def write(address: int, value: int) -> MemOp:
    return MemOp(WRITE_VALUE_32, address, value, WRITE_DEFAULT, 0, 0)


def batch(operations: Sequence[MemOp]) -> None:
    """Enqueue `operations`, in order, on the current stream."""
    array = (MemOp * len(operations))(*operations)
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    code = _driver().cuStreamBatchMemOp_v2(stream, len(operations), array, 0)
    if code:
        raise RuntimeError(f"cuStreamBatchMemOp failed with CUresult {code}")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
