"""Run with a checkpoint's folder, one for the disk and the bytes of a small pool on a process of 2 devices."""

import sys

from test_disk_cache import SETTINGS, answers, check_empty, disk_engine

from jpaged import LLM

if __name__ == "__main__":
    folder, disk, pool = sys.argv[1:]
    expected = answers(LLM(folder, tensor_parallel_size=2, **SETTINGS))
    llm = disk_engine(folder, disk, int(pool), tensor_parallel_size=2)
    assert llm.control.engine.runner.spec.shards == 2
    assert answers(llm) == expected
    assert answers(llm) == expected
    assert llm.stats().disk.hits > 0, "nothing was read"
    check_empty(llm)
    print("the same tokens")
