"""Everything a user can do wrong, or ask for in vain, as one family of errors.

An error says *what* (with names and numbers), *where* (node, module path, source line) and *what to
do*.  `str(error)` is one line, which the command line prints as it is.

Not here: programming errors of Lowtide itself (a broken invariant is an AssertionError or ValueError
at the place that found it).
"""

from __future__ import annotations

__all__ = [
    "CaptureError",
    "Infeasible",
    "LowtideError",
    "PlanFileError",
    "ShapeMismatch",
    "Stale",
    "UsageError",
]


class LowtideError(Exception):
    """Base of all errors that a user causes; `exit_status` is what the command line returns.

    `source` is the user's ``file.py:line`` and `remedy` what to do; both may be empty and both become
    part of the message: ``what (at source): remedy``.
    """

    exit_status = 2

    def __init__(self, what: str, *, source: str = "", remedy: str = "") -> None:
        located = f"{what} (at {source})" if source else what
        super().__init__(f"{located}: {remedy}" if remedy else located)
        self.what = what
        self.source = source
        self.remedy = remedy


class UsageError(LowtideError):
    """An argument, option or file that cannot be used as given."""


class CaptureError(LowtideError):
    """The model, loss or optimizer does something that no graph can hold."""


class ShapeMismatch(LowtideError):
    """A plan was called with other shapes, dtypes or devices than it was made for."""


class Stale(LowtideError):
    """The model or optimizer is no longer what was captured; `what` is the first difference."""


class PlanFileError(LowtideError):
    """A saved plan cannot be read, or was made for something else."""


class Infeasible(LowtideError):
    """No plan can meet the limit.

    `floor_bytes` is the least peak (resident bytes included) that is known to be reachable, `node` names the
    node that makes it, with its module path.
    """

    exit_status = 3

    def __init__(
        self, what: str, *, floor_bytes: int, node: str = "", source: str = "", remedy: str = ""
    ) -> None:
        super().__init__(what, source=source, remedy=remedy)
        self.floor_bytes = floor_bytes
        self.node = node
