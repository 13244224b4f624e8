"""What the doctor found, as data and as text."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvcached_patch import __version__

_MARKS = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
_INDENT = " " * 25


@dataclass
class Finding:
    """One line of the report; state is ok, note or problem, remedy what to do about it."""

    name: str
    state: str
    text: str
    remedy: str = ""


@dataclass
class Diagnosis:
    """All findings; `active` is the answer."""

    findings: list[Finding] = field(default_factory=list)
    seams: list[dict[str, Any]] = field(default_factory=list)

    def add(self, name: str, text: str) -> None:
        """Add a finding that is as it should be."""
        self.findings.append(Finding(name, "ok", text))

    def note(self, name: str, text: str, remedy: str = "") -> None:
        """Add a finding that a reader should know; vLLM would still be patched."""
        self.findings.append(Finding(name, "note", text, remedy))

    def problem(self, name: str, text: str, remedy: str) -> None:
        """Add a reason why vLLM would run unpatched, or not start."""
        self.findings.append(Finding(name, "problem", text, remedy))

    @property
    def active(self) -> bool:
        """Whether vLLM started here would be patched, completely."""
        return not any(finding.state == "problem" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON-able data."""
        return {
            "version": __version__,
            "active": self.active,
            "findings": [asdict(finding) for finding in self.findings],
            "seams": self.seams,
        }


def text(diagnosis: Diagnosis) -> str:
    """The report for people: what matters most at its end, where a terminal shows it."""
    lines = []
    for seam in diagnosis.seams:
        where = f"{seam['target']} ({seam['process']})"
        lines.append(f"{_MARKS['ok' if seam['ok'] else 'problem']}  seam {seam['id']}: {where}")
        if not seam["ok"]:
            lines.append(f"{_INDENT}expected  {seam['expected']}")
            lines.append(f"{_INDENT}found     {seam['found']}")
    for finding in diagnosis.findings:
        body = finding.text + (f"\nto do: {finding.remedy}" if finding.remedy else "")
        body = body.replace("\n", f"\n{_INDENT}")
        lines.append(f"{_MARKS[finding.state]}  {finding.name:<15} {body}")
    lines.append(f"active: {'yes' if diagnosis.active else 'no'}")
    return "\n".join(lines)
