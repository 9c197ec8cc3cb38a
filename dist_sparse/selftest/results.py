"""Results of a self-test, as a table for people and as JSON for an issue. Needs no torch."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias

from dist_sparse.text import duration, printable, table_lines

Status: TypeAlias = Literal["ok", "differs", "failed", "not run"]

WRONG: Final = ("differs", "failed")

_WIDTH: Final = 80


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of one check.

    Args:
        check: its name.
        status: ``differs`` is a wrong result, ``failed`` an error.
        says: the result, or why there is none.
        seconds: that it took.
        figures: what was measured.
    """

    check: str
    status: Status
    says: str
    seconds: float = 0.0
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of all checks.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        nproc: processes, one for each device.
        machine: versions and names of devices.
        outcomes: in the order in which they ran.
    """

    device: str
    nproc: int
    machine: Mapping[str, str]
    outcomes: tuple[Outcome, ...]

    @property
    def passed(self) -> bool:
        """Whether nothing differs or failed."""
        return all(each.status not in WRONG for each in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-able values."""
        return {"passed": self.passed, **dataclasses.asdict(self)}

    def text(self) -> str:
        """Return the conclusion and a table, in lines of at most 80 characters."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        # Beside the check, its status, and a gap behind each.
        room = _WIDTH - max(len(each.check) for each in self.outcomes) - len("not run") - 4
        rows: list[tuple[str, str, str]] = []
        for each in self.outcomes:
            says = f"{each.says} ({duration(each.seconds)})" if each.seconds > 0.01 else each.says
            first, *more = textwrap.wrap(printable(says), room) or [""]
            rows += [(each.check, each.status, first), *(("", "", line) for line in more)]
        head = [*textwrap.wrap(printable(self._conclusion()), _WIDTH)]
        head += [*textwrap.wrap(printable(machine), _WIDTH), ""]
        return "\n".join([*head, *table_lines(("check", "status", "result"), rows)])

    def _conclusion(self) -> str:
        wrong = [each.check for each in self.outcomes if each.status in WRONG]
        skipped = sum(each.status == "not run" for each in self.outcomes)
        where = f"{self.device}, {self.nproc} process{'es' * (self.nproc > 1)}"
        if wrong:
            return f"Not as it should be on {where}: {', '.join(wrong)}."
        return f"As it should be on {where}; {skipped} of {len(self.outcomes)} checks not run."
