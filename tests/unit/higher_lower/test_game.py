import math

from higher_lower.game import Game


def played(game: Game, *guesses: str) -> Game:
    for guess in guesses:
        game = game.after(guess)
    return game


def test_the_host_keeps_the_side_that_has_more_numbers() -> None:
    assert Game.new(1, 15).after("12") == Game(low=1, high=11, num_first=15, heard="lower")
    assert Game.new(1, 15).after("4") == Game(low=5, high=15, num_first=15, heard="higher")
    assert Game.new(1, 15).after("8") == Game(low=9, high=15, num_first=15, heard="higher")
    assert played(Game.new(1, 15), "12", "9") == Game(low=1, high=8, num_first=15, heard="lower")


def test_the_last_number_that_is_left_ends_the_game_with_reward_one() -> None:
    found = played(Game.new(1, 3), "2", " 3\n")
    assert found.is_found
    assert found.reward == 1.0


def test_a_number_that_was_ruled_out_is_answered_truly_and_tells_nothing_new() -> None:
    once = Game.new(1, 15).after("12")
    assert once.after("14") == once
    assert played(Game.new(5, 15), "2") == Game(low=5, high=15, num_first=11, heard="higher")
    assert Game.new(1, 15).after("99") == Game(low=1, high=15, num_first=15, heard="lower")


def test_what_is_no_number_tells_nothing() -> None:
    for reply in ("", "nine", "-3", "9.0", "3 4", "\u0663"):
        assert Game.new(1, 15).after(reply) == Game(low=1, high=15, num_first=15, heard="invalid")


def test_halving_finds_it_within_four_turns_among_up_to_fifteen_numbers_and_nothing_less_does() -> None:
    for high in range(2, 16):
        state = Game.new(1, high)
        for _ in range(4):
            if not state.is_found:
                state = state.after(str((state.low + state.high) // 2))
        assert state.is_found
    assert not played(Game.new(1, 15), "7", "11", "13", "14").is_found


def test_a_number_that_was_not_found_is_worth_half_the_share_of_the_way() -> None:
    assert Game.new(1, 15).reward == 0.0
    assert Game.new(1, 15).after("8").reward == 0.5 * (1 - math.log(7) / math.log(15))
    assert played(Game.new(1, 15), "8", "12", "14").reward == 0.5  # only 15 is left, and it was not said


def test_the_player_is_told_what_was_heard_and_what_is_left() -> None:
    assert Game.new(1, 15).message == "between 1 and 15"
    assert Game.new(1, 15).after("12").message == "lower, between 1 and 11"
    assert Game.new(1, 15).after("x").message == "invalid, between 1 and 15"
