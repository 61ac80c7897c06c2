import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paged.runtime import llm as llm_module
from paged.runtime.config import EngineConfig
from paged.runtime.engine import engine_config
from paged.runtime.errors import EngineDead, InvalidRequest
from paged.runtime.llm import LLM
from paged.runtime.outputs import RequestOutput
from paged.runtime.sampling_params import RequestOutputKind, SamplingParams
from tests.runtime.fakes import EOS, FakeCore, engine

ROOT = Path(__file__).parents[2]


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def llm(core: FakeCore, monkeypatch: pytest.MonkeyPatch) -> LLM:
    return make(core, monkeypatch)


def make(core: FakeCore, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> LLM:
    monkeypatch.setattr(llm_module, "load_engine", lambda config: engine(core, **changes))
    return LLM()


def generate(llm: LLM, *arguments: Any, **settings: Any) -> list[RequestOutput]:
    return llm.generate(*arguments, use_tqdm=False, **settings)


def texts(outputs: list[RequestOutput]) -> list[list[str]]:
    return [[each.text for each in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "prompt", ["abc", {"prompt": "abc"}, [97, 98, 99], {"prompt_token_ids": [97, 98, 99]}]
)
def test_one_prompt(llm, prompt):
    (output,) = generate(llm, prompt, SamplingParams(max_tokens=5))
    assert output.outputs[0].text == "abcab"
    assert output.outputs[0].finish_reason == "length"
    assert output.prompt_token_ids == [97, 98, 99]
    assert output.finished


def test_results_come_in_the_order_of_prompts(llm):
    prompts = ["ab", [99], {"prompt": "de"}, {"prompt_token_ids": [102]}]
    params = [SamplingParams(max_tokens=count) for count in (4, 1, 3, 2)]
    outputs = generate(llm, prompts, params)
    assert texts(outputs) == [["abab"], ["c"], ["ded"], ["ff"]]


@pytest.mark.parametrize(
    "prompts", [np.array([[97, 98], [99, 97]]), [np.array([97, 98]), np.array([99, 97])]]
)
def test_arrays_of_token_ids_are_prompts(llm, prompts):
    outputs = generate(llm, prompts, SamplingParams(max_tokens=2))
    assert texts(outputs) == [["ab"], ["ca"]]
    (alone,) = generate(llm, prompts[0], SamplingParams(max_tokens=2))
    assert alone.prompt_token_ids == [97, 98]


@pytest.mark.parametrize("prompts", [None, 5, {"a"}, iter("ab"), b"ab", np.array(5), [b"ab"]])
def test_what_is_no_prompt_is_refused(llm, core, prompts):
    with pytest.raises(InvalidRequest, match="must be text"):
        generate(llm, prompts)
    assert core.num_steps == 0


def test_no_prompts_no_results(llm, core):
    assert generate(llm, []) == []
    assert core.num_steps == 0


def test_without_parameters_the_models_own_count(llm):
    assert generate(llm, "a")[0].outputs[0].text == "a" * 16
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=16)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_results_are_whole_whatever_the_output_kind(llm, kind):
    params = SamplingParams(max_tokens=4, n=2, output_kind=kind)
    assert texts(generate(llm, "ab", params)) == [["abab", "baba"]]


def test_a_stop_string_ends_that_sequence_in_the_core(llm, core):
    params = SamplingParams(max_tokens=6, n=2, stop="ba")
    (output,) = generate(llm, "abc" * 2 + "d", replace(params, stop="bc"))
    assert texts([output]) == [["a", ""]]
    assert core.aborted == [("0", 1), ("0", 0)]
    assert core.live == {}


def test_end_of_sequence_ends(llm):
    output = generate(llm, [97, EOS], SamplingParams(max_tokens=9))[0].outputs[0]
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", None)
    assert output.token_ids == [97, EOS]


def test_parameters_must_match_prompts(llm):
    with pytest.raises(InvalidRequest, match="sampling_params has 2 entries for 1 prompts"):
        generate(llm, ["a"], [SamplingParams()] * 2)
    with pytest.raises(InvalidRequest, match="priority has 1 entries for 2 prompts"):
        generate(llm, ["a", "b"], priority=[1])


def test_nothing_starts_if_one_prompt_is_wrong(llm, core):
    with pytest.raises(InvalidRequest, match="empty"):
        generate(llm, ["a", "b", ""])
    assert core.live == {}
    assert core.num_steps == 0


def test_priorities_reach_the_core(core, monkeypatch):
    llm = make(core, monkeypatch, has_priorities=True)
    seen = []
    core.on_step = lambda: seen.append([each.request.priority for each in core.live.values()])
    generate(llm, ["a", "b"], SamplingParams(max_tokens=1), priority=[2, 1])
    assert seen[0] == [2, 1]
    generate(llm, ["a", "b"], SamplingParams(max_tokens=1), priority=3)
    assert seen[-2] == [3, 3]


def raising(error: BaseException, core: FakeCore, at: int) -> Callable[[], None]:
    def on_step() -> None:
        if core.num_steps == at:
            raise error

    return on_step


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_leaves_nothing_behind(llm, core, error):
    core.on_step = raising(error(), core, at=3)
    with pytest.raises(error):
        generate(llm, ["abc", "def"], SamplingParams(n=2))
    assert core.live == {}
    assert texts(generate(llm, "xy", SamplingParams(max_tokens=3))) == [["xyx"]]


def test_ctrl_c_waits_for_the_step(llm, core):
    finished_steps = []

    def on_step() -> None:
        if core.num_steps == 3:
            os.kill(os.getpid(), signal.SIGINT)
        finished_steps.append(core.num_steps)

    core.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "abc")
    assert finished_steps == [1, 2, 3]
    assert core.live == {}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert texts(generate(llm, "xy", SamplingParams(max_tokens=3))) == [["xyx"]]


