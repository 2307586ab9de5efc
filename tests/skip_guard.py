"""pytest plugin: a skip but for a missing GPU, compiler or optional package is a failure.

A report is changed where it is made, under xdist in the worker, so it counts and shows like any
other failure.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import pytest

ALLOWED_REASONS = ("no GPU", "no compiler", "optional package")

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _checked((yield))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _checked((yield))


def _checked(report: Report) -> Report:
    expected_failure = hasattr(report, "wasxfail")
    if report.outcome == "skipped" and not expected_failure:
        path, line, message = report.longrepr
        reason = message.removeprefix("Skipped: ")
        if not reason.startswith(ALLOWED_REASONS):
            report.outcome = "failed"
            report.longrepr = (
                f"{path}:{line}: a skip's reason must start with one of {ALLOWED_REASONS}, "
                f"got {reason!r}"
            )
    return report
