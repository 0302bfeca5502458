"""The site of the docs builds strictly: no page outside the map, no link or anchor that leads nowhere."""

import subprocess
import sys

from experiments.site import ROOT


def test_the_site_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "evidence" / "vision" / "index.html").read_text(encoding="utf-8")
    assert "/mhla_hf/blob/main/model_cards/digits_vit.md" in page and 'href="../../images/costs.json"' in page
