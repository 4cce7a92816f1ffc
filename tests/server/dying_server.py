"""Serves a model whose engine fails at its fortieth step. Run: dying_server.py FOLDER"""

import sys

from live_server import make_llm

from jpaged import AsyncLLM
from jpaged.server.logs import configure_logs
from jpaged.server.process import run_server
from jpaged.server.settings import ServerSettings

llm = make_llm(sys.argv[1])
dispatch, steps = llm._engine.runner.dispatch_all, iter(range(10**6))


def failing(scheduled):
    if next(steps) >= 40:
        raise RuntimeError("the device fell off the bus")
    return dispatch(scheduled)


llm._engine.runner.dispatch_all = failing
configure_logs("info")
settings = ServerSettings(model="tiny", port=0)
sys.exit(run_server(AsyncLLM.from_llm(llm), settings, lambda url: print(url, flush=True)))
