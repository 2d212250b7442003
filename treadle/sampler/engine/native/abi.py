"""The structs of the C interface at the end of decoder.cpp, field by field.

Takes: nothing. Gives: ctypes structures.
"""

from __future__ import annotations

import ctypes


def _fields(kind: type, names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, kind) for name in names.split())


class Spec(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int32, "layers hidden heads kv_heads head_dim intermediate vocab"),
        *_fields(ctypes.c_int32, "positions threads kernel"),
        *_fields(ctypes.c_float, "eps scale"),
        *_fields(ctypes.c_int64, "kv_blocks"),
        *_fields(ctypes.c_void_p, "k v cos sin"),
    )


class Layer(ctypes.Structure):
    _fields_ = _fields(
        ctypes.c_void_p,
        "norm1 q k v q_bias k_bias v_bias q_norm k_norm o norm2 gate up down",
    )


class Weights(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_void_p, "embedding norm head"),
        ("layers", ctypes.POINTER(Layer)),
    )


class Call(ctypes.Structure):
    _fields_ = (
        *_fields(ctypes.c_int32, "rows table_width"),
        *_fields(ctypes.c_void_p, "ids positions tables"),
        *_fields(ctypes.c_int32, "num_outputs"),
        *_fields(ctypes.c_void_p, "outputs logits temperature uniform next logprobs entropies"),
    )


def declare(library: ctypes.CDLL) -> None:
    """Give the functions their signatures."""
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    library.treadle_create.restype = pointer
    library.treadle_create.argtypes = (ctypes.POINTER(Spec), text, ctypes.c_int)
    library.treadle_destroy.restype = None
    library.treadle_destroy.argtypes = (pointer,)
    library.treadle_pack.argtypes = (pointer, ctypes.POINTER(Weights), text, ctypes.c_int)
    library.treadle_run.argtypes = (pointer, ctypes.POINTER(Call), text, ctypes.c_int)
    library.treadle_sections.restype = ctypes.POINTER(ctypes.c_double)
    library.treadle_sections.argtypes = (pointer,)
    library.treadle_kernel.restype = text
    library.treadle_kernel.argtypes = (pointer,)
