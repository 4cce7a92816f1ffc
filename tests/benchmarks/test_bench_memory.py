"""The memory simulation: allocators that give what they say, known waste, and tables of all of it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from jpaged import planning
from jpaged.benchmarks import memory_hybrids, memory_jenga, memory_page, memory_report
from jpaged.benchmarks.memory_contiguous import Buddy, Regions, oracle, powers_of_two
from jpaged.benchmarks.memory_hybrids import HybridHits
from jpaged.benchmarks.memory_jenga import VISION_MODELS, JengaResults, VisionCache, vision_cache
from jpaged.benchmarks.memory_shapes import SHAPES
from jpaged.benchmarks.memory_simulation import SYSTEMS, Outcome, Shares, build, held_by_one, known_before, simulate
from jpaged.benchmarks.memory_traces import (
    Demand,
    draw_articles,
    draw_conversations,
    draw_image_questions,
    draw_lengths,
    prompt_tokens,
    public_name,
    read_trace,
)
from jpaged.benchmarks.memory_workloads import read_workloads
from jpaged.cli.main import app
from jpaged.execution.caches.base import BlockFormat, group_specs
from jpaged.execution.caches.registry import layer_caches
from jpaged.loading.open_checkpoint import described
from jpaged.loading.parameters.targets import abstract_model
from jpaged.model_api import BuildContext

BY_NAME = {shape.name: shape for shape in SHAPES}
PUBLISHED = Path(planning.__file__).parent / "shapes"
CHATS = draw_lengths(100, 60, 80, seed=0, sigma=0.5)


def test_the_simulated_blocks_of_llama_3_2_vision_are_the_engines(tmp_path):
    shutil.copy(PUBLISHED / "llama-3.2-11b-vision.json", tmp_path / "config.json")
    config, family = described(tmp_path)
    dtype = jnp.dtype(jnp.bfloat16)
    groups = abstract_model(family, config, BuildContext(dtype=dtype)).layer_groups
    real = group_specs(layer_caches(groups, BlockFormat(16, dtype, 1)))
    simulated = BY_NAME["Llama-3.2-11B-Vision"].groups()
    assert [(group.block_size, group.real_bytes) for group in real] == [
        (group.block_size, group.real_bytes) for group in simulated
    ]


@given(st.integers(1, 100), st.lists(st.integers(1, 40), max_size=30), st.randoms())
def test_buddy_regions_never_overlap_and_merge_when_all_are_back(size, wishes, random):
    buddy, taken = Buddy(size), []
    for wish in wishes:
        region = buddy.take(wish)
        if region is None:
            if taken:
                buddy.give_back(*taken.pop(random.randrange(len(taken))))
            continue
        assert 1 << region[1] >= wish > 1 << region[1] >> 1, "the next power of two"
        taken.append(region)
        slots = [slot for start, order in taken for slot in range(start, start + (1 << order))]
        assert len(set(slots)) == len(slots) and all(0 <= slot < size for slot in slots)
    for region in taken:
        buddy.give_back(*region)
    assert buddy._free == Buddy(size)._free


def test_regions_of_one_size_are_as_many_as_fit():
    regions = Regions(10, 3)
    assert sorted(regions.take(1)[0] for _ in range(3)) == [0, 1, 2] and regions.take(1) is None


def test_orcas_reservations():
    assert powers_of_two(100, 25) == 132 and powers_of_two(100, 32) == 132
    assert oracle(100, 25) == 125


def test_a_static_split_agrees_on_the_prefix_that_all_groups_have():
    shape = replace(BY_NAME["Gemma-3-27B"], pool_gib=8)
    memory = build("static split", shape, [Demand(4000, 10)], prefix_caching=True).memory
    tokens = list(range(4000))
    memory.add(0, 0)
    for end in range(1000, 4001, 1000):
        memory.allocate(0, end, first_write=end - 1000)
        memory.commit(0, tokens, end)
    memory.free(0)
    memory.parts[1].reset_prefix_cache()
    memory.add(1, 1)
    assert memory.match_prefix(1, tokens) == 0
    memory.allocate(1, 2000, first_write=0)
    memory.commit(1, tokens, 2000)
    memory.add(2, 2)
    assert memory.match_prefix(2, tokens) == 2000, "the windows' group has no longer one"
    assert memory.capacity(2) == 2000


@pytest.mark.parametrize(("name", "point"), memory_report.PAPER_WASTE.items())
def test_one_page_size_for_all_layers_wastes_what_the_paper_says_and_jpaged_does_not(name, point):
    shape, (length, percent) = BY_NAME[name], point
    waste = {
        system: 1 - shape.needed_bytes(length) / held_by_one(system, shape, length)
        for system in ("PagedAttention, largest page", "jpaged")
    }
    assert waste["PagedAttention, largest page"] == pytest.approx(percent / 100, abs=0.003)
    assert 0 <= waste["jpaged"] < 0.05


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "name",
    [
        "OPT-13B",
        "Llama-3.2-11B-Vision",
        "Jamba-1.5-Mini",
        "Llama-3.1-8B + 1B draft",
        "Gemma-3-27B + images",
        "PyramidKV on Llama-3.1-8B",
    ],
)
def test_every_allocator_serves_every_kind_of_model(name, system):
    shape = replace(BY_NAME[name], pool_gib=3, max_len=2048)
    demands = CHATS if name == "OPT-13B" else [Demand(2000, 40)] * 100
    outcome = simulate(system, shape, demands)
    assert outcome.refused == 0 and outcome.batch >= 1
    shares = outcome.shares
    assert min(shares.tokens, shares.reserved, shares.internal, shares.external) >= 0
    assert shares.tokens + shares.reserved + shares.internal + shares.external == pytest.approx(1)


def test_the_order_of_the_allocators_is_that_of_the_papers():
    shape = replace(BY_NAME["OPT-13B"], pool_gib=4)
    tokens = [simulate(system, shape, CHATS).shares.tokens for system in memory_report.ONE_KIND]
    assert tokens == sorted(tokens) and tokens[-1] > 0.85 > 0.6 > tokens[-2]


def test_what_waits_longer_than_the_pool_allows_is_refused_and_counted():
    shape = replace(BY_NAME["Llama-3.1-8B"], pool_gib=0.5)
    for system in SYSTEMS[1:]:
        assert simulate(system, shape, [Demand(10_000, 10), *CHATS]).refused == 1
    assert simulate("contiguous max", shape, CHATS).refused == len(CHATS)


def test_conversations_hit_the_prefix_cache():
    shape = replace(BY_NAME["Llama-3.1-8B"], pool_gib=6)
    talks = draw_conversations(60, seed=1)
    assert talks == draw_conversations(60, seed=1) and len(talks) == 60
    outcome = simulate("jpaged", shape, talks, prefix_caching=True, prefix_eviction="predicted")
    assert 0.1 < outcome.hit_rate < 1


def test_a_draft_models_page_is_as_large_as_the_models_where_there_is_one_size():
    shape = BY_NAME["Llama-3.1-8B + 1B draft"]
    held = {system: held_by_one(system, shape, 8192) for system in ("PagedAttention, largest page", "jpaged")}
    assert held["PagedAttention, largest page"] / held["jpaged"] == pytest.approx(1.6, abs=0.01)
    assert shape.needed_bytes(8192) == 8192 * (32 * 4096 + 16 * 2048)


def test_articles_asked_about_again_are_found_as_far_as_the_pool_holds_them():
    shape = replace(BY_NAME["Gemma-3-27B"], pool_gib=4)
    few, many = (draw_articles(number, 40, seed=0, mean=2000) for number in (3, 30))
    assert known_before(few)[:1] == [0] and sum(known_before(few)) > 35 * 1000
    options = {"prefix_caching": True, "prefix_eviction": "predicted"}
    found = [simulate("jpaged", shape, demands, **options).reuse for demands in (few, many)]
    split = simulate("static split", shape, few, **options)
    assert split.reuse > 0 and split.image_reuse == 0
    assert found[0] > 0.8 > 0.5 > found[1]


def test_an_images_kv_is_found_by_the_next_question_about_it():
    shape = replace(BY_NAME["Llama-3.2-11B-Vision"], pool_gib=3)
    few, many = (
        simulate("jpaged", shape, draw_image_questions(images, 60, seed=0), prefix_caching=True) for images in (4, 40)
    )
    assert few.image_reuse > 0.8 and few.hit_rate > 0 and few.reuse == 0
    assert few.image_reuse > many.image_reuse


def test_without_a_vision_cache_every_chunk_that_holds_an_image_runs_the_encoder():
    model = VISION_MODELS[0]
    small, large = (vision_cache(model, tokens, requests=3) for tokens in (512, 8192))
    assert small.runs >= 7290 / 512 > 2 >= large.runs >= 1
    assert small.factor > large.factor >= 1
    assert model.encoding == pytest.approx(10 * 729 * 0.456e9, rel=0.01)


def test_workloads_have_the_names_that_readers_know(tmp_path):
    assert public_name(tmp_path / "sharegpt8k-multiturn-lengths.csv") == "ShareGPT, several turns"
    assert public_name(tmp_path / "my-trace.csv") == "my-trace"


def test_equal_hash_ids_are_equal_tokens_and_the_rest_is_the_requests_own():
    a = prompt_tokens(Demand(1030, 1, (5, 9)), unique=0)
    b = prompt_tokens(Demand(1030, 1, (5, 9)), unique=1)
    assert a[:1024] == b[:1024] and len(a) == len(b) == 1030
    assert not set(a[1024:]) & set(b[1024:])
    assert len(prompt_tokens(Demand(700, 1, (5, 9)), unique=0)) == 700


def test_traces_are_read_with_and_without_hash_ids(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_len,output_len,hash_ids\n0,1500,5,0 14-15\n1,0,7,\n2,20,3,\n")
    assert read_trace(path, 9) == [Demand(1500, 5, (0, 14, 15)), Demand(20, 3)]
    assert len(read_trace(path, 1)) == 1
    path.write_text("len_reference\n49\n")
    assert read_trace(path, 9) == [Demand(20, 49)]
    path.write_text("words\n49\n")
    with pytest.raises(ValueError, match="has the columns words, not prompt_len and output_len"):
        read_trace(path, 9)


def results_of_one() -> memory_report.Results:
    outcome = Outcome("jpaged", 12.5, Shares(0.9, 0.0, 0.06, 0.04), 0.5, 0.75, 0, 0, 0.25, 30)
    alone = [("jpaged", "lru", outcome)]
    jenga = JengaResults({12_000: {8: alone, 12: alone}}, alone, [VisionCache("V", 512, 8.0, 1.5)])
    return memory_report.Results(
        {"chats": [outcome], "ShareGPT": [outcome]},
        {
            "M": [replace(outcome, refused=1, system=system) for system in SYSTEMS],
            "Llama-3.1-8B + 1B draft": [
                replace(outcome, system=system, batch=25.0 if system == "jpaged" else 12.5) for system in SYSTEMS
            ],
        },
        [("M", "jpaged", "lru", outcome)],
        jenga,
        [HybridHits("H", 16, "predicted", {"8 articles": outcome, "instructions": outcome})],
    )


def test_the_page_has_every_table_and_says_what_stands_out():
    text = memory_page.page(results_of_one(), "jpaged bench memory --docs docs", ["chats"])
    assert "ShareGPT is shipped with the package." in text and "| Azure | `azure2023-conv*.csv` |" in text
    assert "| jpaged | 12.5 | 90.0% | 0.0% | 6.0% | 4.0% |\n" in text, "the paper tells nothing of these requests"
    assert "| jpaged | 12.5 | 90.0% | 0.0% | 6.0% | 4.0% | 96.3 % |" in text, "but of ShareGPT"
    assert "| M | 12.5 (90%)* |" in text
    assert "| M | jpaged | lru | 50.0% | 12.5 |" in text
    assert "| Ministral-8B | 131,072 | 56.25% |" in text
    assert "| Llama-3.1-8B + 1B draft | 8,192 | 37.50% |" in text
    assert "| tokens of one | allocator | prefix_eviction | the pool holds | 8 articles | 12 articles |" in text
    assert "| 12,000 | jpaged | lru | 17.6 | 75%; 12.5 | 75%; 12.5 |" in text
    assert "| jpaged | lru | 25% | 12.5 |" in text
    assert "| model | tokens of a block | prefix_eviction | 8 articles | instructions |" in text
    assert "| H | 16 | predicted | 75%; 12.5; 30 | 75%; 12.5; 30 |" in text
    assert "| V | 512 | 8.0 | 1.50 |" in text
    assert "| Llama-3.1-8B + 1B draft | 2.00 | 1.58 in requests/s |" in text
    assert "jpaged runs no more than another allocator with M (all alike)." in text
    assert "Llama-3.2-11B-Vision, Gemma-3-27B's is 73.4 %" in text.replace("\n  ", " ")


def test_the_page_says_where_small_blocks_find_less_than_inflated_ones_and_run_fewer_requests():
    results = results_of_one()
    (small,) = results.hybrids
    more = replace(small.outcomes["instructions"], reuse=0.8, batch=20.0, steps=20)
    later = replace(more, reuse=0.7, steps=40)
    large = replace(small, block_tokens=144, outcomes={"8 articles": later, "instructions": more})
    text = memory_page.page(replace(results, hybrids=[small, large]), "jpaged bench memory", ["chats"])
    assert "as much or more in 1 of 2 cells; less in H on instructions (75% against 80%)." in text
    assert "no step with a full batch is left to count: H on 8 articles (30 steps against 40)." in text
    assert "Fewer requests run at once in H on instructions (12.5 against 20.0): what is protected" in text


def test_the_command_line_writes_the_page_with_the_command_that_made_it(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    results, given = results_of_one(), []
    monkeypatch.setattr(memory_jenga, "run", lambda requests, seed, say: given.append(requests) or results.jenga)
    monkeypatch.setattr(memory_hybrids, "run", lambda requests, seed, say: results.hybrids)
    monkeypatch.setattr(memory_report, "run", lambda chats, *rest, say: given.append(list(chats)) or results)
    folder = tmp_path / "workloads"
    folder.mkdir()
    (folder / "azure2023-conv-dev.csv").write_text("prompt_len,output_len\n20,3\n")
    trace = tmp_path / "mine.csv"
    trace.write_text("prompt_len,output_len\n20,3\n")
    asked = ["--workloads", str(folder), "--trace", str(trace), "--docs", str(tmp_path / "docs"), "--seed", "3"]
    shown = CliRunner().invoke(app, ["bench", "memory", *asked])
    assert shown.exit_code == 0, shown.output
    assert given == [300, ["ShareGPT", "Azure 2023, conversations", "mine"]]
    page = (tmp_path / "docs" / "memory.md").read_text()
    command = "jpaged bench memory --workloads workloads --trace mine.csv --seed 3 --docs docs"
    assert f"Made by `{command}` with these requests: ShareGPT (OPT-13B);" in page
    assert "mine (OPT-13B); drawn long prompts (models whose layers differ)" in page
    assert (tmp_path / "docs" / "memory.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "docs" / "memory.svg").read_text()


def test_published_workloads_are_found_by_how_their_files_begin(tmp_path):
    (tmp_path / "alpaca-2k.jsonl").write_text('{"prompt": "abc", "output": "defgh"}\n')
    (tmp_path / "mooncake-conversation.csv").write_text("prompt_len,output_len,hash_ids\n9,2,0\n")
    found = read_workloads(tmp_path, [], None, None, 20, 0, lambda: len)
    assert found.chats["Alpaca"] == [Demand(4, 5)] and len(found.chats["ShareGPT"]) == 80
    assert found.long == found.talks == [Demand(9, 2, (0,))]
    assert found.names[-1] == "Mooncake, conversations (prefix caching)"


def test_the_command_line_names_what_it_cannot_read(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("words\n49\n")
    result = CliRunner().invoke(app, ["bench", "memory", "--trace", str(path)])
    assert result.exit_code == 2 and "columns words" in result.output.replace("\n", " ")
