"""The Python in docs/ runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
PAGES = {
    page.name: [
        block
        for block in re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
        if "..." not in block and "def rules" not in block  # sketches
    ]
    for page in sorted(DOCS.glob("*.md"))
}


@pytest.mark.slow
@pytest.mark.parametrize("page", [name for name, blocks in PAGES.items() if blocks])
def test_blocks_run(page, tmp_path):
    code = "\n".join(PAGES[page]).replace("path/or/hub-id", _embedded())
    (tmp_path / "page.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def _embedded():
    from jaxppo.assets import asset

    return str(asset("reviews-gpt2"))
