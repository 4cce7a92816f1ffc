"""Requests and a scheduler's queues as plain data: numbers, texts, bytes, lists and mappings, and back.

`saved_params` has what the user asked for, `saved_requests` how far it has come, `saved_images` the images of its
prompt, `saved_scheduler` the queues. What looks at a sequence's tokens, a grammar or a search for stop strings, is not
among it: it is made again from the tokens.
"""

from jpaged.scheduling.saving.saved_images import Pictures, load_array, plain_array
from jpaged.scheduling.saving.saved_requests import load_request, request_data
from jpaged.scheduling.saving.saved_scheduler import load_scheduler, scheduler_data

__all__ = [
    "Pictures",
    "load_array",
    "load_request",
    "load_scheduler",
    "plain_array",
    "request_data",
    "scheduler_data",
]
