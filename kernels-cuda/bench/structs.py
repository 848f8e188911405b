"""C structs as a kernel's own headers declare them, so that a bench has no layout of its own."""

import re
import struct

import torch

SCALARS = {"int64_t": "q", "int32_t": "i", "uint32_t": "I", "float": "f"}


class Structs:
    """C structs without padding, as the headers declare them."""

    def __init__(self, *headers):
        self.fields = {}
        for text in headers:
            for name, body in re.findall(r"struct (\w+) \{\n(.*?)\n\};", text, re.S):
                self.fields[name] = re.findall(r"^  ([\w*]+) (\w+)(?:\[.*\])?;$", body, re.M)

    def pack(self, name, values):
        """`values` by field; what is not there is 0. Tuples are structs in their fields' order."""
        if isinstance(values, tuple):
            values = dict(zip((field for _, field in self.fields[name]), values))
        unknown = set(values) - {field for _, field in self.fields[name]}
        assert not unknown, f"{name} has no {unknown}"
        out = b""
        for kind, field in self.fields[name]:
            value = values.get(field, 0)
            if kind.endswith("*"):
                out += struct.pack("<Q", value.data_ptr() if isinstance(value, torch.Tensor) else value or 0)
            elif kind in SCALARS:
                out += struct.pack("<" + SCALARS[kind], value)
            else:
                out += self.pack(kind, value or {})
        return out
