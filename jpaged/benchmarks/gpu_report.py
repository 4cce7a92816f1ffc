"""Writes the GPU check's results as a section of a Markdown page."""

from __future__ import annotations

import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

START, END = "<!-- gpu_check: start -->", "<!-- gpu_check: end -->"
COLUMNS = {
    "decode_bytes_per_second": "decode, GB/s (share of copy)",
    "prefill_flops": "prefill, TFLOP/s (share of product)",
    "kv_write_bytes_per_second": "KV write, GB/s (share of copy)",
    "block_copy_bytes_per_second": "block copy, GB/s (share of copy)",
}
PACKAGES = ("jaxlib", "jax", "jax-triton", "triton", "torch")


def versions() -> dict[str, str]:
    """Return the versions of the packages that the figures depend on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def section(results: dict[str, Any]) -> str:
    """Return the results as Markdown, as far as they go; `results` is what ``scripts/gpu_check.py`` writes as JSON."""
    used = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    lines = [START, f"## On {results['device']}", "", f"{results['date']}, `{results['command']}`; {used}."]
    if {"copy_bytes_per_second", "gemm_flops"} <= results.keys():
        lines += _kernels(results)
    wrong = [line["check"] for line in results["checks"] if not line["error"] <= line["limit"]]
    lines += ["", f"{len(results['checks'])} checks against float64, {len(wrong)} failed. " + "; ".join(wrong)]
    lines += _engine(results)
    lines += [f"Failed: {name}: {why}." for name, why in results.get("failed", {}).items()]
    return "\n".join([*(line.rstrip() for line in lines), END])


def _kernels(results: dict[str, Any]) -> list[str]:
    copy, product = results["copy_bytes_per_second"], results["gemm_flops"]
    lines = [
        f"Copying moves {copy / 1e9:.0f} GB/s (read and written), bfloat16 products do {product / 1e12:.0f} TFLOP/s.",
        "",
        "| kernels | " + " | ".join(COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for name, figures in results.get("kernels", {}).items():
        if "missing" in figures:
            lines.append(f"| {name} | {figures['missing']} |" + " |" * (len(COLUMNS) - 1))
            continue
        cells = []
        for key in COLUMNS:
            unit, peak = (1e12, product) if key.endswith("flops") else (1e9, copy)
            value = figures.get(key)
            cells.append("" if value is None else f"{value / unit:.0f} ({value / peak:.2f})")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _engine(results: dict[str, Any]) -> list[str]:
    lines = []
    for name, found in results.items():
        if name.startswith("decode of "):
            step = f"{found['step_seconds'] * 1e3:.2f} ms a step, {found['step_over_ideal']:.2f} times what reading"
            speed = f"{found['tokens_per_second']:.0f} tokens/s"
            lines.append(f"- {name} sequences: {step} weights and KV once takes, {speed}")
    if (found := results.get("prefill")) is not None:
        lines.append(f"- prompts: {found['tokens_per_second']:.0f} tokens/s, {found['share_of_peak']:.2f} of the peak")
    if (found := results.get("throughput")) is not None:
        lines.append(f"- ShareGPT-like lengths: {found['output_tokens_per_second']:.0f} output tokens/s")
    if (found := results.get("host gap")) is not None:
        lines.append(f"- the device waits for the host {found['host_gap_share']:.1%} of the time")
    if (found := results.get("plan")) is not None:
        lines.append(f"- `jpaged plan` says {found['planned_over_peak']:.2f} times the memory that was in use at most")
    if (found := results.get("tiles")) is not None:
        better = sum(rules != best for rules, best in found.values())
        lines.append(f"- tiles: of {len(found)} shapes {better} have faster ones than the rules'")
    return ["", "Llama-3.1-8B's shape, random bfloat16 weights:", "", *lines] if lines else []


def write(page: Path, results: dict[str, Any]) -> None:
    """Put the section in place of the one before, or at the end of the page."""
    text = page.read_text(encoding="utf-8") if page.exists() else "# Performance\n"
    new = section(results)
    if START in text and END in text:
        before, rest = text.split(START, 1)
        text = before + new + rest.split(END, 1)[1]
    else:
        text = f"{text.rstrip()}\n\n{new}\n"
    page.write_text(text, encoding="utf-8")


def today() -> str:
    """Return the date of a run."""
    return datetime.date.today().isoformat()
