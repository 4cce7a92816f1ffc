"""Makes the turns of chat requests without a server."""

from jpaged import SamplingParams
from jpaged.server.messages.turn_form import TurnForm


def form_of(body, tokenizer, **parsers) -> TurnForm:
    """Return the turn that a chat request asks for, with a model's tokenizer and parsers."""
    return TurnForm(body.turn(SamplingParams(), 400), tokenizer, **parsers)
