"""Generate for a batch of prompts with the demo model, then show the texts, the speed and the memory."""

from __future__ import annotations

import time

from rich.console import Console

from jpaged import SamplingParams
from jpaged.cli.waiting import waiting

QUESTIONS = [
    "What is the capital of France, and which river runs through it?",
    "Explain in two sentences why the sky is blue.",
    "Write a haiku about the sea in winter.",
    "What is 17 + 25? Answer with the number only.",
    "Name three uses for a paper clip.",
    "Translate to French: Good morning, how are you?",
    "What does a compiler do?",
    "Give me a recipe for pancakes with four ingredients.",
    "Who wrote the play Romeo and Juliet?",
    "What is the difference between weather and climate?",
    "Write a Python function that returns the square of a number.",
    "Why do leaves change colour in autumn?",
    "Suggest a name for a small bakery.",
    "What is the largest planet of the solar system?",
    "Describe a sunrise to someone who has never seen one.",
    "How does a bicycle stay upright?",
    "List the first five prime numbers.",
    "What should I pack for a day in the mountains?",
]


def main() -> None:
    console = Console(highlight=False)
    start = time.perf_counter()
    with waiting("loading smollm2-135m: importing JAX"):
        from jpaged import LLM

        llm = LLM("smollm2-135m", dtype="float32", max_model_len=1024, max_num_seqs=32)
    console.print(f"engine ready in {time.perf_counter() - start:.1f} s; generating for {len(QUESTIONS)} prompts")

    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    start = time.perf_counter()
    outputs = llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=96))
    seconds = time.perf_counter() - start

    for question, output in zip(QUESTIONS, outputs, strict=True):
        console.print(f"\n[bold]{question}[/bold]")
        console.print(output.outputs[0].text, markup=False)
    generated = sum(len(output.outputs[0].token_ids) for output in outputs)
    prompted = sum(len(output.prompt_token_ids) for output in outputs)
    console.print(
        f"\n{len(outputs)} prompts, {prompted} prompt tokens, {generated} output tokens in {seconds:.1f} s: "
        f"[bold]{generated / seconds:.1f} output tokens/s[/bold] (compilation on the first run included)\n"
    )
    console.print("memory in the busiest step:")
    console.print(str(llm.memory_report(peak=True)), markup=False)
    console.print("\nmemory now (evictable = kept for prompts that begin alike):")
    console.print(str(llm.memory_report()), markup=False)


if __name__ == "__main__":
    main()
