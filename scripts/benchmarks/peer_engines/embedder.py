"""Encodes texts by one engine, in its own environment: ``embedder.py jpaged`` or ``embedder.py sentence-transformers``.

The first line of the input has the model and the texts, and is answered by their vectors; every further line is
answered by the seconds and the processor seconds that they take again.
"""

import json
import os
import sys
import time


def encoder_of(name, model, batch_size):
    """Return a function from texts to vectors, and the function that ends the engine."""
    if name == "jpaged":
        from jpaged import LLM

        llm = LLM(model)
        llm.warmup()
        return (lambda texts: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]), llm.close
    from sentence_transformers import SentenceTransformer

    made = SentenceTransformer(model, device="cpu")
    return (lambda texts: made.encode(texts, batch_size=batch_size)), lambda: None


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    first = json.loads(sys.stdin.readline())
    encode, close = encoder_of(sys.argv[1], first["model"], first["batch_size"])
    vectors = [[float(number) for number in vector] for vector in encode(first["texts"])]
    print(json.dumps({"vectors": vectors}), file=answers, flush=True)
    for _ in sys.stdin:
        began, before = time.perf_counter(), time.process_time()
        encode(first["texts"])
        said = {"seconds": time.perf_counter() - began, "processor": time.process_time() - before}
        print(json.dumps(said), file=answers, flush=True)
    close()


if __name__ == "__main__":
    main()
