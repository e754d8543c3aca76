"""Compiles Triton's kernels for a GPU that need not be there: what its interpreter takes, its compiler may refuse.

    python triton_targets.py WIDTH ...

prints one line a kernel and form: its name, and the bytes of machine code for compute capability 9.0.
"""

import sys

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dcr.data_plane.kernels import triton_boxes, triton_items, triton_shards

TARGET = GPUTarget("cuda", 90, 32)
SIGNED = {1: "*i8", 2: "*i16", 4: "*i32", 8: "*i64"}
WORDS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
BYTES, COUNTS = {"out": "*u8"}, {"found": "*i32", "hits": "*i32"}


def compiled(kernel, forms, words=()):
    """Machine code; parameters without a type are pointers to int64, those in ``words`` to the shard's words."""
    signature = {}
    for parameter in kernel.params:
        name = parameter.name
        kind = "constexpr" if parameter.is_constexpr else parameter.annotation_type
        signature[name] = kind or words.get(name) if words else kind
        signature[name] = signature[name] or {**BYTES, **COUNTS}.get(name, "*i64")
    constants = {(kernel.arg_names.index(name),): value for name, value in forms.items()}
    made = triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants), target=TARGET)
    return made.asm["cubin"]


def forms_of(width):
    """Every kernel with the forms in which it is launched for words of one width, and which arguments are words."""
    of_shard = dict.fromkeys(("old", "new", "before", "after", "bits", "values"), SIGNED[width])
    yield triton_shards.count_differences, {"BLOCK": 4096}, of_shard
    yield triton_shards.compact_differences, {"BLOCK": 4096}, of_shard
    yield triton_shards.digest_entries, {"WIDTH": width, "BLOCK": 1024}, of_shard
    yield triton_boxes.first_disorder, {"BLOCK": 1024}, {}
    yield triton_boxes.sum_boxes, {"DEPTH": 3, "WORD": WORDS[width], "WIDTH": width, "BLOCK": 1024, "LOOPS": 16}, {}
    for action in (0, 1, 2):
        forms = {"ACTION": action, "WIDTH": width, "BLOCK": 1024}
        yield triton_items.survey, forms, of_shard
        yield triton_boxes.place, {"DEPTH": 3, "WORD": WORDS[width], "ACTION": action, "BLOCK": 1024}, {}
        for low in range(4):
            yield triton_items.write, {"LOW": low, "LONG_BYTES": 4 + 4 * (low % 2), **forms}, of_shard


for asked in sys.argv[1:]:
    for kernel, forms, words in forms_of(int(asked)):
        code = compiled(kernel, forms, words)
        assert code[:4] == b"\x7fELF"
        print(kernel.__name__, len(code))
