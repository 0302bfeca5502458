"""Multi-query associative recall: its sequences, the delta rule beside MHLA, and a table made in two goes."""

import json

import pytest
import torch

from experiments import mqar


def test_every_question_has_its_answer():
    ids, places, answers, gaps = mqar.make_batch(16, 128, 4, torch.Generator().manual_seed(0))
    stated = {(row, int(ids[row, at])): (at, int(ids[row, at + 1])) for row in range(4) for at in range(0, 32, 2)}
    for row in range(4):
        for place, answer, gap in zip(places[row], answers[row], gaps[row], strict=True):
            at, value = stated[row, int(ids[row, place])]
            assert (value, place - at) == (answer, gap)
        assert len(set(places[row].tolist())) == 16 and (ids[row] < mqar.KEYS).sum() == 32


def test_delta_rule():
    torch.manual_seed(0)
    q, k, v, beta = (torch.randn(2, 96, width, dtype=torch.float64) for width in (8, 8, 6, 1))
    k, beta = torch.nn.functional.normalize(k, dim=-1), beta.sigmoid()
    state, outputs = q.new_zeros(2, 8, 6), []
    for t in range(96):
        wrong = v[:, t] - (state.mT @ k[:, t, :, None])[..., 0]
        state = state + beta[:, t, :, None] * k[:, t, :, None] * wrong[:, None]
        outputs.append((state.mT @ q[:, t, :, None])[..., 0])
    torch.testing.assert_close(mqar.delta_rule(q, k, v, beta), torch.stack(outputs, 1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", mqar.FORMS)
def test_a_model_of_every_form_is_causal_and_learns(form):
    torch.manual_seed(0)
    model = mqar.Model(mqar.FORMS[form])
    ids, places, answers, _ = mqar.make_batch(8, 96, 2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, begun = (model(part, places[:, :1].clamp(max=63)) for part in (ids, ids[:, :64]))
    torch.testing.assert_close(whole, begun)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(10):
        losses.append(torch.nn.functional.cross_entropy(model(ids, places).flatten(0, 1), answers.flatten()))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_a_model_goes_from_task_to_task(monkeypatch):
    monkeypatch.setattr(mqar, "TASKS", {"4 pairs": (4, 96), "8 pairs": (8, 192)})
    monkeypatch.setattr(mqar, "TOKENS", 192)
    monkeypatch.setattr(mqar, "STEPS", (2, 3))
    starts = []

    def learn(model, task, steps, seed, learn=mqar.learn):
        starts.append(model.head.weight.detach().clone())
        return learn(model, task, steps, seed)

    monkeypatch.setattr(mqar, "learn", learn)
    row = mqar.make_row({"form": "softmax", "seed": 0})
    assert [row["tasks"][task]["steps"] for task in ("4 pairs", "8 pairs")] == [2, 3]
    assert not torch.equal(*starts), "the second task starts from what the first one learned"
    assert mqar.describe(row).startswith("seed 0, softmax: 4 pairs: 0.")


def test_a_table_goes_on_where_it_stopped(tmp_path):
    easy, hard = mqar.TASKS
    rows = [
        {
            "form": form,
            "seed": seed,
            "tasks": {task: {"far": far, "steps": 350, "solved": far == 1} for task in (easy, hard)},
        }
        for form, far in (("softmax", 1.0), *((form, 0.25) for form in mqar.FORMS if form != "softmax"))
        for seed in (1, 2)
    ]
    out = tmp_path / "mqar.json"
    out.write_text(json.dumps({"rows": rows}))
    jobs = [{"form": "softmax", "seed": seed} for seed in (1, 2)]
    assert mqar.add_rows(out, None, jobs, mqar.describe) == {"rows": rows}  # nothing is missing, no worker is asked
    run = {"command": "c", "hardware": "h", "versions": {"torch": "t", "transformers": "u"}}
    table = mqar.render_mqar({"rows": rows, **run})
    assert "| softmax | 1.00 ± 0.00 (350 ± 0 steps) | 1.00 ± 0.00 (350 ± 0 steps) |" in table
    assert "| plain linear | 0.25 ± 0.00 | 0.25 ± 0.00 |" in table and "seeds 1 to 2" in table
