"""A pass goes out before the tokens of the step before are read, and its draw after them; anything may fail between."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import late_draws
import pytest
from checkpoints import make_checkpoint
from fake_device import FakeDevice
from small_rules import Masks, changing, constrained_alone, constrained_request, with_runs
from small_schedulers import group, make_request, make_scheduler
from thorough import rarely
from tiny_chat_model import byte_level_tokenizer
from unpaged import alone, hash_model

from jpaged import LLM
from jpaged.engine.engine import Engine
from jpaged.execution import InFlight
from jpaged.execution.readouts.base import Readings
from jpaged.scheduling.speculation import StepCosts

GROUPS = [group()]
COSTS = StepCosts(token=0.01, verifying=0.15)


class Fault(Exception):
    """Stands for a device that fails."""


class Device:
    """Takes the place of `jpaged.execution.Runner`, for any number of replicas.

    Attributes:
        calls: what was done, in order: compute, draw, read.
        fail: called with each point that is passed, before and after each call.
    """

    def __init__(self, schedulers) -> None:
        self._layouts = [scheduler.memory.layout for scheduler in schedulers]
        self.calls: list[str] = []
        self.fail = lambda point: None
        self.worker = SimpleNamespace(
            restart=self.restart, close=lambda: None, compilations=SimpleNamespace(running=None, num_recompiles=0)
        )
        self.restart()

    def restart(self) -> None:
        self.devices = [FakeDevice(layout, hash_model) for layout in self._layouts]
        self.undrawn = False

    def dispatch_all(self, steps):
        if not any(step.chunks for step in steps):
            return [None] * len(steps)
        names = self._done("compute", lambda: [d.compute(s) for d, s in zip(self.devices, steps, strict=True)])
        self.undrawn = True
        readings = Readings(lambda: [self._draw(steps, names)])
        if not any(step.draws_late for step in steps):
            readings.start()
        return [InFlight(step, readings, r) if step.chunks else None for r, step in enumerate(steps)]

    def _draw(self, steps, names):
        assert self.undrawn, "a draw follows the pass that it is of"
        self.undrawn = False

        def draw():
            return [d.draw(s, n) for d, s, n in zip(self.devices, steps, names, strict=True)]

        drawn = self._done("draw", draw)

        def wait(replica):
            self._done("read", lambda: None)
            tokens, top = drawn[replica]
            return tokens, [-0.5] * len(tokens), top

        return SimpleNamespace(field="sampled", wait=wait)

    def _done(self, name, call):
        self.fail(f"before {name}")
        result = call()
        self.calls.append(name)
        self.fail(f"after {name}")
        return result

    def give_back(self, pages) -> None:
        pass


def make_engine(replicas: int = 1, **options) -> Engine:
    schedulers = [make_scheduler(40, prefix_caching=True, costs=COSTS, **options) for _ in range(replicas)]
    return Engine(schedulers, Device(schedulers), max_model_len=64)


def make_requests():
    constrained = [constrained_request([5, 6, number], 9, with_runs, width=1 + number % 2) for number in range(3)]
    return [*constrained, make_request([7, 1], 9), constrained_request([8], 5, changing)]


def finish(engine: Engine, requests) -> None:
    for _ in range(500):
        if not engine.has_work:
            break
        engine.step()
    expected = [
        *(constrained_alone(request, GROUPS, with_runs) for request in requests[:3]),
        [alone(requests[3], GROUPS)[0]],
        constrained_alone(requests[4], GROUPS),
    ]
    assert [[seq.output_token_ids for seq in request.sequences] for request in requests] == expected
    assert not any(replica.in_flight for replica in engine.replicas)
    assert all(replica.memory.num_used_blocks == 0 for replica in engine.replicas)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_pass_goes_out_before_the_step_before_is_read_and_its_draw_after(replicas):
    engine, requests = make_engine(replicas), make_requests()
    for request in requests:
        engine.add(request)
    finish(engine, requests)
    calls = [name for name, _ in itertools.groupby(engine.runner.calls)]
    late = "".join(name[0] for name in calls)
    assert late.startswith("cd" + "crd" * 3), "compute, read, draw"


def test_without_grammars_a_step_is_drawn_before_the_step_before_is_read():
    engine = make_engine()
    request = make_request([7, 1], 9)
    engine.add(request)
    while engine.has_work:
        engine.step()
    assert "".join(name[0] for name in engine.runner.calls) == "cd" + "cdr" * 8 + "r"


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("error", [Fault, KeyboardInterrupt])
@pytest.mark.parametrize(
    "point", ["before compute", "after compute", "before read", "after read", "before draw", "after draw"]
)
def test_a_failure_at_each_point_between_pass_and_draw_changes_no_token(point, error, replicas):
    for number in range(7):
        engine, requests = make_engine(replicas), make_requests()
        passed = itertools.count()

        def fail(where, passed=passed, number=number):
            if where == point and next(passed) == number:
                raise error(where)

        engine.runner.fail = fail
        for request in requests:
            engine.add(request)
        with pytest.raises(error):
            while engine.has_work:
                engine.step()
        finish(engine, requests)


def test_a_grammar_that_raises_between_pass_and_draw_changes_no_token(monkeypatch):
    for number in range(1, 12):
        engine, requests = make_engine(), make_requests()
        rules = requests[0].sequences[0].grammar
        accept, calls = rules.accept, itertools.count(1)

        def failing(token, accept=accept, calls=calls, number=number):
            if next(calls) == number:
                raise Fault
            accept(token)

        rules.accept = failing
        for request in requests:
            engine.add(request)
        failed = False
        while engine.has_work:
            try:
                engine.step()
            except Fault:
                failed = True
        assert failed or number > 9
        finish(engine, requests)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_slow_mask_is_waited_for_only_where_no_replica_runs_anything_else(monkeypatch, replicas):
    engine, masks, waits = make_engine(replicas), Masks(), []
    slow = constrained_request([5, 6], 6, masks=masks)
    slow.sequences[0].grammar.is_slow = True
    others = [make_request([7, number], 24) for number in range(2 * replicas - 1)]

    def wait(several):
        waits.extend(made for each in several for made in each.being_made)
        masks.finish()

    monkeypatch.setattr("jpaged.engine.engine.wait_for_mask", wait)
    for request in (slow, *others):
        engine.add(request)
    for number in range(1, 24):
        engine.step()
        assert {len(request.sequences[0].output_token_ids) for request in others} == {number - 1}
    assert not waits and len(slow.sequences[0].output_token_ids) < 3
    while engine.has_work:
        engine.step()
    assert len(waits) >= 3
    assert [[seq.output_token_ids for seq in slow.sequences]] == [constrained_alone(slow, GROUPS)]
    assert [request.sequences[0].output_token_ids for request in others] == [alone(r, GROUPS)[0] for r in others]


@pytest.mark.parametrize("replicas", [1, 2])
def test_settling_after_an_interrupted_read_makes_the_draw_that_was_kept_back(replicas):
    engine, requests = make_engine(replicas), make_requests()
    for request in requests:
        engine.add(request)
    engine.step()

    def interrupt(where):
        if where == "before read":
            raise KeyboardInterrupt

    engine.runner.fail = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.fail = lambda where: None
    assert engine.runner.undrawn
    engine.settle()
    assert not engine.runner.undrawn and not any(replica.in_flight for replica in engine.replicas)
    assert all(seq.num_pending == 0 for request in requests for seq in request.sequences)
    finish(engine, requests)


def test_requests_aborted_between_pass_and_draw_leave_the_others_their_tokens():
    engine, requests = make_engine(), make_requests()
    gone = constrained_request([9, 9], 20)
    for request in (gone, *requests):
        engine.add(request)
    engine.step()
    engine.runner.fail = lambda where: (_ for _ in ()).throw(KeyboardInterrupt) if where == "before read" else None
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.runner.fail = lambda where: None
    engine.abort(gone)
    finish(engine, requests)


SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 6, "max_model_len": 64, "max_num_batched_tokens": 32}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama", folder)
    byte_level_tokenizer().save_pretrained(folder)
    return LLM(str(folder), **SETTINGS)


@pytest.mark.parametrize("number", [3, rarely(1), rarely(2), rarely(6)])
def test_a_fault_or_ctrl_c_on_a_device_changes_no_token(llm, number):
    expected = late_draws.undisturbed(llm)
    for name, tokens in late_draws.interrupted(llm, number).items():
        assert tokens == expected, name


@pytest.mark.parametrize("number", [2, rarely(1), rarely(4)])
def test_a_state_that_is_saved_between_pass_and_draw_goes_on_with_the_same_tokens(llm, tmp_path, number):
    """A handler of a signal saves while the tokens of the step before are waited for, and the draw waits for them."""
    expected = late_draws.undisturbed(llm)
    assert late_draws.saved(llm, tmp_path, number) == [expected] * 2


def test_a_state_is_not_saved_within_the_draw(llm, tmp_path):
    added = late_draws.requests(llm)
    engine, refused = llm.control.engine, []
    read = engine.runner.read

    def handler(forward):
        with pytest.raises(RuntimeError, match="refused in the middle of a step"):
            llm.save_state(tmp_path)
        refused.append(1)
        return read(forward)

    engine.runner.read = handler
    for _ in range(4):
        engine.step()
    del engine.runner.read
    assert len(refused) >= 3
    assert late_draws.finish(llm, added) == late_draws.undisturbed(llm)