def test_a_second_ctrl_c_does_not_wait(llm, core):
    def on_step() -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("still in the step")

    core.on_step = on_step
    with pytest.raises(KeyboardInterrupt):
        generate(llm, "abc")


def test_death_is_raised_now_and_later(llm, core):
    core.dies_at = 3
    with pytest.raises(EngineDead, match="the device fell off"):
        generate(llm, ["abc", "def"])
    with pytest.raises(EngineDead, match="the device fell off"):
        generate(llm, "abc")


def test_calls_from_threads_take_turns(llm):
    results: dict[int, list[list[str]]] = {}

    def work(number: int) -> None:
        outputs = generate(llm, [chr(97 + number)] * 3, SamplingParams(max_tokens=10))
        results[number] = texts(outputs)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [[chr(97 + number) * 10]] * 3 for number in range(8)}


def test_progress_goes_to_the_terminal(llm, capsys):
    llm.generate(["a", "b"])
    assert "2/2" in capsys.readouterr().err
    generate(llm, ["a", "b"])
    assert capsys.readouterr().err == ""


def test_chat_takes_one_conversation_or_many(llm):
    params = SamplingParams(max_tokens=3, skip_special_tokens=False)
    conversation = [{"role": "user", "content": "a"}]
    (output,) = llm.chat(conversation, params, use_tqdm=False)
    assert (output.prompt, output.prompt_token_ids) == ("<user>a:", [257, 97, 58])
    assert output.outputs[0].text == "<user>a:"
    outputs = llm.chat([conversation, conversation * 2], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["<user>a:", "<user>a<user>a:"]


def test_chat_hands_keywords_to_the_template(llm):
    (output,) = llm.chat(
        [{"role": "user", "content": "a"}],
        use_tqdm=False,
        chat_template="{{ tools[0].name }}{{ mood }}{{ add_generation_prompt }}",
        tools=[{"name": "clock"}],
        add_generation_prompt=False,
        chat_template_kwargs={"mood": "!"},
    )
    assert output.prompt == "clock!False"


def test_the_rest_of_the_surface(llm, core):
    assert llm.get_tokenizer().encode("a") == [97]
    assert llm.get_metrics().num_running == 0
    assert llm.reset_prefix_cache() is True
    assert llm.config == EngineConfig()


def test_without_a_tokenizer(core, monkeypatch):
    llm = make(core, monkeypatch, tokenizer=None)
    (output,) = generate(llm, {"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=3))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [1, 2, 1])
    with pytest.raises(RuntimeError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_closing(llm, core):
    with llm as entered:
        assert entered is llm
    assert core.closed
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        generate(llm, "a")


def test_a_forgotten_llm_closes_itself(core, monkeypatch):
    llm = make(core, monkeypatch)
    del llm
    gc.collect()
    assert core.closed


def test_the_interpreters_exit_closes():
    script = """
        from paged.runtime import llm as llm_module
        from tests.runtime.fakes import FakeCore, engine

        class Core(FakeCore):
            def close(self):
                print("closed")

        llm_module.load_engine = lambda config: engine(Core())
        llm = llm_module.LLM()
        print(llm.generate("ab", use_tqdm=False)[0].outputs[0].text)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr, run.returncode) == ("ab" * 8 + "\nclosed\n", "", 0)


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("max_num_seq", "did you mean 'max_num_seqs'?"),
        ("gpu_memory_utilisation", "did you mean 'gpu_memory_utilization'?"),
        ("xyzzy", "see EngineConfig for what there is"),
    ],
)
def test_unknown_keywords_get_a_hint(given, hint):
    with pytest.raises(TypeError) as caught:
        LLM(None, **{given: 1})
    assert str(caught.value) == f"unexpected keyword argument {given!r}: {hint}"


def test_keywords_become_the_configuration():
    assert engine_config("m", {"block_size": 32}) == EngineConfig(model="m", block_size=32)


def test_keywords_may_have_other_names():
    assert engine_config("m", {"swap_space": 4}) == EngineConfig(model="m", kv_offloading_size=4)
    with pytest.raises(TypeError, match="'swap_space' and another name of 'kv_offloading_size'"):
        engine_config("m", {"kv_offloading_size": 4, "swap_space": 4})
