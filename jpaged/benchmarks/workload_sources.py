"""Lists where the published workloads of all benchmarks come from, and under which licence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Tells of a workload.

    Attributes:
        file: pattern of its file in the folder of workloads; "shipped" where it is in the package.
        fields: what each line of the file has; "" where it is shipped.
        origin: where it is published, with its licence.
    """

    file: str
    fields: str
    origin: str


LENGTHS, TEXTS = "`prompt_len`, `output_len`", "`prompt`, `output`"

SOURCES = {
    "ShareGPT": Source("shipped", "", "efeslab/Nanoflow, `datasets/traces/sharegpt.csv` (Apache-2.0)"),
    "GSM8K": Source("shipped", "", "openai/grade-school-math, `test.jsonl` (MIT)"),
    "Alpaca": Source("`alpaca*.jsonl`", TEXTS, "tatsu-lab/stanford_alpaca, `alpaca_data.json` (CC BY-NC 4.0)"),
    "WMT16": Source(
        "`wmt16*.jsonl`",
        "`en`, `de`",
        "newstest2016 of the WMT16 news task, Helsinki-NLP/OPUS-MT-testsets (no licence stated)",
    ),
    "ShareGPT, several turns": Source(
        "`sharegpt*multiturn*.csv`", LENGTHS, "project-etalon/etalon, `sharegpt_8k` (Apache-2.0)"
    ),
    "arXiv summarization": Source("`arxiv*.csv`", LENGTHS, "project-etalon/etalon, `arxiv_summarization` (Apache-2.0)"),
    "Mooncake": Source(
        "`mooncake-conversation*.csv`",
        f"`arrival_s`, {LENGTHS}, `hash_ids`",
        "kvcache-ai/Mooncake, conversation trace (Apache-2.0)",
    ),
    "Azure": Source(
        "`azure2023-conv*.csv`",
        f"`arrival_s`, {LENGTHS}",
        "Azure/AzurePublicDataset, `AzureLLMInferenceTrace_conv.csv` (CC BY 4.0)",
    ),
    "MetaGPT": Source("`metagpt*.jsonl`", "`prompt`, `output`", "microsoft/ParrotServe, `metagpt` workload (MIT)"),
    "Natural Questions": Source(
        "`rag-nq*.jsonl`",
        "`question`, `title`, `text`, `answers`",
        "nelson-liu/lost-in-the-middle, `nq-open-oracle` (MIT; texts of Wikipedia, CC BY-SA)",
    ),
    "MMLU": Source("`mmlu*.jsonl`", "`prefix`, `questions`", "chain-of-thought-hub's MMLU, dev and test (MIT)"),
    "HumanEval": Source("`humaneval*.jsonl`", "`prompt`, `canonical_solution`", "openai/human-eval (MIT)"),
    "MT-Bench": Source("`mtbench*.jsonl`", "`turns`, perhaps `reference`", "lm-sys/FastChat, `mt_bench` (Apache-2.0)"),
}
"""The workloads by their public names."""


FOLDER = "lie in the folder that `--workloads` names; what is not there is left out, or replaced as the page says"


def sources(names: Sequence[str], others: str = FOLDER) -> str:
    """Return a page's section on where its workloads come from.

    Args:
        names: the workloads of the page, in `SOURCES`.
        others: says where files that are not shipped are looked for.
    """
    rows = [
        f"| {name} | {one.file} | {one.fields or '-'} | {one.origin} |" for name in names for one in [SOURCES[name]]
    ]
    table = "\n".join(["| workload | file | fields | source |", "| --- | --- | --- | --- |", *rows])
    shipped = [name for name in names if SOURCES[name].file == "shipped"]
    are = f"{' and '.join(shipped)} {'are' if len(shipped) > 1 else 'is'} shipped with the package. " if shipped else ""
    return f"""## Where the workloads come from

{are}Other files {others}.

{table}
"""
