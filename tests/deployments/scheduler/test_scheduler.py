"""Scheduler: one rule of the policy, of the messages or of the counting per test."""

import statistics
import time

import pytest

from actors.messages import SamplingParams, TokenLogprobs
from deployments.scheduler.request import Request, RequestError
from deployments.scheduler.scheduler import Scheduler
from tests.deployments.scheduler.simulation import Simulation, make_config, make_request, reference_output, text


def endless(max_tokens: int = 1000) -> SamplingParams:
    """Sampling without stop tokens."""
    return SamplingParams(max_tokens=max_tokens)


# Admission


def test_refuses_what_can_never_be_served() -> None:
    scheduler = Scheduler(make_config())
    with pytest.raises(RequestError, match=r"64 tokens .* model.max_model_len = 64") as refused:
        scheduler.add_request(make_request("long", *text(64)))
    assert refused.value.status == 400
    with pytest.raises(RequestError, match=r"needs 9 encoder cache blocks of 4, but there are 8.*num_blocks above 9"):
        scheduler.add_request(make_request("big", ("a", 33)))
    with pytest.raises(RequestError, match="no tokens"):
        scheduler.add_request(make_request("empty"))
    with pytest.raises(RequestError, match="max_tokens = 0"):
        scheduler.add_request(make_request("none", 1, max_tokens=0))
    scheduler.add_request(make_request("fits", *text(63)))
    with pytest.raises(RequestError, match="fits is in use"):
        scheduler.add_request(make_request("fits", 1))


def test_full_queue_gets_429() -> None:
    scheduler = Scheduler(make_config(scheduler__max_waiting_requests=2))
    for index in range(2):
        scheduler.add_request(make_request(f"r{index}", 1))
    with pytest.raises(RequestError, match="max_waiting_requests = 2") as refused:
        scheduler.add_request(make_request("r2", 1))
    assert refused.value.status == 429


# Steps


def test_long_prompt_is_prefilled_in_chunks_and_short_ones_together() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("long", *text(20)))
    simulation.add(make_request("short", *text(3, first=2)))
    first, second = simulation.step(), simulation.step()
    assert first is not None
    assert second is not None
    assert first.num_scheduled_tokens == {"long": 16}
    assert second.num_scheduled_tokens == {"long": 4, "short": 3}
    assert [new.request_id for new in second.new_requests] == ["short"]
    simulation.drain()


def test_prefill_and_decode_alternate() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("decoding", 1, sampling=endless(20)))
    simulation.step()
    for index in range(2):
        simulation.add(make_request(f"long{index}", *text(40, first=2 + index)))
    phases = [output.phase for output in (simulation.step() for _ in range(6)) if output is not None]
    assert phases == ["decode", "prefill", "decode", "prefill", "decode", "prefill"]
    simulation.drain()


def test_messages_carry_only_what_is_new() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("r", *text(4), sampling=endless(3)))
    first, second = simulation.step(), simulation.step()
    assert first is not None
    assert second is not None
    assert first.new_requests[0].block_ids == (0,)
    assert second.running_requests[0].new_block_ids == (1,)
    assert len(second.running_requests[0].new_token_ids) == 1
    assert second.running_requests[0].num_computed_tokens == 4
    simulation.drain()
    assert simulation.steps[-1].phase == "idle"
    assert simulation.steps[-1].finished_request_ids == ("r",)


def test_clock_never_goes_backwards() -> None:
    scheduler = Scheduler(make_config())
    scheduler.add_request(make_request("r", *text(20)))
    first = scheduler.schedule(5.0)
    assert first is not None
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule(5.1)
    scheduler.update_from_output(first, {})
    second = scheduler.schedule(4.0)
    assert second is not None
    assert second.clock == 5.0


def test_preempts_the_youngest_and_recomputes_it_with_the_same_output() -> None:
    simulation = Simulation(make_config(kv_cache__num_blocks=16))
    for name in ("old", "young"):
        simulation.add(make_request(name, *text(8, first=len(name)), sampling=endless(40)))
    simulation.drain()
    assert simulation.scheduler.take_stats().num_preemptions > 0
    preempted = {
        name
        for step in simulation.steps
        for name in step.finished_request_ids
        if any(name == new.request_id for later in simulation.steps[step.step_id :] for new in later.new_requests)
    }
    assert preempted == {"young"}


def test_nothing_to_send_is_none_and_needs_no_wakeup() -> None:
    scheduler = Scheduler(make_config())
    assert scheduler.schedule(1.0) is None
    assert scheduler.next_wakeup() is None


# Outputs


def test_stop_token_is_not_emitted_and_min_tokens_is_respected() -> None:
    scheduler = Scheduler(make_config())
    sampling = SamplingParams(max_tokens=10, min_tokens=1, stop_token_ids=(5,), logprobs=0)
    scheduler.add_request(make_request("r", 1, sampling=sampling))
    results = []
    for now in range(3):
        output = scheduler.schedule(float(now))
        if output is not None:
            results += scheduler.update_from_output(output, {"r": TokenLogprobs(token_id=5, logprob=-1.0)})
    assert [result.token_ids for result in results] == [(5,), ()]
    assert [result.finish_reason for result in results] == [None, "stop"]
    assert results[1].stop_token_id == 5
    assert [len(result.logprobs) for result in results] == [1, 0]
    assert not scheduler.has_unfinished_requests()


def test_length_ends_at_max_tokens_and_at_the_models_length() -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("short", 1, sampling=endless(3)))
    simulation.add(make_request("long", *text(60), sampling=endless(100)))
    simulation.drain()
    assert len(simulation.tokens("short")) == 3
    assert len(simulation.tokens("long")) == 4
    assert simulation.outputs["long"][-1].finish_reason == "length"


