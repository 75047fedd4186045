"""`python -m headrace.back.executor.worker_entry FD RANK LOG_LEVEL`: the worker, whose imports run
with garbage collection off and are then no part of collections between steps."""

from __future__ import annotations

from headrace.base.gc_pause import collection_paused, own_process


def main() -> None:
    """See worker.main."""
    own_process()
    with collection_paused():
        from headrace.back.executor import worker
    worker.main()


if __name__ == "__main__":
    main()
