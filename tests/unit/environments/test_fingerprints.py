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
