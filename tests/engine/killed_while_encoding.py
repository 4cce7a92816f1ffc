"""Runs prompts with images, saves the state after every step, and is killed while its encoder has the second image.

python killed_while_encoding.py MODEL STATE PLACEHOLDER
"""

from __future__ import annotations

import os
import signal
import sys

from saved_image_prompts import PARAMS, SETTINGS, prompts_with

from jpaged import LLM


def main(model: str, state: str, placeholder: int) -> None:
    llm = LLM(model, **SETTINGS)
    worker = llm.control.engine.runner.worker
    encode, calls = worker.model.encode, []

    def killed(*args):
        calls.append(args)
        pool = encode(*args)
        if len(calls) == 2:  # the device may be in the midst of it
            os.kill(os.getpid(), signal.SIGKILL)
        return pool

    worker.model.encode = killed
    for prompt in prompts_with(placeholder):
        llm.control.engine.add(llm.input_processor.process(prompt, PARAMS))
    while True:
        llm.control.engine.step()
        llm.save_state(state)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
