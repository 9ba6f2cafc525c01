"""Environments of every kind that people write, through the door, over a real HTTP server."""

import math

import msgspec
import pytest
from starlette.responses import JSONResponse, StreamingResponse
from tests.doubles.inference import END, START, InferenceDouble, save_tokenizer
from tests.unit.environments.verifiers.playing import importable, load, replies, request_of, roll
from transformers import PreTrainedTokenizerFast

from prime_rl.environments.rollouts import FailureKind
from prime_rl.environments.trajectories import training_samples
from prime_rl.environments.watch import Watch
from prime_rl.errors import EnvironmentSetupError

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}<|im_start|>tool {{ (tool.function or tool).name }}<|im_end|>\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

MODULES = {
    "checked_env": """
        import asyncio
        import os
        import time
        from concurrent.futures import ProcessPoolExecutor

        import verifiers.legacy as vf
        from datasets import Dataset

        def is_right(said):
            time.sleep(0.3)
            return os._exit(3) if said == "poison" else 1.0

        class Checked(vf.Rubric):
            def __init__(self):
                super().__init__(funcs=[self.right])
                self.executor = ProcessPoolExecutor(max_workers=1)

            async def right(self, completion):
                try:
                    return await asyncio.get_running_loop().run_in_executor(
                        self.executor, is_right, completion[-1].content
                    )
                except Exception:
                    return 0.0

        def load_environment():
            rows = [{"question": "go", "answer": str(i)} for i in range(4)]
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=Checked())
    """,
    "countdown_env": """
        import verifiers.legacy as vf
        from datasets import Dataset

        class Countdown(vf.MultiTurnEnv):
            async def setup_state(self, state):
                state["left"] = int(state["answer"])
                return state

            @vf.stop
            async def is_over(self, state):
                return state["left"] == 0

            async def env_response(self, messages, state):
                state["left"] -= 1
                if state["left"] == int(state["info"]["breaks_at"]):
                    raise TimeoutError("the sandbox did not answer")
                return [{"role": "user", "content": f"{state['left']} left"}]

        def all_said(completion, state):
            return float(sum(message.content == "tick" for message in completion) / 3 - state["left"])

        def load_environment(breaks_at=-1, max_seq_len=None):
            rows = [{"question": "go", "answer": "2", "info": {"breaks_at": breaks_at}}]
            rubric = vf.Rubric(funcs=[all_said])
            return Countdown(
                dataset=Dataset.from_list(rows), rubric=rubric, max_turns=9, max_seq_len=max_seq_len
            )
    """,
    "shop_env": """
        import verifiers.legacy as vf
        from datasets import Dataset

        def price(item: str) -> int:
            \"\"\"The price of an item.\"\"\"
            return {"pear": 3}[item]

        def times(a: int, b: int) -> int:
            \"\"\"The product of two numbers.\"\"\"
            return a * b

        def bought(item: str, account: dict) -> str:
            \"\"\"Buy an item.\"\"\"
            account["items"].append(item)
            return "done"

        class Stateful(vf.StatefulToolEnv):
            async def setup_state(self, state):
                state["account"] = {"items": []}
                return state

            def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
                return {**tool_args, "account": state["account"]} if tool_name == "bought" else tool_args

        def right(completion, answer):
            return float(completion[-1].content == answer)

        def has(state):
            return float(len(state["account"]["items"]))

        def load_environment(kind="tool"):
            data = Dataset.from_list([{"question": "two pears?", "answer": "6"}])
            if kind == "tool":
                return vf.ToolEnv(dataset=data, tools=[price, times], rubric=vf.Rubric(funcs=[right]), max_turns=5)
            environment = Stateful(dataset=data, rubric=vf.Rubric(funcs=[has]), max_turns=5)
            environment.add_tool(bought, args_to_skip=["account"])
            return environment
    """,
    "mixed_env": """
        import verifiers.legacy as vf
        from datasets import Dataset

        def of_a(completion):
            return 1.0

        def of_b(completion, answer):
            raise ZeroDivisionError("scorer of b broke")

        def best(states) -> list[float]:
            longest = max(len(state["completion"][-1].content) for state in states)
            return [float(len(state["completion"][-1].content) == longest) for state in states]

        def single(question, *funcs):
            rows = [{"question": question, "answer": "x"}]
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=list(funcs)))

        def load_environment(funcs=("of_a", "of_b")):
            functions = {"of_a": of_a, "of_b": of_b, "best": best}
            return vf.EnvGroup([single(name, functions[name]) for name in funcs], env_names=list(funcs))
    """,
    "judged_env": """
        from types import SimpleNamespace
        import verifiers.legacy as vf
        from datasets import Dataset

        class Judge:
            async def create(self, **arguments):
                question = arguments["messages"][0]["content"]
                if "broken" in question:
                    raise ConnectionError("the judge is gone")
                verdict = "yes" if question.endswith("42") else "no"
                return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=verdict))])

        def load_environment():
            parser = vf.XMLParser(["think", "answer"], answer_field="answer")
            client = SimpleNamespace(chat=SimpleNamespace(completions=Judge()))
            rubric = vf.JudgeRubric(parser=parser, judge_client=client, judge_prompt="{answer}: {response}")

            async def is_right(prompt, completion, answer, state, judge):
                return float("yes" in await judge(prompt, completion, answer, state))

            rubric.add_reward_func(is_right)
            form = vf.Rubric(funcs=[parser.get_format_reward_func()], weights=[0.5], parser=parser)
            rows = [{"question": question, "answer": question} for question in ("fine", "broken")]
            return vf.SingleTurnEnv(
                dataset=Dataset.from_list(rows), parser=parser, rubric=vf.RubricGroup([rubric, form])
            )
    """,
    "slow_env": """
        import asyncio
        import verifiers.legacy as vf
        from datasets import Dataset

        async def score(completion, answer):
            try:
                while answer == "spins" or answer == "swallows":
                    pass
            except BaseException:
                if answer == "spins":
                    raise
            if answer == "sleeps":
                await asyncio.sleep(60)
            return 0.0

        def load_environment():
            rows = [{"question": name, "answer": name} for name in ("spins", "swallows", "sleeps", "fine")]
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[score]))
    """,
    "lone_group_env": """
        import verifiers.legacy as vf
        from datasets import Dataset

        def best(completions) -> list[float]:
            lengths = [len(completion[-1].content) for completion in completions]
            if max(lengths) > 10:
                raise ZeroDivisionError("too long to compare")
            return [float(length == max(lengths)) for length in lengths]

        def vowels(completion):
            return float(sum(letter in "aeiou" for letter in completion[-1].content))

        def load_environment():
            rows = [{"question": "say", "answer": ""}]
            rubric = vf.Rubric(funcs=[best, vowels], weights=[1.0, 0.1])
            return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
    """,
}


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory):
    with importable(tmp_path_factory.mktemp("kinds"), MODULES):
        yield


