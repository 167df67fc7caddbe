"""The guide's Python runs, and what it points to exists."""

from __future__ import annotations

import pathlib
import re

import pytest

pytestmark = [pytest.mark.usefixtures("compile_fast"), pytest.mark.slow]
ROOT = pathlib.Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_code_runs(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "guide.md", "exec"), names)
    shown = capsys.readouterr().out.splitlines()
    loss, text = next(line for line in shown if line.endswith("]]")).split(" ", 1)
    assert float(loss) < 2.0 and text == "[[5, 6, 7, 8, 9, 10]]"
    assert (tmp_path / "out" / "guide" / "model" / "model.safetensors").is_file()


def test_links_and_files_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", GUIDE):
        assert (ROOT / "docs" / target).exists(), target
    for target in re.findall(r"examples/[\w.]+", GUIDE):
        assert (ROOT / target).exists(), target
    for option in re.findall(r"(?<!\w)--[a-z]+[a-z-]*", GUIDE):
        known = (ROOT / "examples" / "finetune_llama.py").read_text() + (
            ROOT / "zeroj" / "cli.py"
        ).read_text()
        known += (ROOT / "zeroj" / "aot" / "plan_command.py").read_text()
        slurm = {"--nodes", "--ntasks-per-node", "--gpus-per-node", "--cpus-per-task", "--signal"}
        assert option in slurm or f'"{option}"' in known, option
