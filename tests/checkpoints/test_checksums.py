"""SHA256SUMS is what the sha256sum command writes and reads."""

import os

import pytest

from mhla_hf.checkpoints.checksums import check_sums, read_sums


def test_checksums_are_read_as_they_were_written(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a b.txt").write_text("words\n")
    (tmp_path / "sub" / "a\u2028b\x85\x0c.txt").write_text("words\n")
    os.system(f"cd {tmp_path} && sha256sum sub/* > SHA256SUMS")
    assert len(read_sums((tmp_path / "SHA256SUMS").read_text(), "SHA256SUMS")) == 2
    check_sums(tmp_path)
    (tmp_path / "SHA256SUMS").write_text((tmp_path / "SHA256SUMS").read_text() + f"{'0' * 64}  not-here.txt\n")
    check_sums(tmp_path)
    (tmp_path / "sub" / "a b.txt").write_text("wordz\n")
    with pytest.raises(ValueError, match=r"a b\.txt was changed after the model was pushed"):
        check_sums(tmp_path)
    for bad in ("nonsense", f"{'0' * 64}  ../up", f"{'0' * 64}  /etc/passwd", f"{'0' * 63}  a"):
        with pytest.raises(ValueError, match="expected lines of a sha256 and a path"):
            read_sums(bad, "SHA256SUMS")
