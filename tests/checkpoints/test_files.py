"""Files and folders appear whole or not at all."""

import pytest

from mhla_hf.checkpoints.files import folder_aside


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(RuntimeError), folder_aside(tmp_path / "made") as aside:
        (aside / "half").write_text("")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with folder_aside(tmp_path / "made") as aside:
        (aside / "whole").write_text("")
        assert not (tmp_path / "made").exists()
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["whole"]
