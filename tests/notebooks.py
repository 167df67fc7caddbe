"""Notebooks as scripts: ``python -m tests.notebooks FILE`` runs its code cells and stores their printed outputs.

A notebook is JSON (https://nbformat.readthedocs.io/en/latest/format_description.html); nothing of Jupyter is needed.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
BETWEEN = "----- next cell -----"
#: Runs the cells of the file in argv[1], one after the other in one namespace, as a kernel does.
DRIVER = f"""
import json, sys
names = {{"__name__": "__main__"}}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "cell", "exec"), names)
        print({BETWEEN!r}, flush=True)
"""


def code_cells(file: pathlib.Path) -> list[dict[str, Any]]:
    """The code cells of a notebook."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def stored(file: pathlib.Path) -> list[str]:
    """What each code cell printed when the notebook was written."""
    return ["".join("".join(out["text"]) for out in cell["outputs"]) for cell in code_cells(file)]


def printed(file: pathlib.Path, environment: dict[str, str]) -> list[str]:
    """What each code cell prints now, in a process and an empty folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, str(file.resolve())],
            cwd=folder,
            env=environment | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.split(f"{BETWEEN}\n")[:-1]


def main() -> None:
    import os

    file = pathlib.Path(sys.argv[1])
    notebook = json.loads(file.read_text(encoding="utf-8"))
    texts = iter(printed(file, dict(os.environ)))
    for number, cell in enumerate(c for c in notebook["cells"] if c["cell_type"] == "code"):
        text = next(texts)
        cell["execution_count"] = number + 1
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell["outputs"] = [stream] if text else []
    file.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
