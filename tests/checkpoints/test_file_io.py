"""Files and folders appear whole or not at all."""

import os
import signal

import pytest

from mhla_hf.checkpoints.file_io import LOCK_FILE, atomic_folder, remove_abandoned, write_json


def test_a_file_that_cannot_be_written_is_named_as_the_user_named_it(tmp_path):
    (tmp_path / "new" / "audit.json").mkdir(parents=True)
    with pytest.raises(OSError) as caught:
        write_json(tmp_path / "new" / "audit.json", {})
    assert caught.value.filename == str(tmp_path / "new" / "audit.json")
    write_json(tmp_path / "nowhere" / "audit.json", {})
    assert [path.name for path in (tmp_path / "nowhere").iterdir()] == ["audit.json"]


def killed_in(work):
    """Run `work` in a forked process that is killed where `work` calls its argument."""
    if (process := os.fork()) == 0:
        work(lambda *given: os.kill(os.getpid(), signal.SIGKILL))
    os.waitpid(process, 0)


def test_what_a_killed_process_left_goes_the_next_time_and_nothing_else(tmp_path):
    target = tmp_path / "made [1]"

    def write(stop):
        with atomic_folder(target) as aside:
            (aside / "half").write_text("")
            stop()

    killed_in(write)
    (abandoned,) = tmp_path.iterdir()
    assert abandoned.name.startswith("made [1].tmp-") and list(abandoned.rglob("half"))
    (tmp_path / "made [1].tmp-backup").mkdir()
    (tmp_path / "made [1].tmp-backup" / "letter").write_text("mine")
    (tmp_path / "made [1].tmp-file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / LOCK_FILE).write_text("")
    (tmp_path / "made [1].tmp-link").symlink_to("elsewhere")
    (tmp_path / "made [1].tmp-broken").symlink_to("nowhere")
    (tmp_path / "made 1.tmp-other").mkdir()  # what the name would match as a pattern
    (tmp_path / "made 1.tmp-other" / LOCK_FILE).write_text("")
    kept = {*tmp_path.rglob("*")} - {abandoned, *abandoned.rglob("*")}
    with atomic_folder(target) as living, atomic_folder(target):
        assert not abandoned.exists() and living.exists()
    assert {*tmp_path.rglob("*")} == {*kept, target}


def test_a_model_that_was_out_of_the_way_when_the_process_was_killed_comes_back(tmp_path, monkeypatch):
    target = tmp_path / "made"
    target.mkdir()
    (target / "old model").write_text("")
    replace = os.replace

    def move_twice(stop):
        monkeypatch.setattr(os, "replace", lambda *given: stop() if target == given[1] else replace(*given))
        with atomic_folder(target, replace=True):
            pass

    killed_in(move_twice)
    assert not target.exists()
    remove_abandoned(tmp_path, "made.tmp-")
    assert [path.name for path in tmp_path.rglob("*")] == ["made", "old model"]
