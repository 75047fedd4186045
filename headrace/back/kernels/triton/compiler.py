"""One of the processes of compilers.py: reads a kernel's specialisation from a line, compiles it
into the cache, and answers "+" or "-". It ends with its parent."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from headrace.back.kernels.triton import wrap


def job_of(source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> dict[str, Any]:
    """What `compiled` needs to know of a source; JSON can say it, or the kernel is compiled where
    it is asked for."""
    return {
        "module": source.fn.__module__,
        "name": source.fn.__name__,
        "signature": source.signature,
        "constants": [[list(path), value] for path, value in source.constants.items()],
        "attributes": [[list(path), value] for path, value in source.attrs.items()],
        "target": [target.backend, target.arch, target.warp_size],
        "options": options,
    }


def compiled(job: dict[str, Any]) -> None:
    """Compiles a kernel; what comes of it lies in the cache."""
    function = getattr(importlib.import_module(job["module"]), job["name"])
    make = GluonASTSource if function.is_gluon() else ASTSource
    source = make(
        fn=function,
        signature=job["signature"],
        constexprs={tuple(path): value for path, value in job["constants"]},
        attrs={tuple(path): value for path, value in job["attributes"]},
    )
    options = {name: _tuples(value) for name, value in job["options"].items()}
    triton.compile(source, target=GPUTarget(*job["target"]), options=options)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def main() -> None:
    """Until there is nothing more to read."""
    assert wrap.DTYPES  # which has said where the cache is
    for line in sys.stdin.buffer:
        try:
            compiled(json.loads(line))
            answer = b"+"
        except Exception:  # whoever asked compiles it, and meets the error
            answer = b"-"
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