def speak_tools(inference: InferenceDouble) -> None:
    """Give the model a tokenizer that calls tools."""
    tokenizer = save_tokenizer(inference.model)
    tokenizer.add_special_tokens({"additional_special_tokens": [START, "<tool_call>", "</tool_call>"]})
    tokenizer.chat_template = TOOL_TEMPLATE
    tokenizer.save_pretrained(inference.model)
    inference.tokenizer = PreTrainedTokenizerFast.from_pretrained(inference.model)


def call(name: str, **arguments) -> str:
    body = msgspec.json.format(msgspec.json.encode({"name": name, "arguments": arguments}), indent=0).decode()
    return f"<tool_call>\n{body.replace(',', ', ').replace(':', ': ')}\n</tool_call>"


async def test_a_conversation_with_state_is_one_sample_in_which_each_sampled_token_is_once(inference):
    inference.reply = lambda text: "tick"
    (rollout,) = await roll(inference, "countdown-env")
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0
    assert rollout.metrics["num_turns"] == 3.0
    said = [message["content"] for message in rollout.messages]
    assert said == ["go", "tick", "1 left", "tick", "0 left", "tick"]
    (sample,) = training_samples(rollout, advantage=1.0, temperature=1.0)
    assert inference.tokenizer.decode(sample.token_ids[sample.loss_mask]) == f"tick{END}" * 3


def _lost():
    async def half():
        yield b'{"choices": [{"token_'
        raise ConnectionResetError("the server was lost")

    return StreamingResponse(half())


