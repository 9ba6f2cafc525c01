from prime_rl.journal import Journal
from prime_rl.monitors.base import JsonlMonitor, read_metrics
from prime_rl.orchestrator.evaluated import cut_off, evaluated_versions
from prime_rl.paths import RunPaths


def test_each_kind_has_the_version_of_its_last_row(tmp_path):
    paths = RunPaths(tmp_path)
    assert evaluated_versions(paths) == {}
    monitor = JsonlMonitor(paths.metrics("eval"))
    for step, name in ((0, "val/a/avg@1"), (0, "eval/b/avg@1"), (2, "eval/b/avg@1"), (3, "val/a/avg@1")):
        monitor.log({name: 0.5, f"time/{name}": 1.0}, step=step)
    monitor.close()
    assert evaluated_versions(paths) == {"eval": 2, "val": 3}
    assert evaluated_versions(paths, before=3) == {"eval": 2, "val": 0}
    assert evaluated_versions(paths) == {"eval": 2, "val": 0}, "rows of what is evaluated again are gone"
    (aside,) = read_metrics(RunPaths(paths.superseded / "1").metrics("eval"))
    assert (aside["step"], aside["val/a/avg@1"]) == (3, 0.5), "and set aside"


def test_what_had_begun_and_was_not_complete_is_cut_off_unless_the_run_went_back_since(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    assert cut_off(paths) == {}
    journal = Journal(paths.journal, "orchestrator")
    for kind in ("eval", "val"):
        journal.note("evaluation_begun", step=4, kind=kind)
    Journal(paths.journal, "trainer").note("batch_consumed", step=4, digest="1")
    journal.note("evaluation_complete", step=4, kind="val")
    assert cut_off(paths) == {"eval": 4}
    journal.note("recovered", step=5, how="recovered")
    assert cut_off(paths) == {"eval": 4}
    journal.note("recovered", step=2, how="resumed")
    assert cut_off(paths) == {}
    with paths.journal.open("a") as file:
        file.write("damaged\n")
    assert cut_off(paths) == {}
    assert "What was evaluated when the run was ended is not known" in caplog.text
