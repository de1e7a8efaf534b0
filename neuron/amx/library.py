"""The kernels as functions of addresses and sizes, and their structures. The C++ files say what each means."""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import platform
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path

_NEEDED = {"amx_tile", "amx_bf16", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16"}
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Of Linux on x86-64: a process asks for the tiles' registers before it uses them."""


class LinearMap(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("norm_weight", c_void_p),
        ("norm_bias", c_void_p),
        ("eps", c_float),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("before", c_int32),
        ("halves", c_int32),
    )


class Rotation(ctypes.Structure):
    _fields_ = (("norm", c_void_p), ("eps", c_float), ("heads", c_int32), ("kv_heads", c_int32), ("dim", c_int32))


class Heads(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("causal", c_int32),
        ("scale", c_float),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("qkv", POINTER(LinearMap)),
        ("out", POINTER(LinearMap)),
        ("up", POINTER(LinearMap)),
        ("down", POINTER(LinearMap)),
        ("norm", c_void_p),
        ("eps", c_float),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("dim", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Pass(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p),
        ("attended", c_void_p),
        ("up", c_void_p),
        ("middle", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("write_slots", c_void_p),
        ("spans", c_void_p),
        ("slots", c_void_p),
        ("rows", c_int32),
        ("num_spans", c_int32),
        ("num_attended", c_int32),
        ("causal", c_int32),
    )


class AmxError(RuntimeError):
    """The kernels cannot run here: the message says what is missing."""


@functools.cache
def library() -> ctypes.CDLL:
    """Raises AmxError. After torch: both compute with the same OpenMP threads then."""
    import torch  # noqa: F401  # loads its OpenMP first

    missing = _NEEDED - cpu_flags()
    if missing:
        raise AmxError(f"this CPU lacks {', '.join(sorted(missing))}")
    files = [Path(__file__).with_name("_kernels" + suffix) for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    found = next((file for file in files if file.exists()), None)
    if found is None:
        raise AmxError("the kernels were not built when this project was installed: a C++ compiler was not there")
    if ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) != 0:
        raise AmxError("the operating system does not let this process use AMX")
    kernels = ctypes.CDLL(str(found))
    kernels.linear.argtypes = (POINTER(LinearMap), c_void_p, c_int, c_int, c_void_p, c_void_p)
    kernels.rotate.argtypes = (POINTER(Rotation), c_void_p, c_int, c_int64, *[c_void_p] * 5)
    kernels.attention.argtypes = (POINTER(Heads), c_void_p, c_int, c_void_p)
    kernels.layers.argtypes = (POINTER(Layer), c_int, POINTER(Pass), c_void_p, POINTER(c_void_p), c_void_p)
    for name in ("linear", "rotate", "attention", "layers"):
        getattr(kernels, name).restype = None
    return kernels


@functools.cache
def cpu_flags() -> frozenset[str]:
    """As Linux names them; none elsewhere."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return frozenset(line.split(":", 1)[1].split())
    return frozenset()
