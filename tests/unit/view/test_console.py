import tracemalloc

from tests.doubles.disks import small_disk

from prime_rl.monitors.base import JsonlMonitor
from prime_rl.monitors.events import EventLog
from prime_rl.paths import RunPaths
from prime_rl.resume import drop_rows
from prime_rl.view.console import RLConsole


def test_a_step_is_shown_once_with_the_numbers_of_both_processes(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    console = RLConsole(paths, max_steps=2, has_server=True)
    orchestrator, trainer = JsonlMonitor(paths.metrics("orchestrator")), JsonlMonitor(paths.metrics("trainer"))
    orchestrator.log(
        {
            "errors/rate": 0.1,
            "errors/timeout": 2,
            "errors/scorer": 0,
            "reward/mean": 0.4375,
            "async_level": 1,
            "off_policy_gap/max": 1,
            "perf/throughput": 1234,
        },
        step=0,
    )
    console.tick()
    assert "0.4375" not in capsys.readouterr().out
    trainer.log({"entropy/mean": 0.5, "mismatch_kl/mean": 1e-4, "perf/throughput": 99, "time/step": 1.5}, step=0)
    console.tick()
    console.tick()
    out = capsys.readouterr().out
    assert out.count("0.4375") == 1
    for text in ("1/2", "0.5000", "1.00e-04", "1,234", "1.50s"):
        assert text in out
    assert "failed rollouts, not trained on: 2 timeout\n" in out
    console.closing()
    out = capsys.readouterr().out
    assert "0.438 at the first step" in out
    assert str(tmp_path / "weights" / "step_1") in out
    assert paths.reward_curve.read_text().startswith("<svg")
    orchestrator.close()
    trainer.close()


def test_what_happened_to_a_server_is_told_once(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    console = RLConsole(paths, max_steps=2, has_server=True)
    with EventLog.opened(paths.events) as log:
        log.write("inference server http://[::1]:8001/v1 is lost: no answer; 1 of 2 are up")
        console.tick()
        log.write("inference server http://[::1]:8001/v1 is up")
        console.tick()
    assert capsys.readouterr().out == (
        "      0 s, inference server http://[::1]:8001/v1 is lost: no answer; 1 of 2 are up\n"
        "      0 s, inference server http://[::1]:8001/v1 is up\n"
    )


def test_a_curve_that_a_full_disk_refuses_is_no_error_and_leaves_no_half_of_it(tmp_path, capsys):
    with small_disk(tmp_path / "disk", mib=1) as disk:
        paths = RunPaths(disk.root)
        JsonlMonitor(paths.metrics("orchestrator")).log({"reward/mean": 0.5}, step=0)
        disk.fill()
        RLConsole(paths, max_steps=1, has_server=True).closing()
        assert not paths.reward_curve.exists()
    out = capsys.readouterr().out
    assert "reward.svg is not written: the disk is full (" in out
    assert "0.500 at the first step" in out
    assert "curve    " not in out


def test_of_a_run_that_goes_on_only_what_is_to_come_is_shown(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    orchestrator, trainer = JsonlMonitor(paths.metrics("orchestrator")), JsonlMonitor(paths.metrics("trainer"))
    for step in range(3):
        orchestrator.log({"reward/mean": step / 8}, step=step)
        trainer.log({"time/step": 1.0}, step=step)
    with EventLog.opened(paths.events) as log:
        log.write("of yesterday")
    console = RLConsole(paths, max_steps=5, has_server=True, is_new=False)
    console.opening("a-model")
    console.tick()
    assert "the run that is there goes on after 3 steps" in capsys.readouterr().out
    drop_rows(paths.metrics("trainer"), 2)  # its trainer goes on from step 2
    trainer.close()
    trainer = JsonlMonitor(paths.metrics("trainer"))
    trainer.log({"time/step": 1.0}, step=2)
    console.tick()
    assert "3/5" not in capsys.readouterr().out  # that was shown by the launcher before
    orchestrator.log({"reward/mean": 0.875}, step=3)
    trainer.log({"time/step": 1.0}, step=3)
    console.tick()
    out = capsys.readouterr().out
    assert "4/5" in out
    assert "0.8750" in out
    assert "reward" in out  # the header
    assert "of yesterday" not in out
    orchestrator.close()
    trainer.close()


def test_a_long_run_takes_little_memory(tmp_path, capsys):
    paths = RunPaths(tmp_path)
    orchestrator, trainer = JsonlMonitor(paths.metrics("orchestrator")), JsonlMonitor(paths.metrics("trainer"))
    console = RLConsole(paths, max_steps=None, has_server=True)
    others = {f"a/name/of/forty/characters/in/the/mean/{index:02}": index / 7 for index in range(100)}
    for step in range(200):
        orchestrator.log(others | {"reward/mean": step / 8, "errors/timeout": 0, "off_policy_gap/max": 1}, step=step)
        trainer.log(others | {"time/step": 1.0}, step=step)
        if step == 9:
            console.tick()
            tracemalloc.start()
    console.tick()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert capsys.readouterr().out.count("1.00s") == 200
    assert kept < 200 * 2000, "two small rows a step, not two whole ones, of 20 KB"
