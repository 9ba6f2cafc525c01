import msgspec
import pytest
from tests.unit.environments.scripted import group_request_of, pool_over, request_of, spec_of

from prime_rl.environments.fingerprints import fingerprint


def test_an_example_is_known_by_its_keys_alone_and_by_all_columns_where_it_has_none_of_them():
    keys = ("task", "prompt")
    one = {"prompt": [{"role": "user", "content": "2 + 2?"}], "answer": "4", "idx": 3}
    assert fingerprint(one, keys) == fingerprint(one | {"answer": "5", "idx": 9}, keys)
    assert fingerprint(one, keys) != fingerprint(one | {"task": "sums"}, keys)
    assert fingerprint(one, keys) != fingerprint(one | {"prompt": "2 + 3?"}, keys)
    bare = {"question": "2 + 2?", "idx": 3}
    assert fingerprint(bare, keys) == fingerprint(dict(reversed(bare.items())), keys)
    assert fingerprint(bare, keys) != fingerprint(bare | {"idx": 4}, keys)
    assert 0 < fingerprint({}, keys) < 2**64


def test_what_json_does_not_know_is_taken_as_it_is_written():
    assert fingerprint({"prompt": {1, 2}}, ["prompt"]) == fingerprint({"prompt": {1, 2}}, ["prompt"])
    assert fingerprint({"prompt": "\ud800"}, ["prompt"]) != fingerprint({"prompt": "?"}, ["prompt"])


@pytest.mark.parametrize("scores_groups", [False, True])
async def test_rollouts_tell_by_what_their_example_is_recognised_and_a_worker_that_of_all_examples(
    tmp_path, scores_groups
):
    keys, words = ("prompt",), ("ok", "right", "ok")
    prints = [fingerprint({"prompt": word}, keys) for word in words]
    spec = msgspec.structs.replace(spec_of(*words, scores_groups=scores_groups), hash_keys=keys, tells_examples=True)
    async with pool_over(spec, tmp_path) as pool:
        assert pool.size.fingerprints == prints
        request = group_request_of(1, group=-1, example=1) if scores_groups else request_of(1)
        assert (await pool.run(request)).fingerprint == prints[1]
        assert (await pool.run(msgspec.structs.replace(request, split="eval"))).fingerprint == 0
    async with pool_over(msgspec.structs.replace(spec, hash_keys=(), tells_examples=False), tmp_path) as pool:
        assert pool.size.fingerprints == []
        assert (await pool.run(request)).fingerprint == 0
