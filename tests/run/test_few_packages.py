"""Training needs torch, numpy and safetensors, and no other package."""

from __future__ import annotations

import json
import os
import subprocess
import sys


def test_trains_without_pydantic_typer_rich_and_jinja2() -> None:
    """A machine with GPUs often has torch and little else: they must do."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.run.support.few_packages"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, _, last = json.loads(done.stdout)
    assert last < first