@pytest.mark.parametrize(
    "trouble", [lambda: JSONResponse({"error": {"message": "oops"}}, 500), _lost], ids=["500", "lost"]
)
async def test_an_error_or_a_lost_answer_of_the_only_server_in_the_middle_costs_no_rollout_and_no_token_twice(
    inference, trouble
):
    inference.reply = lambda text: "tick"
    inference.fault = lambda text, number: trouble() if number == 2 else None
    (rollout,) = await roll(inference, "countdown-env", retry_s=30.0)
    assert rollout.failure is None, rollout.failure
    assert (rollout.reward, rollout.failovers, inference.num_requests) == (1.0, 1, 4)
    (sample,) = training_samples(rollout, advantage=1.0, temperature=1.0)
    assert inference.tokenizer.decode(sample.token_ids[sample.loss_mask]) == f"tick{END}" * 3


async def test_a_timeout_in_the_environments_code_is_a_failure_and_no_short_conversation(inference):
    inference.reply = lambda text: "tick"
    (rollout,) = await roll(inference, "countdown-env", args={"breaks_at": 0})
    assert len(rollout.turns) == 2
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.TIMEOUT
    assert math.isnan(rollout.reward)


async def test_a_prompt_beyond_what_the_environment_allows_is_too_long(inference):
    inference.reply = lambda text: "tick"
    (rollout,) = await roll(inference, "countdown-env", args={"max_seq_len": 60})
    assert rollout.failure is not None
    assert rollout.failure.kind is FailureKind.TOO_LONG
    assert "max_seq_len" in rollout.failure.message


async def test_two_tools_are_called_with_the_arguments_in_the_models_output(inference):
    speak_tools(inference)
    replies(inference, call("price", item="pear"), call("times", a=2, b=3), "6")
    (rollout,) = await roll(inference, "shop-env")
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 1.0
    assert rollout.metrics["price_calls"] == rollout.metrics["times_calls"] == 1.0
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["3", "6"]
    assert len(rollout.turns) == 3


async def test_a_tool_that_fails_is_told_to_the_model_and_is_no_failure_of_the_rollout(inference):
    speak_tools(inference)
    replies(inference, call("price", item="plum"), "6")
    (rollout,) = await roll(inference, "shop-env")
    assert rollout.failure is None, rollout.failure
    assert [message["content"] for message in rollout.messages if message["role"] == "tool"] == ["'plum'"]


async def test_a_tool_has_the_state_of_its_rollout(inference):
    speak_tools(inference)
    replies(inference, call("bought", item="pear"), call("bought", item="fig"), "done")
    (rollout,) = await roll(inference, "shop-env", args={"kind": "stateful"})
    assert rollout.failure is None, rollout.failure
    assert rollout.reward == 2.0


async def test_a_model_without_tool_calls_cannot_play_an_environment_with_tools(inference):
    (rollout,) = await roll(inference, "shop-env")
    assert rollout.failure is not None
    assert "does not support tools" in rollout.failure.message


async def test_environments_in_a_group_are_scored_by_their_own_rubric_whose_errors_are_failures(inference):
    of_a, of_b = await roll(inference, "mixed-env", examples=(0, 1))
    assert of_a.failure is None
    assert of_a.reward == 1.0
    assert of_b.failure is not None
    assert of_b.failure.kind == FailureKind.SCORER
    assert of_b.failure.message == "scorer of b broke"


async def test_a_judge_scores_what_the_parser_finds_and_a_judge_that_is_gone_is_a_failure(inference):
    replies(inference, "<think>so</think><answer>42</answer>", "<answer>41</answer>", "<answer>42</answer>")
    right, wrong, broken = [(await roll(inference, "judged-env", examples=(example,)))[0] for example in (0, 0, 1)]
    assert right.reward > 1.0 >= wrong.reward
    assert right.metrics["is_right"] == 1.0
    assert wrong.metrics["is_right"] == 0.0
    assert broken.failure is not None
    assert broken.failure.kind == FailureKind.SCORER
    assert "the judge is gone" in broken.failure.message


async def test_scoring_ends_at_its_deadline_even_in_code_that_never_gives_the_loop_back(inference):
    watch = Watch()
    watch.start()
    rollouts = await roll(inference, "slow-env", examples=(0, 1, 2, 3), score_timeout_s=0.3)
    watch.stop()
    assert watch.take_lag() > 0.3
    kinds = [rollout.failure and rollout.failure.kind for rollout in rollouts[:3]]
    assert kinds == [FailureKind.SCORER_TIMEOUT] * 3
    held = [rollout.failure.message for rollout in rollouts[:2]]
    assert held == ["scoring took longer than 0.3 s and held the event loop of its worker"] * 2
    assert rollouts[2].failure.message.startswith("scoring took longer than 0.3 s")


