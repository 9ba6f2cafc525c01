from types import SimpleNamespace

from prime_rl.inference.vllm.versions import Answer, Choice, Prompt, Versions


def test_a_request_without_an_update_is_one_run():
    choice = Choice("r", [(0, 3)], num_tokens=7)
    assert choice.runs() == [(3, 7)]


def test_an_update_parts_the_tokens_where_the_request_was():
    choice = Choice("r", [(0, 0)])
    choice.cut(5, 1)
    choice.cut(9, 2)
    choice.num_tokens = 12
    assert choice.runs() == [(0, 5), (1, 4), (2, 3)]


def test_a_request_that_had_no_token_began_with_the_new_weights():
    choice = Choice("r", [(0, 0)])
    choice.cut(0, 1)
    choice.num_tokens = 4
    assert choice.runs() == [(1, 4)]


def test_two_updates_without_a_token_between_them_leave_the_last():
    choice = Choice("r", [(0, 0)])
    choice.cut(5, 1)
    choice.cut(5, 2)
    choice.num_tokens = 6
    assert choice.runs() == [(0, 5), (2, 1)]


def test_going_back_to_the_version_before_without_a_token_is_one_run():
    choice = Choice("r", [(0, 0)])
    choice.cut(5, 1)
    choice.cut(5, 0)
    choice.num_tokens = 8
    assert choice.runs() == [(0, 8)]


def test_an_update_behind_the_last_token_adds_no_empty_run():
    choice = Choice("r", [(0, 0)])
    choice.cut(5, 1)
    choice.num_tokens = 5
    assert choice.runs() == [(0, 5)]


def test_a_stop_string_that_cuts_counted_tokens_off_is_within_the_first_run():
    choice = Choice("r", [(0, 0)])
    choice.cut(5, 1)
    choice.num_tokens = 3
    assert choice.runs() == [(0, 3)]


def request(request_id, *, lora_request=None, sampling_params="some"):
    """What of vLLM's request is read and written."""
    return SimpleNamespace(request_id=request_id, lora_request=lora_request, sampling_params=sampling_params)


def in_flight(versions, num_choices=1) -> Prompt:
    prompt = Prompt(num_choices)
    versions.in_flight.add(prompt)
    return prompt


def finish(prompt, num_tokens):
    for choice in prompt.choices.values():
        choice.num_tokens = num_tokens


def test_only_what_is_in_flight_is_parted():
    versions = Versions()
    prompt = in_flight(versions, 2)
    versions.begin(request("a"), prompt, 0)
    versions.begin(request("b"), prompt, 1)
    versions.use_weights(1, {"a": 4}.get)  # b has finished
    finish(prompt, 6)
    assert prompt.runs() == [[(0, 4), (1, 2)], [(0, 6)]]


def test_a_choice_that_begins_after_the_update_has_the_new_version_only():
    versions = Versions()
    prompt = in_flight(versions, 2)
    versions.begin(request("a"), prompt, 0)
    versions.use_weights(1, {"a": 4}.get)
    versions.begin(request("b"), prompt, 1)
    finish(prompt, 6)
    assert prompt.runs() == [[(0, 4), (1, 2)], [(1, 6)]]


def test_a_request_gets_the_adapter_and_its_version_in_one_moment():
    """The adapter that came while its prompt was being read, not the one of when it was sent."""
    versions = Versions()
    prompt = in_flight(versions)
    sent = request("a")
    versions.use_adapter("adapter-4", 4)
    versions.begin(sent, prompt, 0)
    finish(prompt, 5)
    assert sent.lora_request == "adapter-4"
    assert prompt.runs() == [[(4, 5)]]


def test_a_request_without_an_adapter_never_has_an_adapters_version():
    versions = Versions()
    versions.use_weights(2, {}.get)
    early = in_flight(versions)
    versions.begin(request("a"), early, 0)
    versions.use_adapter("adapter-4", 4)
    versions.use_adapter(None, 0)  # back to the full weights, which were never replaced
    late, sent = in_flight(versions), request("b")
    versions.begin(sent, late, 0)
    finish(early, 5)
    finish(late, 5)
    assert sent.lora_request is None
    assert (early.runs(), late.runs()) == ([[(2, 5)]], [[(2, 5)]])


def test_a_request_keeps_its_adapter_when_another_comes():
    versions = Versions()
    versions.use_adapter("adapter-4", 4)
    prompt, sent = in_flight(versions), request("a")
    versions.begin(sent, prompt, 0)
    versions.use_adapter("adapter-5", 5)
    finish(prompt, 5)
    assert (sent.lora_request, prompt.runs()) == ("adapter-4", [[(4, 5)]])


def test_an_adapter_that_a_request_names_itself_stays_and_is_of_the_full_weights():
    versions = Versions()
    versions.use_weights(2, {}.get)
    versions.use_adapter("adapter-4", 4)
    prompt, sent = in_flight(versions), request("a", lora_request="mine")
    versions.begin(sent, prompt, 0)
    finish(prompt, 1)
    assert (sent.lora_request, prompt.runs()) == ("mine", [[(2, 1)]])


def test_what_samples_no_tokens_gets_no_adapter_and_what_asks_no_versions_gets_one():
    versions = Versions()
    versions.use_adapter("adapter-4", 4)
    pooled, stream = request("a", sampling_params=None), request("b")
    versions.begin(pooled, None, 0)
    versions.begin(stream, None, 0)
    assert (pooled.lora_request, stream.lora_request) == (None, "adapter-4")


def test_full_weights_drop_only_answers_that_had_an_adapter():
    versions = Versions()
    plain = in_flight(versions)
    versions.begin(request("a"), plain, 0)
    versions.use_adapter("adapter-1", 1)
    adapted = in_flight(versions, 2)
    versions.begin(request("b"), adapted, 0)
    versions.begin(request("c"), adapted, 1)
    versions.use_adapter(None, 0)
    versions.drop(frozenset({"c"}))
    between = in_flight(versions)
    versions.begin(request("d"), between, 0)
    versions.use_weights(2, {"a": 3, "c": 7, "d": 0}.get)
    finish(plain, 5)
    finish(between, 5)
    assert (plain.is_dropped, adapted.is_dropped, between.is_dropped) == (False, True, False)
    assert (plain.runs(), between.runs()) == ([[(0, 3), (2, 2)]], [[(2, 5)]])


def test_an_answer_lists_all_choices_of_all_prompts_in_order():
    answer, versions = Answer(), Versions()
    for version in (1, 2):
        versions.use_weights(version, {}.get)
        prompt = Prompt(2)
        for index in (1, 0):  # in whatever order they began
            versions.begin(request(f"{version}{index}"), prompt, index)
            prompt.choices[index].num_tokens = 10 * version + index
        answer.prompts.append(prompt)
    assert answer.runs() == [[(1, 10)], [(1, 11)], [(2, 20)], [(2, 21)]]
    assert not answer.is_dropped
    prompt.is_dropped = True
    assert answer.is_dropped


def test_a_choice_that_never_began_has_no_runs():
    assert Prompt(1).runs() == [[]]
