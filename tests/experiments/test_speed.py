"""Cost against length: measured once, small, and rendered."""

import json

from experiments import speed


def test_measured_and_rendered(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "STEPS", 2)
    monkeypatch.setattr(speed, "ROUNDS", 1)
    monkeypatch.setattr(speed.torch, "compile", lambda model, **options: model)
    record = speed.run(tmp_path / "speed.json", (96, 160))
    assert json.loads((tmp_path / "speed.json").read_text())["rows"] == record["rows"]
    assert all(value > 0 for row in record["rows"] for name in ("MHLA", "softmax") for value in row[name].values())
    assert "| 160 | " in speed.render_speed({**record, "command": "c"})
