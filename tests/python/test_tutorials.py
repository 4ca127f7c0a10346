"""The code of docs/tutorials, in order, as it stands there."""

import pathlib
import re

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "docs" / "tutorials"
NEEDS = {"plug-into-transformers": ["torch", "transformers"], "check-your-own-kernel": ["torch"]}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.md")), ids=lambda path: path.stem)
def test_tutorial(path):
    for module in NEEDS.get(path.stem, []):
        pytest.importorskip(module)
    names = {}
    text = path.read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        line = text[:text.index(block)].count("\n")
        exec(compile("\n" * line + block, path, "exec"), names)