def test_output_of_another_engine_counts_as_generated() -> None:
    whole = make_request("whole", *text(6), ("a", 5), 2, sampling=endless(10))
    tokens, _ = reference_output(whole, 64)
    simulation = Simulation(make_config())
    for count in (4, 10):
        simulation.add(
            make_request(
                f"from{count}", *text(6), ("a", 5), 2, sampling=endless(10), output_token_ids=tuple(tokens[:count])
            )
        )
    assert simulation.scheduler.next_wakeup() is not None
    simulation.drain()
    assert simulation.tokens("from4") == tokens[4:]
    assert simulation.tokens("from10") == []
    assert simulation.outputs["from10"][0].finish_reason == "length"


def test_cached_tokens_are_told_once() -> None:
    simulation = Simulation(make_config())
    for name in ("first", "again"):
        simulation.add(make_request(name, *text(14), sampling=endless(3)))
        simulation.drain()
    assert [output.num_cached_tokens for output in simulation.outputs["first"]] == [0, 0, 0]
    assert [output.num_cached_tokens for output in simulation.outputs["again"]] == [12, 0, 0]


# Aborts, resets, restarts


@pytest.mark.parametrize("when", ["waiting", "in flight", "running"])
def test_abort_frees_everything(when: str) -> None:
    simulation = Simulation(make_config())
    simulation.add(make_request("r", ("a", 8), *text(20), sampling=endless(30)))
    if when == "in flight":
        output = simulation.scheduler.schedule(1.0)
        assert output is not None
        assert simulation.scheduler.abort_request("r")
        assert simulation.scheduler.update_from_output(output, simulation.rank.run(output)) == []
    elif when == "running":
        simulation.step()
        assert simulation.scheduler.abort_request("r")
    else:
        assert simulation.scheduler.abort_request("r")
    assert not simulation.scheduler.abort_request("r")
    del simulation.sources["r"]
    simulation.drain()
    assert not any(cached.request_ids for cached in simulation.scheduler.encoder_cache.cached.values())


def test_restart_recomputes_everything_and_counts_nothing_twice() -> None:
    simulation = Simulation(make_config())
    for name in "ab":
        simulation.add(make_request(name, (name, 8), *text(20, first=len(name)), sampling=endless(12)))
    for _ in range(6):
        simulation.step()
    assert simulation.scheduler.schedule(simulation.now) is not None
    before = simulation.scheduler.take_stats()
    simulation.recover()
    simulation.drain()
    after = simulation.scheduler.take_stats()
    assert before.encoder.queries == 2
    assert (after.prefix_queries, after.encoder.queries, after.num_preemptions) == (0, 0, 0)


def test_ranks_hear_of_the_end_of_a_hold_window() -> None:
    simulation = Simulation(make_config(encoder_cache__min_hold_time_ms=500.0))
    simulation.add(make_request("r", ("a", 8), 1, max_tokens=1))
    while simulation.step():
        pass
    simulation.reset_encoder_cache()
    output = simulation.step()
    assert output is not None
    assert (output.phase, output.free_encoder_mm_hashes) == ("idle", ("a",))
    assert simulation.rank.blocks.num_held_blocks == 2
    assert simulation.step() is None
    wakeup = simulation.scheduler.next_wakeup()
    assert wakeup == pytest.approx(0.501)
    assert wakeup is not None
    simulation.now = wakeup
    assert simulation.step() is not None
    assert simulation.rank.blocks.num_held_blocks == 0
    assert simulation.scheduler.next_wakeup() is None


# Cost


def test_who_waits_for_kv_blocks_is_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_config(kv_cache__num_blocks=16, scheduler__max_num_seqs=2))
    looked_up = []
    find_prefix = simulation.scheduler.kv.find_prefix

    def counting(request: Request) -> list[int]:
        looked_up.append(request.request_id)
        return find_prefix(request)

    monkeypatch.setattr(simulation.scheduler.kv, "find_prefix", counting)
    simulation.add(make_request("running", *text(32), sampling=endless(20)))
    simulation.add(make_request("waiting", *text(40, first=2), sampling=endless(2)))
    simulation.drain()
    assert len(simulation.steps) > 20
    assert looked_up == ["running", "waiting", "waiting"]


def _decode_step_seconds(num_waiting: int) -> float:
    scheduler = Scheduler(
        make_config(
            model__max_model_len=4096,
            kv_cache__block_size=16,
            kv_cache__num_blocks=4096,
            scheduler__max_num_seqs=256,
            scheduler__max_num_batched_tokens=8192,
            scheduler__max_waiting_requests=100_000,
        )
    )
    for index in range(256 + num_waiting):
        scheduler.add_request(make_request(f"r{index}", 1, 2, 3, sampling=endless()))
    seconds = []
    for now in range(60):
        begin = time.thread_time()
        output = scheduler.schedule(float(now))
        seconds.append(time.thread_time() - begin)
        assert output is not None
        token = TokenLogprobs(token_id=1, logprob=0.0)
        scheduler.update_from_output(output, dict.fromkeys(output.num_scheduled_tokens, token))
    return statistics.quantiles(seconds[5:], n=4)[0]


def test_schedule_takes_a_millisecond_at_256_running_whatever_waits() -> None:
    few, many = _decode_step_seconds(0), _decode_step_seconds(20_000)
    assert few < 0.003, "1 ms on an idle core, some slack for a busy one"
    assert many < 4 * few
