"""The page on speculative decoding: it is the command's, and says whether what was asked for was reached."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks import coupling
from jpaged.benchmarks import speculative as measure
from jpaged.benchmarks.coupling import Coupling
from jpaged.benchmarks.speculative import Speculated
from jpaged.benchmarks.speculative_prompts import prompts_say
from jpaged.benchmarks.speculative_report import page
from jpaged.cli import bench
from jpaged.cli.main import app

FOUND = Speculated("retrieval", 1, "ngram", 40, 30, 96, 60, 96, 3.0, 2.0, 1.62, 1.4, 2, 2)
OTHER = replace(FOUND, kind="chat", batch=8, drafted=0, accepted=0, ratio=0.98, outputs=8)
COUPLINGS = {("chat", 8): Coupling(100, 0.5, 0.4, 0.41)}


def written(found, couplings=COUPLINGS):
    told = {"command": "jpaged bench speculative", "machine": "2 cores", "model": "m", "rounds": 3}
    return page(found, couplings, **told, temperature=0.0, coupling_temperature=1.0, sources="From files.")


def test_the_page_has_speeds_couplings_and_a_verdict():
    text = written([FOUND, OTHER])
    assert "| retrieval | 1 | ngram | 75% | 1.60 | 32.0 | 48.0 | 1.62 | 1.40 |" in text
    assert "| chat | 8 | ngram | none made |" in text
    assert "| chat | layers:8 | 100 | 41.0% | 40.0% | 50.0% | 9.0% |" in text
    assert "From files. Prompts of each kind: 2 at batch 1, 8 at batch 8." in text
    assert "At batch 1, on retrieval, n-grams reach 1.5 times the speed: 1.62." in text


def test_the_limit_of_batch_1_judges_batch_1_alone():
    chat = replace(OTHER, batch=1)
    text = written([FOUND, chat, replace(OTHER, ratio=0.9), replace(FOUND, batch=8, ratio=1.3)])
    assert "Elsewhere at batch 1 they never fall below 0.97 of the speed without: the least is 0.98 (chat)." in text
    assert "At batch 8 no speed was asked for. It is from 0.90 (chat) to 1.30 (retrieval) of that without;" in text
    assert "below 0.97 are chat (0.90)." in text
    slow = written([replace(FOUND, ratio=1.2), replace(chat, ratio=0.9), OTHER], {})
    assert "do not reach 1.5" in slow and "they fall below 0.97" in slow and "second table" not in slow
    assert "none is below 0.97." in slow


@pytest.mark.parametrize("names", [[], ["specbench"], ["specbench", "wmt16"], ["mtbench", "rag-nq"]], ids=str)
def test_the_page_says_which_files_stand_for_spec_bench(names, tmp_path):
    for name in names:
        (tmp_path / f"{name}-dev.jsonl").write_text("")
    said = prompts_say(tmp_path if names else None)
    assert ("No file of Spec-Bench" in said) == (names[:1] == ["mtbench"])
    assert ("WMT16" in said) == ("wmt16" in names) and ("three in a prompt" in said) == ("rag-nq" in names)


def test_the_command_measures_the_coupling_of_layers_and_writes_the_page(tmp_path, monkeypatch):
    class Plain:
        def generate(self, texts, params, use_tqdm):
            assert params.temperature == 1.0, "greedy draws say nothing of couplings"
            return texts

    asked = {}

    def run(plain, drafting, prompts, **options):
        asked.update(options, ways=list(drafting), kinds=list(prompts))
        return [FOUND]

    monkeypatch.setattr(bench, "build_llm", lambda *args, **settings: Plain())
    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr("jpaged.loading.load_model", lambda *args, **options: None)
    monkeypatch.setattr(coupling, "measure", lambda loaded, layers, outputs, **options: COUPLINGS["chat", 8])
    options = ["--speculative", "ngram", "--speculative", "layers:8", "--alone", "2", "--docs", str(tmp_path)]
    shown = CliRunner().invoke(app, ["bench", "speculative", *options])
    assert shown.exit_code == 0, shown.output
    assert asked["ways"] == ["ngram", "layers:8"] and asked["batches"] == (1, 8) and asked["alone"] == 2
    text = (tmp_path / "speculative.md").read_text()
    assert "`jpaged bench speculative --speculative ngram --speculative layers:8 --alone 2 --docs docs`" in text
    assert "| maths | layers:8 | 100 |" in text
