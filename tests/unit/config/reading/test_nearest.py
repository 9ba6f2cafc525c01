import pytest

from prime_rl.config.evals import EvalConfig
from prime_rl.config.inference import InferenceConfig
from prime_rl.config.orchestrator import OrchestratorConfig
from prime_rl.config.reading.nearest import distance, is_misspelt, nearest_keys, unknown_key
from prime_rl.config.roots import RLConfig
from prime_rl.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("one", "other", "edits"),
    [("lr", "lr", 0), ("lr", "l", 1), ("lr", "rl", 1), ("lr", "lrr", 1), ("lr", "lx", 1), ("kitten", "sitting", 3)],
)
def test_an_edit_is_one_letter_more_less_or_other_or_two_neighbours_swapped(one, other, edits):
    assert distance(one, other, 9) == distance(other, one, 9) == edits


def test_distances_beyond_what_matters_are_not_counted():
    assert distance("abcdefgh", "zyxwvuts", 2) == 3


@pytest.mark.parametrize(
    ("root", "written", "expected"),
    [
        (RLConfig, "trainer.optm.lr", ["trainer.optim.lr"]),
        (RLConfig, "trianer.optim.lr", ["trainer.optim.lr"]),
        (RLConfig, "trainer.optm.nothing", ["trainer.optim"]),
        (RLConfig, "max_stps", ["max_steps"]),
        (RLConfig, "optim.lr", ["trainer.optim.lr", "orchestrator.optim.lr"]),
        (RLConfig, "trainer_optim.lr", ["trainer.optim.lr"]),
        (RLConfig, "maxsteps", ["max_steps"]),
        (RLConfig, "orchestrator.evn.args.max_words", ["orchestrator.env.args.max_words"]),
        (TrainerConfig, "ckpt.keep_lst", ["ckpt.keep_last"]),
        (TrainerConfig, "optim.betas3", ["optim.betas1", "optim.betas2"]),
        (TrainerConfig, "monitor.wandb.nam", ["wandb.name"]),
        (TrainerConfig, "asinc_level", ["async_level"]),
        (OrchestratorConfig, "enviroment.id", ["environment.id"]),
        (EvalConfig, "environmentids", ["environment_ids"]),
        (InferenceConfig, "tensor_paralel_size", ["tensor_parallel_size"]),
        (InferenceConfig, "max_num_seq", ["max_num_seqs"]),
        (RLConfig, "zzz.qqq", []),
    ],
)
def test_the_nearest_key_is_that_with_the_fewest_edits(root, written, expected):
    assert nearest_keys(root, tuple(written.split(".")))[: len(expected) or 1] == expected


def test_the_answer_names_the_key_its_place_and_every_equally_near_key():
    text = unknown_key(RLConfig, ("orchestrator", "env", 1, "idd"), "rl.toml:3")
    assert text == "orchestrator.env.1.idd: no such key (rl.toml:3); did you mean orchestrator.env.1.id?"
    text = unknown_key(TrainerConfig, ("model", "xp"), "--model.xp")
    assert "did you mean model.ep, model.tp or model.cp?" in text
    assert "see --help for the keys there are" in unknown_key(RLConfig, ("zzz", "qqq"), "--zzz.qqq")


def test_only_a_slip_of_the_finger_counts_as_misspelt():
    assert is_misspelt(InferenceConfig, ("max_modle_len",))
    assert is_misspelt(InferenceConfig, ("bakend",))
    assert not is_misspelt(InferenceConfig, ("swap_space",))
    assert not is_misspelt(InferenceConfig, ("disable_log_requests",))
