"""The live leg is collected only where PyTorch and transformers are; ``make test-hf`` installs them."""

from __future__ import annotations

import importlib.util

NEEDED = ("torch", "transformers", "datasets")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore = ["test_live.py"] if MISSING else []


def pytest_report_header() -> str:
    """Says whether the live leg runs."""
    if MISSING:
        return f"tests/hf/test_live.py is left out: {', '.join(MISSING)} not installed (make test-hf)"
    return "tests/hf/test_live.py compares with torch and transformers"
