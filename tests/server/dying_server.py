"""Serves a model whose engine fails at its fortieth step, or stays in it, or makes no more steps but can be saved.

Run: dying_server.py FOLDER fails|hangs|rests [STATE_DIR]; with a folder its state is saved there, and it drains for no
time.

A thread that never ends is there too, as a device's may be: a process that waited for it would never end.
"""

import sys
import threading
from pathlib import Path

from live_server import make_llm

from jpaged import AsyncLLM
from jpaged.engine.engine import Engine
from jpaged.server.logs import configure_logs
from jpaged.server.process import run_server
from jpaged.server.settings import ServerSettings

llm = make_llm(sys.argv[1])
dispatch, steps = llm.control.engine.runner.dispatch_all, iter(range(10**6))


def failing(scheduled):
    if next(steps) >= 40:
        if sys.argv[2] == "hangs":
            print("it hangs", flush=True)
            threading.Event().wait()
        raise RuntimeError("the device fell off the bus")
    return dispatch(scheduled)


step = Engine.step
if sys.argv[2] == "rests":
    Engine.step = lambda engine: step(engine) if next(steps) < 40 else []
else:
    llm.control.engine.runner.dispatch_all = failing
    threading.Thread(target=threading.Event().wait).start()
configure_logs("info")
kept = {}
if len(sys.argv) > 3:
    kept = {"state_dir": Path(sys.argv[3]), "save_every": 0.05, "drain_seconds": 0.0, "health_timeout": 1.0}
settings = ServerSettings(model="tiny", port=0, **kept)
sys.exit(run_server(AsyncLLM.from_llm(llm), settings, lambda url: print(url, flush=True)))
