"""Measures what the Jenga paper measured beside waste: prefixes and images asked for again, the vision cache,
speculation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from jpaged.benchmarks.memory_shapes import SHAPES, ModelShape
from jpaged.benchmarks.memory_simulation import Outcome, held_by_one, requests_of, simulate
from jpaged.benchmarks.memory_traces import Demand, draw_articles, draw_image_questions
from jpaged.scheduling import Scheduler

ARTICLES = (8, 12, 24)
"""Numbers of articles that questions are asked about."""
ARTICLE_TOKENS = (8_000, 12_000)
"""Their mean lengths."""
ARTICLE_MODEL, ARTICLE_GIB = "Gemma-3-27B", 24.0
IMAGE_MODEL, IMAGES, IMAGE_GIB = "Llama-3.2-11B-Vision", 48, 4.0
WAYS = (
    ("jpaged", "lru"),
    ("jpaged", "aligned"),
    ("jpaged", "predicted"),
    ("PagedAttention, largest page", "aligned"),
)
"""Allocators and eviction orders that are compared where requests share something."""

PAPER_VISION = 1.88
PAPER_SPECULATION = 1.58
STEP_TOKENS = (512, 1024, 2048)
"""Budgets of a step for which the vision cache is measured: prompts are computed in chunks of them."""


@dataclass(frozen=True)
class VisionModel:
    """Describes the work that one request's prompt is.

    Attributes:
        shape: name of its `ModelShape`.
        parameters: number of the language model's, each of which multiplies every token once.
        crops, patches: images that the encoder sees of a request, and patches of each.
    """

    shape: str
    parameters: float
    crops: int
    patches: int

    @property
    def encoding(self) -> float:
        """Return the products of encoding all crops once, by SigLIP-400M: 27 layers of width 1152, MLP 4304."""
        weights = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
        attention = 27 * 2 * 1152 * self.patches
        return self.crops * self.patches * float(weights + attention)


VISION_MODELS = (VisionModel("LLaVA-OneVision-7B", 7.6e9, 10, 729), VisionModel("Gemma-3-27B + images", 27e9, 8, 4096))


@dataclass(frozen=True)
class VisionCache:
    """Says what the vision cache saves.

    Attributes:
        step_tokens: most tokens of a step.
        runs: chunks that hold image tokens, a request; without the cache each of them runs the encoder.
        factor: work of a request's prompt without the cache, as a multiple of that with it.
    """

    model: str
    step_tokens: int
    runs: float
    factor: float


@dataclass(frozen=True)
class JengaResults:
    """Holds all simulations: by articles' mean length and number, of images asked about again, and of the vision
    cache."""

    articles: dict[int, dict[int, list[tuple[str, str, Outcome]]]]
    images: list[tuple[str, str, Outcome]]
    vision: list[VisionCache]


def run(num_requests: int, seed: int, say: Callable[[str], None]) -> JengaResults:
    """Simulate `num_requests` questions about images, and as many about articles of each length."""
    articles: dict[int, dict[int, list[tuple[str, str, Outcome]]]] = {}
    for tokens in ARTICLE_TOKENS:
        articles[tokens] = {}
        for number in ARTICLES:
            say(f"{ARTICLE_MODEL}, {number} articles of {tokens} tokens")
            asked = draw_articles(number, num_requests, seed, mean=tokens)
            articles[tokens][number] = _shared(ARTICLE_MODEL, ARTICLE_GIB, asked)
    say(f"{IMAGE_MODEL}, {IMAGES} images")
    images = _shared(IMAGE_MODEL, IMAGE_GIB, draw_image_questions(IMAGES, num_requests, seed))
    vision = []
    for model in VISION_MODELS:
        say(f"{model.shape}, vision cache")
        vision += [vision_cache(model, tokens) for tokens in STEP_TOKENS]
    return JengaResults(articles, images, vision)


def articles_held(system: str, tokens: int) -> float:
    """Return how many articles of so many tokens the pool holds of which each is computed by one sequence alone: more
    are never found in it."""
    shape = _shape(ARTICLE_MODEL, ARTICLE_GIB)
    return ARTICLE_GIB * 2**30 / held_by_one(system, shape, tokens)


def _shape(model: str, pool_gib: float) -> ModelShape:
    return replace(next(shape for shape in SHAPES if shape.name == model), pool_gib=pool_gib)


def _shared(model: str, pool_gib: float, demands: Sequence[Demand]) -> list[tuple[str, str, Outcome]]:
    shape = _shape(model, pool_gib)
    return [
        (system, eviction, simulate(system, shape, demands, prefix_caching=True, prefix_eviction=eviction))
        for system, eviction in WAYS
    ]


def vision_cache(model: VisionModel, step_tokens: int, requests: int = 24) -> VisionCache:
    """Serve prompts of images and a short question, and count the chunks that hold tokens of images."""
    shape = next(shape for shape in SHAPES if shape.name == model.shape)
    prompt = shape.image_tokens + 43
    memory, served = requests_of("jpaged", shape, [Demand(prompt, 40)] * requests)
    scheduler = Scheduler(memory, max_num_seqs=64, max_num_batched_tokens=step_tokens)
    for request in served:
        scheduler.add(request)
    runs = 0
    while scheduler.has_work:
        step = scheduler.schedule()
        runs += sum(chunk.start < shape.image_tokens for chunk in step.chunks)
        scheduler.dispatched(step)
        scheduler.update(step, [0] * len(step.samples), [0.0] * len(step.samples))
    each, prefill = runs / requests, prompt * model.parameters
    factor = (prefill + each * model.encoding) / (prefill + model.encoding)
    return VisionCache(model.shape, step_tokens, each, factor)
