"""Follows the grammars of running sequences: masks of a step in one call, slow masks, and runs of forced tokens."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import FIRST_COMPLETED, Future, wait

from jpaged.scheduling.hooks import TokenRules
from jpaged.scheduling.request import Request, Sequence, Stop, end_of
from jpaged.scheduling.speculation.base import StepCosts, best_length
from jpaged.scheduling.step import ScheduledStep

_LONGEST_WAIT = 0.005
"""Seconds after which an idle wait for a mask ends: a signal, an abort or a new request may have come."""


class Constrained:
    """Follows the grammars of a scheduler's sequences.

    A sequence whose masks outlast a step does not run ahead: its mask is made in a thread, and it is planned again once
    that is done, so that no other sequence waits. Its grammar is not looked at meanwhile.

    Args:
        costs: of steps by their tokens, from which it follows whether a forced run is computed as one chunk; None = no
            run is.

    Attributes:
        num_forced: tokens that were appended without a draw.
    """

    def __init__(self, costs: StepCosts | None) -> None:
        self._costs = costs
        self._begun: dict[Sequence, Future[None]] = {}
        self._ran: dict[Sequence, TokenRules] = {}
        self.num_forced = 0

    def follow(self, step: ScheduledStep, tokens: Seq[int], verified: Container[Sequence]) -> dict[Sequence, Stop]:
        """Give a step's tokens to the grammars of their sequences, and make all masks in one call.

        Tokens that follow drafts are left out: which of them count is known one by one.

        Args:
            verified: the sequences of which the step verifies drafts.

        Returns:
            The sequences whose text was at its end before their token, as a mask that was made in a thread showed, and
            why.
        """
        due: list[TokenRules] = []
        ended: dict[Sequence, Stop] = {}
        # Plain decodes have no grammar.
        for sample, token in zip(step.other_samples, tokens[step.decodes.number :], strict=True):
            seq, rules = sample.seq, sample.seq.grammar
            if rules is None or sample.chunk.drafts or sample.is_overtaken or seq.finished:
                continue
            if (stop := end_of(rules)) is not None:
                ended[seq] = stop
                continue
            rules.accept(token)
            seq.is_slow = rules.is_slow
            # In a thread only if no pass ahead waits for it, no draft of this step follows it, and it is not the last.
            goes_on = len(seq.token_ids) + 1 < sample.request.max_total_tokens and seq not in verified
            if seq.is_slow and seq.num_pending == 1 and goes_on and not rules.is_ready:
                assert rules.masks is not None, "rules without a grammar are never slow"
                self._begun[seq] = rules.masks.begin(rules.grammar)
                seq.awaits_mask = True
            else:
                due.append(rules)
        _make(due)
        return ended

    def begin_step(self) -> None:
        """Let the sequences whose masks were made take part in the next step."""
        for seq in [seq for seq, made in self._begun.items() if made.done()]:
            self._begun.pop(seq).result()
            seq.awaits_mask = False

    @property
    def being_made(self) -> list[Future[None]]:
        """Return the masks that are made in a thread."""
        return list(self._begun.values())

    def let_go(self, sequences: Iterable[Sequence]) -> None:
        """Forget sequences that ended."""
        for seq in sequences:
            if (made := self._begun.pop(seq, None)) is not None:
                made.cancel()  # unless it is being made

    def clear(self) -> None:
        """Forget all sequences; their grammars are free to be followed anew afterwards."""
        wait([made for made in self._begun.values() if not made.cancel()])
        self._begun.clear()
        self._ran.clear()

    def forced(self, request: Request, seq: Sequence, batch: int) -> Seq[int]:
        """Return the tokens that follow the sequence's newest one whatever is drawn, to be appended without draws; none
        where computing them in one chunk does not pay, or their log-probabilities are asked for.

        Args:
            batch: number of sequences that run.
        """
        rules = seq.grammar
        if rules is None or self._costs is None or seq.awaits_mask or request.params.logprobs is not None:
            return ()
        run = rules.forced()
        if len(run) < 2:  # the step that draws it costs no more than one that computes it
            return ()
        pays = best_length([1.0] * (len(run) - 1), self._costs, batch=batch, verifies=False)
        return run[: pays + 1] if pays else ()

    def append(self, seq: Sequence, token: int) -> None:
        """Append a forced token; `make_masks` follows."""
        assert seq.grammar is not None
        seq.grammar.accept(token)
        seq.token_ids.append(token)
        self.num_forced += 1
        self._ran[seq] = seq.grammar

    def make_masks(self) -> None:
        """Make the masks after all runs that were appended, in one call."""
        ran, self._ran = self._ran, {}
        _make(ran.values())


def wait_for_mask(replicas: Iterable[Constrained]) -> None:
    """Wait for a moment, or until one of the masks that are made for any replica is there.

    Call it where no replica can do anything else: those that share a step wait for each other.
    """
    wait([made for each in replicas for made in each.being_made], _LONGEST_WAIT, FIRST_COMPLETED)


def _make(several: Iterable[TokenRules]) -> None:
    """Make the masks of those rules that have a grammar, in one call."""
    grammars = [(rules.masks, rules.grammar) for rules in several if rules.masks is not None]
    if grammars:
        grammars[0][0].make([grammar for _, grammar in grammars])