async def test_an_answer_that_kills_the_process_that_checks_it_fails_alone(inference):
    replies(inference, "poison", "pea", "leek", "kale")
    rollouts = await roll(inference, "checked-env", examples=(0, 1, 2, 3))
    (failed,) = [rollout for rollout in rollouts if rollout.failure is not None]
    assert failed.failure.kind == FailureKind.SCORER
    assert failed.failure.type == "BrokenProcessPool"
    assert failed.messages[-1]["content"] == "poison"
    assert [rollout.reward for rollout in rollouts if rollout is not failed] == [1.0] * 3


async def test_without_scoring_no_reward_function_is_called(inference):
    requests = [request_of(0, 1, is_scored=False)]
    (rollout,) = await roll(inference, "mixed-env", requests=requests)
    assert rollout.failure is None
    assert rollout.reward == 0.0
    assert rollout.turns


@pytest.mark.parametrize(("env_id", "args"), [("lone-group-env", {}), ("mixed-env", {"funcs": ["best", "of_a"]})])
async def test_reward_functions_over_groups_see_the_whole_group(inference, env_id, args):
    environment = await load(inference, env_id, args=args)
    assert environment.scores_groups
    replies(inference, "pea", "potato", "leek")
    try:
        for number in range(3):
            rollout = await environment.run(request_of(number))
            assert rollout.failure is None
        environment.forget(2)
        rollouts = await environment.score([0, 1])
        assert [rollout.metrics["best"] for rollout in rollouts] == [0.0, 1.0]
        assert [rollout.id for rollout in rollouts] == [0, 1]
        assert rollouts[1].reward >= 1.0 > rollouts[0].reward
        assert rollouts[1].timings["score"] > 0
        assert environment._kept == {}
    finally:
        await environment.close()


async def test_a_group_that_cannot_be_scored_has_no_reward(inference):
    environment = await load(inference, "lone-group-env")
    inference.reply = lambda text: "far too long a word"
    for number in range(2):
        await environment.run(request_of(number))
    for rollout in await environment.score([0, 1]):
        assert rollout.failure is not None
        assert rollout.failure.kind == FailureKind.SCORER
        assert rollout.failure.message == "too long to compare"
        assert rollout.reward != rollout.reward
    await environment.close()


async def test_a_renderer_is_taken_by_its_name(inference):
    with pytest.raises(EnvironmentSetupError, match=r"renderer\.name = 'qwen99' is no renderer"):
        await roll(inference, "mixed-env", renderer="qwen99")
    (rollout,) = await roll(inference, "mixed-env", renderer="default")
    assert rollout.failure is None


@pytest.mark.parametrize("task", ["basic_arithmetic", "letter_counting", "leg_counting"])
async def test_reasoning_gym_runs_as_verifiers_ships_it(inference, tmp_path, monkeypatch, task):
    module = f"rg_{task}"
    (tmp_path / f"{module}.py").write_text(
        "from verifiers.envs.integrations.reasoninggym_env import ReasoningGymEnv\n"
        "def load_environment(**args):\n"
        "    return ReasoningGymEnv(**args)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    inference.context = 4096
    arguments = {"gym": task, "num_train_examples": 4, "num_eval_examples": 2, "seed": 7}
    environment = await load(inference, module, args=arguments)
    try:
        assert (environment.num_train, environment.num_eval, environment.has_eval_split) == (4, 2, True)
        answer = environment._environment.rg_dataset[2]["answer"]
        replies(inference, f"<answer>{answer}</answer>", "<answer>no idea</answer>")
        right, wrong = [await environment.run(request_of(number, 2)) for number in range(2)]
        assert right.failure is None, right.failure
        assert right.reward == 1.0
        assert wrong.failure is None
        assert wrong.reward < 0.1
    finally:
        await environment.close()


async def test_an_example_has_the_columns_of_its_row(inference):
    environment = await load(inference, "checked_env")
    try:
        assert environment.example(2)["prompt"][-1]["content"] == "go"
        assert environment.example(2)["answer"] == "2"
    finally:
        await environment.close()
