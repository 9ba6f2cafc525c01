import gzip
import json
import logging
from pathlib import Path

import pytest
import torch

from prime_rl.errors import ArtifactError
from prime_rl.trainer import profile
from prime_rl.trainer.profile import StepProfile

CPU = torch.device("cpu")


def test_the_first_steps_leave_a_trace_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "MAX_STEPS", 2)
    recorded = StepProfile(memory_dir=None, trace_dir=tmp_path / "traces", device=CPU, rank=3)
    for step in (4, 5, 6):
        with recorded.step(step):
            torch.ones(3, 3) @ torch.ones(3, 3)
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["step_4_rank_3.json.gz", "step_5_rank_3.json.gz"]
    with gzip.open(tmp_path / "traces" / names[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)


def test_a_step_that_fails_says_its_own_error(tmp_path: Path) -> None:
    recorded = StepProfile(memory_dir=None, trace_dir=tmp_path, device=CPU, rank=0)
    with pytest.raises(ZeroDivisionError), recorded.step(0):
        _ = 1 / 0


def test_memory_of_a_cpu_is_not_recorded_which_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="prime_rl"):
        recorded = StepProfile(memory_dir=tmp_path / "memory", trace_dir=None, device=CPU, rank=0)
    assert "memory_profiler_path has no effect here" in caplog.text
    with recorded.step(0):
        pass
    assert not (tmp_path / "memory").exists()


def test_a_directory_that_cannot_be_made_is_an_error_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match=r"cannot be made for profiles: .*; name another path"):
        StepProfile(memory_dir=None, trace_dir=tmp_path / "file" / "traces", device=CPU, rank=0)
