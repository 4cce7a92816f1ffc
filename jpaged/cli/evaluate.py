"""The command ``jpaged eval``: the tasks of the Language Model Evaluation Harness."""

from __future__ import annotations

from importlib.util import find_spec

import typer

from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import Model
from jpaged.cli.waiting import waiting


@with_engine_options("batch")
def evaluate(ctx: typer.Context, model: Model = "smollm2-135m", *, engine: EngineOptions) -> None:
    """Evaluate a model on lm_eval's tasks.

    Options that are not listed here are those of lm_eval: --tasks, --num_fewshot, --limit, --apply_chat_template,
    --output_path, --include_path, ...
    """
    if find_spec("lm_eval") is None:
        raise typer.BadParameter("lm_eval not found: pip install '.[eval]' in a clone of jpaged")
    if not any(one.split("=")[0] in ("--tasks", "-t") for one in ctx.args):
        raise typer.BadParameter("give --tasks, such as --tasks arc_easy; `lm_eval ls tasks` lists them")
    llm = engine.build(model, reads_text=True)
    with waiting("importing lm_eval"):
        from jpaged.integrations.lm_eval import evaluate as run

    run(llm, ctx.args)
