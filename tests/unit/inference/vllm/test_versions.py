from prime_rl.inference.vllm.versions import Answer, Choice, Prompt, cut_all


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


def test_only_what_is_in_flight_is_parted():
    prompt = Prompt(2, None)
    prompt.begin(0, "a", 0)
    prompt.begin(1, "b", 0)
    cut_all([prompt], {"a": 4}.get, 1)  # b has finished
    prompt.choices[0].num_tokens = prompt.choices[1].num_tokens = 6
    assert prompt.runs() == [[(0, 4), (1, 2)], [(0, 6)]]


def test_a_choice_that_begins_after_the_update_has_the_new_version_only():
    prompt = Prompt(2, None)
    prompt.begin(0, "a", 0)
    cut_all([prompt], {"a": 4}.get, 1)
    prompt.begin(1, "b", 1)
    prompt.choices[0].num_tokens = prompt.choices[1].num_tokens = 6
    assert prompt.runs() == [[(0, 4), (1, 2)], [(1, 6)]]


def test_a_request_keeps_its_adapter_whatever_comes():
    prompt = Prompt(1, 4)
    cut_all([prompt], {}.get, 9)  # before the engine has it
    prompt.begin(0, "a", 9)
    cut_all([prompt], {"a": 3}.get, 10)
    prompt.choices[0].num_tokens = 5
    assert prompt.runs() == [[(4, 5)]]


def test_an_answer_lists_all_choices_of_all_prompts_in_order():
    answer = Answer()
    for version in (1, 2):
        prompt = Prompt(2, None)
        for index in (1, 0):  # in whatever order they began
            prompt.begin(index, f"{version}{index}", version)
            prompt.choices[index].num_tokens = 10 * version + index
        answer.prompts.append(prompt)
    assert answer.runs() == [[(1, 10)], [(1, 11)], [(2, 20)], [(2, 21)]]


def test_a_choice_that_never_began_has_no_runs():
    assert Prompt(1, None).runs() == [[]]
