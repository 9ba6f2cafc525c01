"""The parts of the benchmarks that compute: what they report must be right, whatever they measure."""

import importlib
import json
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    """The scripts import each other by their bare names, as scripts of one directory do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        return {name: importlib.import_module(name) for name in ("http_load", "inference", "models", "update")}


@pytest.mark.parametrize(
    ("name", "millions"), [("3.3m", 3.4), ("30m", 29.4), ("150m", 149.0), ("0.6b", 596.0), ("4b", 4022.0)]
)
def test_a_preset_has_about_the_parameters_of_its_name(modules, name, millions):
    shape = modules["models"].SHAPES[name]
    attention = 2 * shape.hidden * shape.head * (shape.heads + shape.kv_heads)
    layers = shape.layers * (attention + 3 * shape.hidden * shape.mlp)
    parameters = layers + shape.vocab * shape.hidden * (1 if shape.tied else 2)
    assert parameters / 1e6 == pytest.approx(millions, rel=0.01)


def response(modules, *, tokens=4, logprobs=None, versions=None, status=200):
    content = [{"logprob": value} for value in (logprobs if logprobs is not None else [-1.0] * tokens)]
    choice = {"token_ids": list(range(tokens)), "logprobs": {"content": content}}
    body = json.dumps({"choices": [choice], "versions": [versions or [[0, tokens]]]}).encode()
    return modules["http_load"].Response(status, body, 0.0, 0.0)


def work(modules, **changes):
    sizes = {"requests": 3, "concurrency": 2, "prompt_tokens": 5, "new_tokens": 4, "vocab": 9} | changes
    return modules["http_load"].Workload(**sizes)


def test_an_answer_that_is_not_whole_ends_the_benchmark(modules):
    check, load = modules["http_load"].check, work(modules)
    check([response(modules)], load)
    for broken in ({"tokens": 3}, {"logprobs": [-1.0] * 3}, {"logprobs": [0.5] * 4}, {"status": 503}):
        with pytest.raises(AssertionError):
            check([response(modules, **broken)], load)


def test_versions_of_an_answer_add_up_to_its_tokens_and_never_go_back(modules):
    versions_of, load = modules["http_load"].versions_of, work(modules)
    runs = [response(modules, versions=[[1, 3], [2, 1]]), response(modules, versions=[[2, 4]])]
    assert versions_of(runs, load) == {1: 3, 2: 5}
    for wrong in ([[1, 3]], [[2, 1], [1, 3]]):
        with pytest.raises(AssertionError):
            versions_of([response(modules, versions=wrong)], load)


def test_prompts_differ_between_runs_so_that_no_prefix_cache_helps(modules):
    load = work(modules, vocab=1000)
    assert load.prompts(0) == load.prompts(0)
    assert load.prompts(0) != load.prompts(1)
    assert {len(prompt) for prompt in load.prompts(0)} == {5}
    assert 0 not in {token for prompt in work(modules).prompts(3) for token in prompt}


def test_an_update_that_stops_generation_for_half_a_second_costs_half_a_second(modules):
    times = [tick / 10 for tick in range(100)]
    tokens = [1000 * (t if t < 5.0 else max(5.0, t - 0.5)) for t in times]
    slowest, lost = modules["update"].cost(list(zip(times, tokens, strict=True)), 5.0, 6.0)
    assert slowest == pytest.approx(0.0, abs=1e-6)
    assert lost == pytest.approx(0.5, abs=0.11)


def test_an_update_that_nobody_notices_costs_nothing(modules):
    samples = [(tick / 10, 100.0 * tick) for tick in range(100)]
    assert modules["update"].cost(samples, 5.0, 6.0) == (pytest.approx(1.0), pytest.approx(0.0, abs=1e-9))


def test_ratios_are_taken_within_pairs(modules):
    runs = {
        "embedded": [{"tokens_per_s": 300.0}, {"tokens_per_s": 100.0}],
        "vllm": [{"tokens_per_s": 100.0}, {"tokens_per_s": 50.0}],
    }
    first, second = modules["inference"].report({("offline", "float32"): runs}).splitlines()[1:]
    assert first.split()[:4] == ["offline", "float32", "embedded", "200"]
    assert second.split() == ["offline", "float32", "vllm", "75", "-", "-", "-", "2.50", "3.00", "2.00"]


class Side:
    """Stands for a process; notes what is asked of it."""

    def __init__(self, name, setting):
        self.asked = setting.asked
        self.name = name
        self.asked.append(f"start {name}")

    def warm_up(self):
        self.asked.append(f"warm {self.name}")

    def run(self, number):
        self.asked.append(f"run {self.name} {number}")
        return {"tokens_per_s": 10.0, "seconds": 1.0}

    def close(self):
        self.asked.append(f"close {self.name}")


@pytest.mark.parametrize(("until", "pairs"), [(0.0, 1), (math.inf, 3)])
def test_all_sides_start_at_once_and_pairs_that_would_not_fit_are_left_out(modules, monkeypatch, capsys, until, pairs):
    monkeypatch.setattr(modules["inference"], "Http", Side)
    asked, runs = [], {"a": [], "b": []}
    modules["inference"].measure("http", runs, SimpleNamespace(asked=asked, dtype="float32"), 3, until)
    assert asked[:4] == ["start a", "start b", "warm a", "warm b"]
    assert asked[4:-2] == [f"run {name} {pair}" for pair in range(pairs) for name in "ab"]
    assert sorted(asked[-2:]) == ["close a", "close b"]
    assert len(runs["a"]) == len(runs["b"]) == pairs
    assert ("no time for more than 1 of 3 pairs" in capsys.readouterr().out) == (pairs == 1)


def test_the_cache_of_every_side_holds_all_requests_at_a_time(modules):
    load = work(modules, concurrency=256, prompt_tokens=128, new_tokens=504)
    per_token = 2 * 28 * 8 * 128 * 2  # keys and values of 28 layers, 8 heads of 128 in bfloat16
    expected = 1.25 * 256 * 640 * per_token / 2**30
    assert modules["inference"].kv_cache_gb("0.6b", "bfloat16", load) == pytest.approx(expected)


def test_a_script_tells_how_it_is_used(modules):
    for name, module in modules.items():
        assert f"python benchmarks/{name}.py" in (module.__doc__ or "")
