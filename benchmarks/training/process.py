"""A worker process that holds one bench and answers calls of its methods.

A fresh process (spawned, not forked: OpenMP does not survive a fork) with its own environment, so that
allocator settings and Inductor's state are those of the bench alone.  Anything that goes wrong in it is
`Failed` with one line here; the worker never outlives the `with` block.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

__all__ = ["Failed", "Worker", "worker"]

_GRACE_S = 10.0


class Failed(Exception):
    """A worker's bench raised, died or took too long; the text is one line."""


class Worker:
    """The parent's side of one worker process."""

    def __init__(self, connection: Connection, process: Any) -> None:
        self._connection = connection
        self._process = process

    def call(self, method: str, limit_s: float = 1800.0) -> Any:
        """The result of the bench's method without arguments.  Raises Failed."""
        try:
            self._connection.send(method)
            if not self._connection.poll(limit_s):
                raise Failed(f"no answer after {limit_s:.0f} s")
            well, result = self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join(_GRACE_S)
            raise Failed(f"the process ended with status {self._process.exitcode}") from error
        if not well:
            raise Failed(result)
        return result


@contextmanager
def worker(
    make: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
) -> Iterator[Worker]:
    """A fresh process in which ``make(*arguments)`` was called, with `environment` added to this one's."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs, make, arguments))
    with _environment(environment or {}):
        process.start()
    theirs.close()
    try:
        yield Worker(ours, process)
    finally:
        ours.close()
        process.join(_GRACE_S)
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    """The environment that a process started inside inherits."""
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, text in before.items():
            if text is None:
                del os.environ[name]
            else:
                os.environ[name] = text


def _serve(connection: Connection, make: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    bench: Any = None
    while True:
        try:
            method = connection.recv()
        except EOFError:
            return
        try:
            bench = make(*arguments) if bench is None else bench
            answer = (True, getattr(bench, method)())
        except Exception as error:  # whatever a peer or a plan raises is a line of the table
            answer = (False, _one_line(error))
        connection.send(answer)


def _one_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
