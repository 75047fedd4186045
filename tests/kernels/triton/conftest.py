"""Where kernels are interpreted (test_interpreter.py), the interpreter is a quicker one."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("triton") is not None:
    from headrace.back.kernels.triton.wrap import interpreted

    if interpreted():
        from tests.kernels.triton.quick_interpreter import quicken

        quicken()
