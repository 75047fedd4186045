"""P7, P8, 1.2, 1.8: what is refused, with which words, and that bystanders do not notice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.base.config.resolved import KVSpec
from headrace.base.errors import ConfigError
from headrace.base.wire.request import EngineRequest, RowSampling, StopRules
from headrace.core.admission import check_stated_length
from headrace.core.ports import AdmissionHook, AdmissionVerdict
from tests.core.harness import WIDTH, Driver, make_request, make_spec


def refusal(request: EngineRequest, **config: Any) -> Any:
    """The error of a request beside a bystander who must get its tokens all the same."""
    driver = Driver(make_spec(**config))
    driver.add(make_request(1000, 8), request)
    driver.run()
    assert len(driver.tokens[1000]) == 8
    driver.assert_at_rest()
    return driver.finished[request.id].error


def changed(**fields: Any) -> EngineRequest:
    return msgspec.structs.replace(make_request(1), **fields)


def sampled(**fields: Any) -> EngineRequest:
    return make_request(1, sampling=RowSampling(**fields))


def test_a_stated_length_that_the_stated_memory_cannot_hold_is_refused_at_start() -> None:
    driver = Driver(make_spec(num_blocks=21, block_tokens=4, max_model_len=256))
    memory = KVSpec(block_tokens=4, prefix_caching=True, memory_bytes=4096)
    check_stated_length(memory, driver.core.kv)
    check_stated_length(msgspec.structs.replace(memory, least_tokens=80), driver.core.kv)
    stated = msgspec.structs.replace(memory, least_tokens=81)
    with pytest.raises(ConfigError, match=r"--max-model-len 81: --kv-memory 4096 bytes .* 80 tok"):
        check_stated_length(stated, driver.core.kv)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (changed(prompt=b""), "prompt"),
        (changed(prompt=b"123"), "prompt"),
        (make_request(1, [5, WIDTH]), "prompt"),
        (make_request(1, [5, -1]), "prompt"),
        (changed(id=-1), "id"),
        (changed(id=1 << 63), "id"),
        (changed(weight=0.0), "weight"),
        (changed(weight=float("nan")), "weight"),
        (changed(priority=1 << 40), "priority"),
        (changed(deadline_s=float("inf")), "deadline_s"),
        (changed(cache_salt="x" * 129), "cache_salt"),
        (changed(tenant="x" * 129), "tenant"),
        (changed(hook_payloads={"lora": msgspec.Raw(b"1")}), "hook_payloads.lora"),
        (changed(stop=StopRules(max_tokens=-1)), "max_tokens"),
        (changed(stop=StopRules(max_tokens=3, min_tokens=4)), "min_tokens"),
        (changed(stop=StopRules(max_tokens=3, stop_ids=(WIDTH,))), "stop_ids"),
        (sampled(temperature=float("nan")), "temperature"),
        (sampled(temperature=-0.1), "temperature"),
        (sampled(top_p=float("inf")), "top_p"),
        (sampled(repetition_penalty=0.0), "repetition_penalty"),
        (sampled(logit_bias={WIDTH: 1.0}), "logit_bias"),
        (sampled(logit_bias={1: float("nan")}), "logit_bias"),
        (sampled(allowed_ids=()), "allowed_ids"),
        (sampled(allowed_ids=(WIDTH,)), "allowed_ids"),
        (sampled(bad_words=((1, -2),)), "bad_words"),
        (sampled(logprob_ids=(WIDTH,)), "logprob_ids"),
        (sampled(logprobs=-2), "logprobs"),
        (sampled(prompt_logprobs=WIDTH + 1), "prompt_logprobs"),
        (sampled(seed=1 << 64), "seed"),
        (sampled(suppressed_ids=(WIDTH,), min_tokens=1), "suppressed_ids"),
    ],
)
def test_bad_values_are_refused_with_their_field(request_: EngineRequest, field: str) -> None:
    error = refusal(request_)
    assert error is not None and error.kind == "InvalidRequest" and error.field == field


@pytest.mark.parametrize(
    "request_",
    [
        changed(cache_salt="x" * 128),
        changed(id=(1 << 63) - 1),
        make_request(1, [0, WIDTH - 1]),
        changed(stop=StopRules(max_tokens=3, min_tokens=3, stop_ids=(WIDTH - 1,))),
        sampled(logprobs=WIDTH),
        sampled(seed=(1 << 63) - 1),
        changed(stop=StopRules(max_tokens=(1 << 62))),
    ],
)
def test_the_exact_limit_is_accepted(request_: EngineRequest) -> None:
    assert refusal(request_) is None


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers() -> None:
    error = refusal(make_request(1, 257), num_blocks=500, max_model_len=256)
    assert error.kind == "ContextTooLong" and "257" in error.message and "256" in error.message


def test_a_prompt_that_fills_the_context_may_be_scored_but_not_continued() -> None:
    config = {"num_blocks": 500, "max_model_len": 64}
    assert refusal(make_request(1, 64, max_tokens=0), **config) is None
    assert refusal(make_request(1, 64, max_tokens=1), **config).kind == "ContextTooLong"


def test_the_queue_is_bounded_by_requests() -> None:
    """ENG-11, 1.2: free rows do not count as waiting; the refusal says when to come back."""
    driver = Driver(make_spec(max_running=2, max_queued_requests=3))
    driver.add(*(make_request(id, 4) for id in range(7)))
    driver.run()
    refused = [id for id, f in driver.finished.items() if f.error is not None]
    assert sorted(refused) == [5, 6]
    error = driver.finished[5].error
    assert error is not None and error.kind == "QueueFull"
    assert "5 requests wait already, at most 3" in error.message
    assert error.retry_after_s is not None and 1.0 <= error.retry_after_s <= 150.0


def test_the_queue_is_bounded_by_prompt_tokens() -> None:
    driver = Driver(make_spec(max_queued_tokens=50))
    driver.add(make_request(1, 60), make_request(2, 10))
    driver.run()
    assert driver.finished[1].error is None, "one request alone is never too much for the queue"
    error = driver.finished[2].error
    assert error is not None and error.kind == "QueueFull" and "60 prompt tokens" in error.message


def test_an_unexpected_exception_ends_that_request_without_its_text() -> None:
    """P7, P19."""

    class Broken(AdmissionHook):
        name = "broken"

        def admit(self, request: EngineRequest) -> Any:
            if request.id == 2:
                raise RuntimeError("secret at 0xdeadbeef")
            return AdmissionVerdict("yes")

        def ready(self, request_id: int, computed: object) -> Any:
            return AdmissionVerdict("yes")

        def payload(self, request_ids: list[int]) -> bytes | None:
            return None

        def finish(self, request_id: int) -> None:
            assert request_id != 2, "never admitted"

    driver = Driver(make_spec(), hooks=[Broken()])
    driver.add(make_request(1), make_request(2))
    driver.run()
    error = driver.finished[2].error
    assert error is not None and "secret" not in error.message and error.kind == "EngineError"
    assert len(driver.tokens[1]) == 8


@pytest.mark.parametrize("policy", ["fcfs", "fair"])
def test_a_priority_that_would_be_ignored_is_refused(policy: str) -> None:
    """Defect: `priority` was ignored silently under fcfs and fair."""
    driver = Driver(make_spec(policy=policy))
    driver.add(make_request(1, priority=-3), make_request(2, priority=0))
    driver.run()
    error = driver.finished[1].error
    assert error is not None and (error.kind, error.field) == ("InvalidRequest", "priority")
    assert policy in error.message
    assert driver.finished[2].error is None


def test_a_key_has_so_many_prompt_tokens_in_flight_and_no_more() -> None:
    driver = Driver(make_spec(max_prompt_tokens_per_key=50))
    driver.add(make_request(1, 30, tenant="a"), make_request(2, 20, tenant="a"))
    driver.add(make_request(3, 1, tenant="a"), make_request(4, 50, tenant="b"))
    driver.run()
    error = driver.finished[3].error
    assert error is not None and error.kind == "RateLimited" and error.retry_after_s
    assert "50 prompt tokens in flight" in error.message
    assert [driver.finished[id].error for id in (1, 2, 4)] == [None] * 3
    driver.add(make_request(5, 50, tenant="a"))
    driver.run()
    assert driver.finished[5].error is None, "what has ended counts no more"
