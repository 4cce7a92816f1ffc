"""What a worker tells of a test has to reach the process that collects it, whatever the test printed."""

from __future__ import annotations

import pytest


def encodable(report: pytest.TestReport) -> pytest.TestReport:
    """Return the report with halves of surrogate pairs written out in what was captured: xdist ends a run at one."""
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
